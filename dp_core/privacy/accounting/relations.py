"""One guarantee under several notions of neighbours: only by a theorem, else not at all.

And the δ that a guarantee may be stated at: below one in the number of units, all parts together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from dp_core.errors import PlanError
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


def refuse_large_delta(deltas: Iterable[float], declared_units: int, where: str) -> None:
    """Refuse a total δ that would promise nothing: 1/n or more, of n units.

    To publish one unit drawn at random whole is (0, 1/n)-DP.

    Args:
        deltas: of everything that is claimed together, each as it is stated (`stated_delta`).
        declared_units: n, the public upper bound on the number of units.
        where: what the message calls it.

    Raises:
        PlanError: the sum is not above 0 and below 1/n, or no number.
    """
    total = math.fsum(deltas)
    if not 0 < total * declared_units < 1:
        raise PlanError(
            f"δ = {total:.3g} in total is not between 0 and 1/{declared_units}: at 1/n and above, "
            "publishing one unit whole would count as private",
            where=where,
            fix="Lower the δ of a part, or release fewer parts.",
        )
