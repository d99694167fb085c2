"""One guarantee under several notions of neighbours: only by a theorem, else not at all."""

from __future__ import annotations

from dp_core.privacy.accounting.pld import epsilon_pld
from dp_core.privacy.accounting.stated import replace_one
from dp_core.privacy.events import (
    Gaussian,
    MechanismEvent,
    PoissonGaussian,
    Relation,
    Restated,
    ThresholdedHistogram,
)

_SLACK = 1 + 1e-5  # more than what rounding may take from δ when parts are added up


def under(event: MechanismEvent, relation: Relation, delta: float) -> MechanismEvent | None:
    """Return the event with its guarantee under `relation`, or None where none is proven.

    Args:
        event: a mechanism. relation: the neighbours wanted.
        delta: δ at which it states its ε; replace-one makes more of it (`stated_delta`).
    """
    if event.relation is relation:
        return event
    if event.relation is not Relation.ADD_REMOVE:
        return None
    if relation is Relation.REPLACE:
        return Restated(event, relation, delta, unit=event.unit)
    if isinstance(event, ThresholdedHistogram | PoissonGaussian | Gaussian):
        return Restated(event, relation, unit=event.unit)
    return None


def stated_delta(event: MechanismEvent, delta: float) -> float:
    """Return the δ that belongs to the event's own ε: more than `delta` under replace-one."""
    if isinstance(event, Restated) and event.to is Relation.REPLACE:
        return replace_one(epsilon_pld(event.event, event.delta), event.delta)[1] * _SLACK
    return delta
