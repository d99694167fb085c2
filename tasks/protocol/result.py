"""What a step answers: `result.json`, written last. No result, no success."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer

from dp_core.config.fields import Config
from dp_core.config.privacy import UnitName

# ε as JSON: a number, or the string `inf`, which JSON has no number for. Never NaN.
Epsilon = Annotated[
    float,
    Field(ge=0, allow_inf_nan=True),
    PlainSerializer(lambda e: "inf" if math.isinf(e) else e, when_used="json"),
]


EXACT_WORDS = "vocabulary of exact counts"  # why such a use of private text has no guarantee


class MetricRecord(Config):
    """One number with its label; `step` is the update or epoch it belongs to."""

    name: str
    value: float
    label: Literal["dp", "public", "operator"]
    step: int = 0


class ReleaseRecord(Config):
    """One release of private data: the mechanism's event as data, so that ε is a function of it.

    A use without any guarantee is one too: its event is `unaccounted`, its ε infinite.
    """

    ledger_id: str
    dataset: str
    unit: UnitName
    event: dict[str, Any]  # dp_core.privacy.mechanisms
    epsilon: Epsilon  # PLD, at `delta`
    epsilon_rdp: Epsilon | None
    delta: float
    plan: str = ""  # of the run that registered it, with others, before the first release
    declared_units: int = 0  # public upper bound on the units, below one in which δ must stay
    released: str = ""  # keyed digest of the released content; empty without a guarantee
    seed_known: bool = False  # the noise came from a seed that was not secret

    @property
    def is_exact_vocabulary(self) -> bool:
        """Whether it is the use of private words without noise that a run's settings asked for."""
        return self.event.get("reason") == EXACT_WORDS


class StepResult(Config):
    """What a finished step leaves behind for the steps after it and for people."""

    version: Literal[2] = 2  # version 1 did not carry uses without a guarantee
    step: str
    spec_hash: str
    outputs: dict[str, str]  # name -> URI
    metrics: list[MetricRecord]
    releases: list[ReleaseRecord] = Field(default_factory=list)  # also those it was made from
    facts: dict[str, Any] = Field(default_factory=dict)  # fit for publication: no private text
    seconds: float = 0.0
    versions: dict[str, str] = Field(default_factory=dict)

    @property
    def operator_files(self) -> frozenset[str]:
        """Files of the output that are for the operator alone: they are handed on to nobody."""
        artifacts = self.facts.get("artifacts", ())
        return frozenset(file for file, label, _ in artifacts if label == "operator")
