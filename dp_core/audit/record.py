"""The record of one audit: what was measured of a model, beside what its claim allows.

Every audit hands on records of this one shape, and an audit that was not run is a record too: it
says so. The evidence pack lists them (docs/evidence.md).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from dp_core.config.fields import Config
from dp_core.labels import Label

COIN_BOUND = "epsilon_lower_bound_given"  # key of bounds by texts that somebody says coins divided
Verdict = Literal["consistent", "contradicted", "inconclusive", "not run"]
Level = Literal["canary", "example", "document", "patient", "group"]


class NullControl(Config):
    """What the same audit gives on a model that remembers nothing.

    Attributes:
        of: what stands for such a model, in words.
        low, high: the band in which its value lies, but for `alarm_rate` above `high`.
        alarm_rate: α, how often the audit calls such a model a leak.
        p_value: how often such a model gives a value as large as the measured one; None: unknown.
    """

    of: str = Field(min_length=1)
    low: float
    high: float
    alarm_rate: float = Field(gt=0, lt=1)
    p_value: float | None = Field(default=None, ge=0, le=1)


class AuditRecord(Config):
    """One audit of one model.

    Attributes:
        key: which audit; unique among the records of a model, but for `level` and `subject`.
        name: in words.
        subject: which model was measured: the released one, or one that it was made from.
        level: what the audit tries to detect. A claim bounds what is at or below its unit.
        measured: the quantity, how it is read, and its unit, in words.
        value: the measurement; None where the audit was not run.
        interval: (low, high), at the confidence `confidence`.
        ceiling: the most that the claim allows, or that can be measured; None where neither holds.
        ceiling_of: what `ceiling` is, in words.
        power: what this audit could have found, in words.
        null_control: of the same audit.
        bounds_claim: whether a value above the ceiling refutes the claim: so for lower bounds by
            independent coin flips alone. Other audits can be consistent or inconclusive.
        verdict: what follows for the claim.
        finding: the result in a sentence; of an audit that was not run, why not.
        label: who may see it.
        rows: the groups that make up `value`, where there are any: names and numbers.
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
    null_control: NullControl | None = None
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

    def _refuse_another_verdict(self) -> None:
        """A lower bound above the claim contradicts it, and nothing else does.

        Raises:
            ValueError: the verdict is another one.
        """
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
