"""Putting releases together: composition of events, and from units to groups of units."""

from __future__ import annotations

import math
from typing import NamedTuple

from dp_core.errors import BadInput
from dp_core.privacy.events import Composed, MechanismEvent


def compose(*events: MechanismEvent) -> MechanismEvent:
    """Return all events together, as one: releases on the same data, registered as one plan.

    Raises:
        BadInput: no events, or events with different units or neighbour relations. (A
            patient-level ε and an example-level ε protect different things; their sum protects
            nothing.)
    """
    if not events:
        raise BadInput("nothing to compose", where="compose")
    first = events[0]
    for other in events[1:]:
        if other.unit is not first.unit or other.relation is not first.relation:
            raise BadInput(
                f"{_protects(first)} does not compose with {_protects(other)}",
                where="compose",
                fix="Account for every release by the same unit and neighbour relation.",
            )
    parts: list[MechanismEvent] = []
    for event in events:
        parts.extend(event.events if isinstance(event, Composed) else (event,))
    return parts[0] if len(parts) == 1 else Composed(tuple(parts), unit=first.unit)


def _protects(event: MechanismEvent) -> str:
    unit = event.unit.value if event.unit else "unstated unit"
    return f"{event.kind} ({unit}, {event.relation.value})"


class GroupGuarantee(NamedTuple):
    """(ε, δ) for data sets that differ by up to `size` units."""

    size: int
    epsilon: float
    delta: float


def group_privacy(epsilon: float, delta: float, size: int) -> GroupGuarantee:
    """Return what (ε, δ) for one unit means for `size` units: (kε, δ(e^{kε} − 1)/(e^ε − 1)).

    Dwork and Roth 2014, Theorem 2.2 with the δ of the k-fold triangle inequality. Both
    parameters grow: dividing ε by the size of the group is the wrong way round.
    """
    if size < 1:
        raise BadInput(f"a group of {size}", where="size")
    if epsilon == 0:
        return GroupGuarantee(size, 0.0, min(1.0, size * delta))
    if size * epsilon > 700:
        return GroupGuarantee(size, size * epsilon, 1.0)
    factor = math.expm1(size * epsilon) / math.expm1(epsilon)
    return GroupGuarantee(size, size * epsilon, min(1.0, delta * factor))
