"""The verdict on a model: the conclusion from all of its audits about its claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dp_core.audit.record import AuditRecord
from dp_core.labels import Label

Word = Literal["contradicted", "invalid", "not audited", "inconclusive", "consistent"]


@dataclass(frozen=True)
class ModelVerdict:
    """The conclusion from all audits of one model.

    Attributes:
        word: `contradicted`: an audit refutes the claim. `invalid`: an audit that can refute the
            claim could not judge, because its null control alarmed or because it had too few
            canaries. `not audited`: no audit that can refute the claim was run. `inconclusive`: no
            such audit refutes it, but the result of another audit should be looked at.
            `consistent`: none of these cases.
        sentence: the claim, the word and the reason. The sentence may be published.
    """

    word: Word
    sentence: str


def verdict_of(claim: str, records: Sequence[AuditRecord]) -> ModelVerdict:
    """Return the verdict on a model.

    A single contradiction decides, even if all other audits are consistent. Records for the
    operator alone enter the verdict only if they contradict the claim or could not judge it,
    because any other word would publish a result that was computed from private rows.

    Args:
        claim: the claim in words, for example “ε = 4 at δ = 1e-06 for one patient of “notes””.
        records: records of all audits of the model, run or not, with any label.
    """
    run = [record for record in records if record.verdict != "not run"]
    against = [record for record in run if record.verdict == "contradicted"]
    judging = [record for record in run if record.bounds_claim]
    silent = [record for record in judging if record.verdict in ("invalid", "inconclusive")]
    shown = [record for record in run if record.label is not Label.OPERATOR]
    open_ones = [record for record in shown if record.verdict == "inconclusive"]
    if against:
        return ModelVerdict("contradicted", f"{claim}: contradicted by {_names(against)}.")
    if silent:
        return ModelVerdict("invalid", f"{claim}: {_names(silent)} could not judge it.")
    if not judging:
        return ModelVerdict(
            "not audited", f"{claim}: not audited, no audit that can contradict it was run."
        )
    power = f"consistent with {_names(judging)}"
    if open_ones:
        return ModelVerdict(
            "inconclusive", f"{claim}: {power}; {_names(open_ones)} should be looked at."
        )
    return ModelVerdict("consistent", f"{claim}: {power}.")


def _names(records: Sequence[AuditRecord]) -> str:
    """Return the names of the audits; their findings stay in the records, under their labels."""
    return ", ".join(dict.fromkeys(record.name for record in records))
