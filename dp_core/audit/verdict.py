"""The verdict on a model: what all of its audits together leave of its claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dp_core.audit.record import AuditRecord
from dp_core.labels import Label

Word = Literal["contradicted", "invalid", "not audited", "inconclusive", "consistent"]


@dataclass(frozen=True)
class ModelVerdict:
    """What follows from all audits of one model.

    Attributes:
        word: `contradicted`: an audit refutes the claim; `invalid`: one that can refute claims
            could not judge, its null control alarmed; `not audited`: none that can refute a claim
            was run; `inconclusive`: none of those that were refutes it, and another audit found
            what somebody should look at; `consistent`: none of them refutes it.
        sentence: the claim and the word, with the reason, fit for publication.
    """

    word: Word
    sentence: str


def verdict_of(claim: str, records: Sequence[AuditRecord]) -> ModelVerdict:
    """Return the verdict on a model.

    One contradiction decides, however many other audits are consistent. Of what only the operator
    may see, the verdict takes nothing but contradictions and audits that could not judge: anything
    else would tell everybody what was read from private rows.

    Args:
        claim: in words, as “ε = 4 at δ = 1e-06 for one patient of “notes””.
        records: of every audit of the model, run or not, of every label.
    """
    run = [record for record in records if record.verdict != "not run"]
    against = [record for record in run if record.verdict == "contradicted"]
    judging = [record for record in run if record.bounds_claim]
    silent = [record for record in judging if record.verdict == "inconclusive"]
    shown = [record for record in run if record.label is not Label.OPERATOR]
    open_ones = [record for record in shown if record.verdict == "inconclusive"]
    if against:
        return ModelVerdict("contradicted", f"{claim}: contradicted by {_names(against)}.")
    if silent:
        return ModelVerdict("invalid", f"{claim}: not judged by {_names(silent)}, which could not.")
    if not judging:
        return ModelVerdict(
            "not audited", f"{claim}: not audited, no audit that can contradict it was run."
        )
    power = f"consistent with {_names(judging)}"
    if open_ones:
        return ModelVerdict(
            "inconclusive", f"{claim}: {power}; {_names(open_ones)}: somebody should look."
        )
    return ModelVerdict("consistent", f"{claim}: {power}.")


def _names(records: Sequence[AuditRecord]) -> str:
    """Return the audits' names: what they found stands in their records, behind their labels."""
    return ", ".join(dict.fromkeys(record.name for record in records))
