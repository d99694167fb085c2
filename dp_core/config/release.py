"""The record of a release, which outputs of steps and privacy statements carry."""

from __future__ import annotations

import math
from typing import Annotated, Any

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


class ReleaseRecord(Config):
    """One release of private data, with the mechanism's event, which determines ε.

    A use without any guarantee is a release too: its event is `unaccounted` and its ε is infinite.
    """

    ledger_id: str
    dataset: str
    budget: str  # its name; data sets that share a budget may hold the same people
    unit: UnitName
    event: dict[str, Any]  # dp_core.privacy.mechanisms
    epsilon: Epsilon  # PLD, at `delta`
    epsilon_rdp: Epsilon | None
    delta: float
    plan: str = ""  # key of the plan that registered it, with others, before any release
    declared_units: int = 0  # public upper bound on the units; δ must be below its inverse
    released: str = ""  # keyed digest of the released content; empty without a guarantee
    seed_known: bool = False  # the noise came from a seed that was not secret
    of_study: bool = False  # charged to a budget whose ε has no meaning

    @property
    def for_operator_alone(self) -> bool:
        """Whether the operator requested it for study: exact words, or a budget with a huge ε."""
        return self.of_study or self.event.get("reason") == EXACT_WORDS
