"""The protocol of audits: the record of one finding, and the verdict from all findings of a model.

A finding is a measurement of a model with its interval, its label, and the limit that the model's
claim sets. Every audit gives records of this type, even if it was not run. Evidence packs list the
records (docs/evidence.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from dp_core.config.fields import Config
from dp_core.labels import Label

COIN_BOUND = "epsilon_lower_bound_given"  # key of bounds by texts declared as divided by coins
Verdict = Literal["consistent", "contradicted", "inconclusive", "invalid", "not run"]
Level = Literal["canary", "example", "document", "patient", "group"]


class NullDistribution(Config):
    """The distribution of the audit's value for a model that remembers nothing.

    Attributes:
        of: the method by which such a model was simulated, in words.
        low, high: the band of the model's values; a share `alarm_rate` of them is above `high`.
        alarm_rate: α, the probability that the audit calls such a model a leak.
        p_value: the probability that such a model gives a value as large as the measured one, or
            None if it is unknown.
    """

    of: str = Field(min_length=1)
    low: float
    high: float
    alarm_rate: float = Field(gt=0, lt=1)
    p_value: float | None = Field(default=None, ge=0, le=1)


class AuditRecord(Config):
    """One audit of one model.

    Attributes:
        key: identifies the audit; with `level` and `subject` unique among the records of a model.
        name: name of the audit, in words.
        subject: the measured model: the released model, or a model from which it was made.
        level: the kind of item that the audit tries to detect. A claim bounds every audit at or
            below its unit.
        measured: the measured quantity, the method and the unit, in words.
        value: the measurement, or None for an audit that was not run.
        interval: (low, high), at the confidence `confidence`.
        ceiling: the largest value that the claim allows or that can be measured, or None if there
            is neither.
        ceiling_of: the meaning of `ceiling`, in words.
        power: the effect that this audit could have detected, in words.
        null_control: null distribution of the same audit.
        bounds_claim: whether a value above the ceiling refutes the claim. This holds only for
            lower bounds by independent coin flips. Other audits are consistent or inconclusive.
        verdict: the consequence for the claim. An audit that bounds the claim and whose null
            control alarms too often is `invalid`: it has no ceiling and supports no conclusion.
        finding: the result in a sentence, or the reason why the audit was not run.
        label: the audience of the record.
        rows: names and numbers of the groups from which `value` is computed, if there are any.
    """

    key: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    name: str = Field(min_length=1)
    subject: str = "the released model"
    level: Level | None = None
    measured: str = Field(min_length=1)
    value: float | None = None
    interval: tuple[float, float] | None = None
    confidence: float | None = Field(default=None, gt=0, lt=1)
    ceiling: float | None = None
    ceiling_of: str = ""
    power: str = ""
    null_control: NullDistribution | None = None
    bounds_claim: bool = False
    verdict: Verdict
    finding: str = Field(min_length=1)
    label: Label = Label.PUBLIC
    rows: tuple[dict[str, float | str], ...] = ()

    @model_validator(mode="after")
    def _says_all_of_it(self) -> Self:
        parts = {
            "level": self.level,
            "value": self.value,
            "interval": self.interval,
            "confidence": self.confidence,
            "null_control": self.null_control,
            "power": self.power or None,
        }
        run = self.verdict != "not run"
        wrong = [name for name, part in parts.items() if (part is not None) != run]
        if wrong:
            state = "was run and lacks" if run else "was not run and has"
            raise ValueError(f"the audit {self.key} {state}: {', '.join(wrong)}")
        self._refuse_another_verdict()
        return self

    @property
    def blocks_promotion(self) -> bool:
        """Whether this record prevents the model's promotion, regardless of other records."""
        return self.verdict in ("contradicted", "invalid")

    def _refuse_another_verdict(self) -> None:
        """Refuse a verdict that does not follow from the bound and the ceiling.

        Only a lower bound above the claim contradicts it. Only an audit that bounds the claim can
        be invalid, and its bound is not compared with the claim.

        Raises:
            ValueError: the verdict does not follow.
        """
        if self.verdict == "invalid" and (not self.bounds_claim or self.ceiling is not None):
            raise ValueError(
                f"the audit {self.key}: only an audit that bounds the claim is invalid, and it has"
                " no ceiling"
            )
        above = (
            self.bounds_claim
            and self.interval is not None
            and self.ceiling is not None
            and self.interval[0] > self.ceiling
        )
        if above != (self.verdict == "contradicted"):
            raise ValueError(
                f"the audit {self.key}: only, and always, a bound above the claim contradicts it"
            )


def not_run(key: str, name: str, measured: str, why: str) -> AuditRecord:
    """Return the record of an audit that was not run."""
    return AuditRecord(key=key, name=name, measured=measured, verdict="not run", finding=why)


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
