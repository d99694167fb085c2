"""The result of a step: `result.json`, its last file. A step without it has failed."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer

from dp_core.config.fields import Config
from dp_core.config.privacy import UnitName

# ε as JSON: a number, or the string `inf`, because JSON has no infinity. It is never NaN.
Epsilon = Annotated[
    float,
    Field(ge=0, allow_inf_nan=True),
    PlainSerializer(lambda e: "inf" if math.isinf(e) else e, when_used="json"),
]


EXACT_WORDS = "vocabulary of exact counts"  # reason why a use of private text has no guarantee


class MetricRecord(Config):
    """One number with its label. `step` is its update or epoch."""

    name: str
    value: float
    label: Literal["dp", "public", "operator"]
    step: int = 0


class ReleaseRecord(Config):
    """One release of private data, with the mechanism's event, which determines ε.

    A use without any guarantee is a release too: its event is `unaccounted` and its ε is infinite.
    """

    ledger_id: str
    dataset: str
    unit: UnitName
    event: dict[str, Any]  # dp_core.privacy.mechanisms
    epsilon: Epsilon  # PLD, at `delta`
    epsilon_rdp: Epsilon | None
    delta: float
    plan: str = ""  # key of the plan that registered it, with others, before any release
    declared_units: int = 0  # public upper bound on the units; δ must be below its inverse
    released: str = ""  # keyed digest of the released content; empty without a guarantee
    seed_known: bool = False  # the noise came from a seed that was not secret

    @property
    def is_exact_vocabulary(self) -> bool:
        """Whether it is the use of private words without noise that a run's settings request."""
        return self.event.get("reason") == EXACT_WORDS


class StepResult(Config):
    """The results of a finished step, for later steps and for people."""

    version: Literal[2] = 2  # version 1 did not carry uses without a guarantee
    step: str
    spec_hash: str
    outputs: dict[str, str]  # name -> URI
    metrics: list[MetricRecord]
    releases: list[ReleaseRecord] = Field(default_factory=list)  # also of the steps it depends on
    facts: dict[str, Any] = Field(default_factory=dict)  # fit for publication: no private text
    seconds: float = 0.0
    versions: dict[str, str] = Field(default_factory=dict)

    @property
    def operator_files(self) -> frozenset[str]:
        """Files of the output that are for the operator alone and are never passed on."""
        artifacts = self.facts.get("artifacts", ())
        return frozenset(file for file, label, _ in artifacts if label == "operator")
