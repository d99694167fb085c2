"""The protocol of audits: an audit runs on a model and data, and returns findings.

A finding is a measurement of a model with its interval, its label, and the limit that the model's
claim sets. Every audit returns findings of this type, even if it could not be run. Steps record and
store findings without knowing their audit. Evidence packs contain the records of the findings
(docs/evidence.md), and one verdict on a model follows from all of them.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dp_core.config.fields import Config
from dp_core.labels import Label

RELEASED = "the released model"
_AUDITS = tomllib.loads(Path(__file__).with_name("audits.toml").read_text("utf-8"))
COIN_BOUND = "epsilon_lower_bound_given"  # key of bounds by texts declared as divided by coins
Verdict = Literal["consistent", "contradicted", "inconclusive", "invalid", "not run"]
Level = Literal["canary", "example", "document", "patient", "group"]


_RESULTS = ("level", "value", "interval", "confidence", "null_control", "power")


class NullDistribution(Config):
    """The distribution of the audit's value for a model that remembers nothing.

    Attributes:
        of: the method by which such a model was simulated, in words.
        low, high: the band of the model's values; at most a share `alarm_rate` is above `high`.
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
        interval: (low, high), at the confidence `confidence`. If the audit bounds the claim, `low`
            is a lower bound, and `high` the largest bound that the audit could have given; ε has no
            upper bound.
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
    subject: str = RELEASED
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
        run = self.verdict != "not run"
        wrong = [name for name in _RESULTS if (getattr(self, name) in (None, "")) == run]
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


class Finding(AuditRecord):
    """The record of one audit of one model, with figures for a step's metrics and a report.

    Attributes:
        metrics: numbers to record under the finding's label, by name.
        public_metrics: numbers that follow from settings and the claim alone, by name.
        updates: number of training updates of the measured model, if metrics are recorded by it.
        details: figures for the report's tables, in the form of the audit.
    """

    metrics: dict[str, float] = Field(default_factory=dict)
    public_metrics: dict[str, float] = Field(default_factory=dict)
    updates: int = 0
    details: dict[str, Any] = Field(default_factory=dict)

    @property
    def record(self) -> AuditRecord:
        """The record alone, as evidence packs contain it."""
        return AuditRecord.model_validate(self.model_dump(include=set(AuditRecord.model_fields)))


@dataclass(frozen=True)
class Audit:
    """One kind of audit.

    Attributes:
        key, name, measured: fields of its findings.
        step: the step that stores its findings; empty if no step of this version runs it.
        run: measures a model on data that the step prepares, and returns findings. Audits of one
            step have the same type of data, which holds the model.
        several: whether all findings of the step belong to this audit, with separate keys.
    """

    key: str
    name: str
    measured: str
    step: str = ""
    run: Callable[[Any], Sequence[Finding]] | None = None
    several: bool = False

    @classmethod
    def registered(cls, key: str, run: Callable[[Any], Sequence[Finding]] | None = None) -> Self:
        """Return the audit that `audits.toml` describes under this key."""
        return cls(key, run=run, **_AUDITS[key])

    def covers(self, finding: Finding) -> bool:
        """Return whether a finding of the step belongs to this audit."""
        return self.several or finding.key == self.key

    def finding(self, **fields: Any) -> Finding:
        """Return a finding of this audit."""
        return Finding(key=self.key, name=self.name, measured=self.measured, **fields)

    def not_run(self, why: str, label: Label = Label.PUBLIC, **fields: Any) -> Finding:
        """Return the finding of an audit that was not run, with the reason."""
        return self.finding(verdict="not run", finding=why, label=label, **fields)


Word = Literal["contradicted", "invalid", "not audited", "inconclusive", "consistent"]


@dataclass(frozen=True)
class ModelVerdict:
    """The conclusion from all audits of one model.

    Attributes:
        word: `contradicted`: an audit refutes the claim. `invalid`: an audit that can refute the
            claim could not judge, because its null control alarmed or because it had too few
            canaries. `not audited`: no audit that can refute the claim was run, or none of a part
            of it. `inconclusive`: no such audit refutes it, but the result of another audit should
            be looked at. `consistent`: none of these cases.
        sentence: the claim, the word and the reason. The sentence may be published.
    """

    word: Word
    sentence: str


def verdict_of(claim: str, records: Sequence[AuditRecord]) -> ModelVerdict:
    """Return the verdict on a model.

    A single contradiction decides, even if all other audits are consistent. An audit without the
    power to contradict the claim counts as not run. Records for the operator alone enter the
    verdict only if they contradict the claim or could not judge it, because any other word would
    publish a result that was computed from private rows.

    Args:
        claim: the claim in words, for example “ε = 4 at δ = 1e-06 for one patient of “notes””.
        records: records of all audits of the model, run or not, with any label.
    """
    run = [record for record in records if record.verdict != "not run"]
    against = [record for record in run if record.verdict == "contradicted"]
    bounding = [record for record in run if record.bounds_claim]
    judging = [record for record in bounding if record.verdict != "inconclusive"]
    silent = [record for record in judging if record.verdict == "invalid"]
    shown = [record for record in run if record.label is not Label.OPERATOR]
    open_ones = [record for record in shown if record.verdict == "inconclusive"]
    if against:
        return ModelVerdict("contradicted", f"{claim}: contradicted by {_names(against)}.")
    if silent:
        return ModelVerdict("invalid", f"{claim}: {_names(silent)} could not judge it.")
    if not judging:
        reason = "no audit that can contradict it was run"
        if bounding:
            reason = f"even the best result of {_names(bounding)} would not contradict it"
        return ModelVerdict("not audited", f"{claim}: not audited, {reason}.")
    power = f"consistent with {_names(judging)}"
    if open_ones:
        return ModelVerdict(
            "inconclusive", f"{claim}: {power}; {_names(open_ones)} should be looked at."
        )
    return ModelVerdict("consistent", f"{claim}: {power}.")


def _names(records: Sequence[AuditRecord]) -> str:
    """Return the names of the audits; their findings stay in the records, under their labels."""
    return ", ".join(dict.fromkeys(record.name for record in records))
