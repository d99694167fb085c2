"""Putting releases together: composition of events, and from units to groups of units."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from dp_core.errors import BadInput, PlanError
from dp_core.privacy.accounting.pld import epsilon_pld, replace_one
from dp_core.privacy.accounting.profiles import gaussian_epsilon
from dp_core.privacy.mechanisms import (
    Composed,
    ConvertedRelation,
    FixedSizeGaussian,
    Gaussian,
    MechanismEvent,
    NeighboringRelation,
    PoissonGaussian,
    ShuffledGaussian,
    ThresholdedHistogram,
    TruncatedPoissonGaussian,
)


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


def epsilon_unamplified(event: MechanismEvent, delta: float) -> float:
    """Return the zero-out ε that the same training has if its batches come from shuffled epochs.

    An epoch at rate q has ⌊1/q⌋ whole batches, as the trainer deals them, so s updates take each
    unit at most ⌈s/⌊1/q⌋⌉ times: that many Gaussian mechanisms, adaptively composed, are one with
    μ = √times/σ (Dong, Roth and Su 2022, Corollary 3.3). ∞ where an event has no such reading (a
    histogram, no guarantee).
    """
    return gaussian_epsilon(delta, mu) if math.isfinite(mu := _mu(event, 1.0)) else math.inf


def epsilon_shuffled_replace_one(event: MechanismEvent, delta: float) -> float:
    """Return the same under replace-one: a unit's sum moves by up to 2 C."""
    return gaussian_epsilon(delta, mu) if math.isfinite(mu := _mu(event, 2.0)) else math.inf


def _mu(event: MechanismEvent, sensitivity: float) -> float:
    match event:
        case Gaussian(noise_multiplier=sigma, count=times):
            return sensitivity * math.sqrt(times) / sigma
        case ShuffledGaussian(noise_multiplier=sigma, participations=times):
            return sensitivity * math.sqrt(times) / sigma
        case PoissonGaussian(phases=phases) | TruncatedPoissonGaussian(phases=phases):
            rates = [(rate, sigma, steps) for rate, sigma, steps in phases]
        case FixedSizeGaussian(slots=slots, phases=phases):
            rates = [(batch / slots, sigma, steps) for batch, sigma, steps in phases]
        case ConvertedRelation(event=inner):
            return _mu(inner, sensitivity)
        case Composed(events=events):
            return math.sqrt(sum(_mu(e, sensitivity) ** 2 for e in events))
        case _:
            return math.inf
    total = 0.0
    for rate, sigma, steps in rates:
        batches_per_epoch = math.floor(1 / rate + 1e-9)  # 1/q whole but for rounding
        total += math.ceil(steps / batches_per_epoch) * (sensitivity / sigma) ** 2
    return math.sqrt(total)


_SLACK = 1 + 1e-5  # more than what rounding may take from δ when parts are added up


def under(
    event: MechanismEvent, relation: NeighboringRelation, delta: float
) -> MechanismEvent | None:
    """Return the event with its guarantee under `relation`, or None where none is proven.

    Args:
        event: a mechanism. relation: the neighbours wanted.
        delta: δ at which it states its ε; replace-one makes more of it (`stated_delta`).
    """
    if event.relation is relation:
        return event
    if event.relation is not NeighboringRelation.ADD_REMOVE:
        return None
    if relation is NeighboringRelation.REPLACE:
        return ConvertedRelation(event, relation, delta, unit=event.unit)
    if isinstance(event, ThresholdedHistogram | PoissonGaussian | Gaussian):
        return ConvertedRelation(event, relation, unit=event.unit)
    return None


def stated_delta(event: MechanismEvent, delta: float) -> float:
    """Return the δ that belongs to the event's own ε: more than `delta` under replace-one."""
    if isinstance(event, ConvertedRelation) and event.to is NeighboringRelation.REPLACE:
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
