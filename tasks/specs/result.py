"""What a step answers: `result.json`, written last. No result, no success."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tasks.specs.base import Frozen


class MetricRecord(Frozen):
    """One number with its label; `step` is the update or epoch it belongs to."""

    name: str
    value: float
    label: Literal["dp", "public", "operator"]
    step: int = 0


class ReleaseRecord(Frozen):
    """One release of private data: the mechanism's event as data, so that ε is a function of it."""

    ledger_id: str
    dataset: str
    unit: Literal["example", "document", "patient"]
    event: dict[str, Any]  # dp_core.privacy.events
    epsilon: float  # PLD, at `delta`
    epsilon_rdp: float | None
    delta: float
    plan: str = ""  # of the run that registered it, with others, before the first release
    seed_known: bool = False  # the noise came from a seed that was not secret


class StepResult(Frozen):
    """What a finished step leaves behind for the steps after it and for people."""

    version: int = 1
    step: str
    spec_hash: str
    outputs: dict[str, str]  # name -> URI
    metrics: list[MetricRecord]
    releases: list[ReleaseRecord] = Field(default_factory=list)  # also those it was made from
    facts: dict[str, Any] = Field(default_factory=dict)  # fit for publication: no private text
    seconds: float = 0.0
    versions: dict[str, str] = Field(default_factory=dict)
