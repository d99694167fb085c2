"""Privacy loss distributions: the accounting behind every ε that Confide claims.

Step profile -> dots on a grid (from above) -> tilted convolution -> ε, in both directions, and
the worse of the two. The result is an upper bound, and tight: the grid is refined with the number
of steps (`grid`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from dp_core.errors import BadInput
from dp_core.privacy.accounting.convolution import GridTooFineError, LossSum, Repeated
from dp_core.privacy.accounting.dots import dots_of
from dp_core.privacy.accounting.grid import COARSEST, interval_for, scale_of
from dp_core.privacy.accounting.histogram import HistogramProfile
from dp_core.privacy.accounting.profiles import (
    FixedSizeProfile,
    Profile,
    SubsampledGaussian,
    TruncatedSubsampledGaussian,
)
from dp_core.privacy.accounting.rdp import epsilon_rdp
from dp_core.privacy.accounting.stated import StatedGuarantee, StatedProfile, resolved
from dp_core.privacy.events import (
    Composed,
    FixedSizeGaussian,
    Gaussian,
    MechanismEvent,
    PoissonGaussian,
    RandomCountSelection,
    Relation,
    Restated,
    ShuffledGaussian,
    ThresholdedHistogram,
    TruncatedPoissonGaussian,
    Unaccounted,
)

_REFINEMENTS = 3


def epsilon_pld(event: MechanismEvent, delta: float) -> float:
    """Return the claim: an upper bound on ε at δ for `event`, under its own relation.

    ∞ where the event holds a release without guarantee, or where δ is below what the mechanism
    gives away at any ε (a histogram's tail). Where no PLD is known (`without_pld`), that part
    enters as the (ε, δ) that is proven for it.
    """
    if not 0 < delta < 1:
        raise BadInput(f"{delta} is not between 0 and 1", where="delta")
    if isinstance(event, RandomCountSelection):  # alone: at the δ asked for, not at its own
        renyi = epsilon_rdp(event, delta)
        return math.inf if renyi is None else renyi
    event = resolved(event, epsilon_pld)
    if is_unaccounted(event):
        return math.inf
    scale = scale_of(event)
    interval = interval_for(event, scale)
    epsilon = _epsilon(event, delta, interval)
    for _ in range(_REFINEMENTS):
        # Rényi orders guess far too high where ε is small; every grid's ε is valid, a finer one's
        # is tighter.
        if epsilon == 0 or epsilon > scale / 4:
            break
        scale, coarser = epsilon, interval
        interval = interval_for(event, scale)
        if interval == coarser:  # as fine as one step's losses allow
            break
        epsilon = min(epsilon, _epsilon(event, delta, interval))
    return epsilon


def _epsilon(event: MechanismEvent, delta: float, interval: float) -> float:
    """Return ε on a grid of this spacing, or of the finest that fits."""
    while interval <= COARSEST:
        try:
            return max(side.epsilon(delta) for side in _sides(event, interval))
        except GridTooFineError:
            interval *= 4
    renyi = epsilon_rdp(event, delta)  # an ε in the thousands: valid is enough
    return math.inf if renyi is None else renyi


def delta_pld(event: MechanismEvent, epsilon: float) -> float:
    """Return an upper bound on δ at ε ≥ 0 for `event`; 1 for a release without guarantee."""
    if not epsilon >= 0:
        raise BadInput(f"{epsilon} is below 0", where="epsilon")
    event = resolved(event, epsilon_pld)
    if is_unaccounted(event):
        return 1.0
    scale = scale_of(event)
    interval = interval_for(event, max(min(scale, epsilon), scale / 50))
    while interval <= COARSEST:
        try:
            return max(side.delta(epsilon) for side in _sides(event, interval))
        except GridTooFineError:
            interval *= 4
    return 1.0


def is_unaccounted(event: MechanismEvent) -> bool:
    """Return whether any part of `event` has no guarantee."""
    match event:
        case Composed(events=parts) | RandomCountSelection(candidates=parts):
            return any(is_unaccounted(part) for part in parts)
        case Restated(event=inner):
            return is_unaccounted(inner)
        case _:
            return isinstance(event, Unaccounted)


def without_pld(event: MechanismEvent) -> bool:
    """Return whether some part has no PLD, and enters a total as a proven (ε, δ)."""
    match event:
        case Composed(events=parts):
            return any(without_pld(part) for part in parts)
        case Restated(to=to):
            return to is Relation.REPLACE
        case _:
            return isinstance(event, RandomCountSelection)


def _sides(event: MechanismEvent, interval: float) -> tuple[LossSum, ...]:
    """Return the summed loss with the unit against without it, and the reverse if it differs."""
    pairs = [(dots_of(profile, interval), times) for profile, times in _steps(event)]
    with_unit = [Repeated(pair[0], times) for pair, times in pairs]
    without = [Repeated(pair[1], times) for pair, times in pairs]
    if all(pair[0] is pair[1] for pair, _ in pairs):
        return (LossSum(with_unit, interval),)
    return LossSum(with_unit, interval), LossSum(without, interval)


def _steps(event: MechanismEvent) -> Iterator[tuple[Profile, int]]:
    """Yield the profile of each kind of step, and how often it is taken."""
    match event:
        case Composed(events=events):
            for part in events:
                yield from _steps(part)
        case Restated(to=Relation.ZERO_OUT, event=inner):
            yield from _steps(inner)
        case StatedGuarantee(epsilon=epsilon, delta=delta):
            yield StatedProfile(epsilon, delta), 1
        case Gaussian(noise_multiplier=sigma, count=times):
            yield SubsampledGaussian(1.0, math.sqrt(times) / sigma), 1
        case ShuffledGaussian(noise_multiplier=sigma, participations=times):
            yield SubsampledGaussian(1.0, math.sqrt(times) / sigma), 1
        case PoissonGaussian(phases=phases):
            for rate, sigma, times in phases:
                yield SubsampledGaussian(rate, 1 / sigma), times
        case TruncatedPoissonGaussian(declared_units=units, cap=cap, phases=phases):
            for rate, sigma, times in phases:
                yield TruncatedSubsampledGaussian(units, cap, rate, 1 / sigma), times
        case FixedSizeGaussian(slots=slots, phases=phases):
            for batch, sigma, times in phases:
                yield FixedSizeProfile(batch / slots, 1 / sigma), times
        case ThresholdedHistogram(words_per_unit=words, sigma=sigma, threshold=threshold):
            yield HistogramProfile(words, sigma, int(threshold)), 1
        case _:
            raise BadInput(f"no accounting for event kind {event.kind!r}", where="privacy event")
