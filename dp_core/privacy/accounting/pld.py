"""Privacy loss distributions: the accounting behind every ε that Confide claims.

Step profile -> dots on a grid (from above) -> tilted convolution -> ε, in both directions, and
the worse of the two. The result is an upper bound, and tight: the grid is refined with the number
of steps (`grid`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.optimize import brentq, minimize_scalar

from dp_core.errors import BadInput
from dp_core.privacy.accounting.profiles import (
    FixedSizeProfile,
    Floats,
    HistogramProfile,
    Profile,
    SubsampledGaussian,
    TruncatedSubsampledGaussian,
)
from dp_core.privacy.accounting.rdp import epsilon_rdp, rdp_curve
from dp_core.privacy.mechanisms import (
    Composed,
    ConvertedRelation,
    FixedSizeGaussian,
    Gaussian,
    MechanismEvent,
    NeighboringRelation,
    PoissonGaussian,
    RandomCountSelection,
    ShuffledGaussian,
    ThresholdedHistogram,
    TruncatedPoissonGaussian,
    Unaccounted,
)


@dataclass(frozen=True)
class PldPmf:
    """Pr[loss = (first + i)·h] = probabilities[i], and Pr[loss = ∞] = infinite."""

    first: int
    probabilities: NDArray[np.float64]
    infinite: float


def dots_of(profile: Profile, interval: float) -> tuple[PldPmf, PldPmf]:
    """Return the (with, without) loss distributions of one step, with spacing h = `interval`."""
    last = math.ceil(profile.reach() / interval) + 1
    with_unit, without = profile.directions(np.arange(last + 1) * interval)
    if without is with_unit:  # a symmetric profile
        both = _connect(with_unit, with_unit, interval)
        return both, both
    return _connect(with_unit, without, interval), _connect(without, with_unit, interval)


def _connect(calls: Floats, reverse: Floats, h: float) -> PldPmf:
    """Return the chords' distribution, from H at 0, h, 2h, … and the reverse direction there.

    For negative ε the formulas use H_{−ε}(P‖Q) − (1 − e^{−ε}) = e^{−ε} H_ε(Q‖P): the part left
    out is linear in e^ε, so the second differences do not see it, and no digits cancel.
    """
    # A profile never rises; where a bound does, by rounding, the larger value stands.
    calls = np.maximum.accumulate(calls[::-1])[::-1]
    reverse = np.maximum.accumulate(reverse[::-1])[::-1]
    n = len(calls) - 1
    puts = np.exp(-np.arange(n + 1) * h) * reverse
    puts[0] = calls[0] = max(calls[0], reverse[0])  # both are the total variation distance
    e, step = math.exp(h), math.expm1(h)
    mass = np.zeros(2 * n + 1)  # losses −nh … nh; index n is loss 0
    mass[n + 1 : 2 * n] = ((calls[2:] - calls[1:-1]) - e * (calls[1:-1] - calls[:-2])) / step
    left = puts[::-1]  # at −nh … 0, rising
    mass[1:n] = ((left[2:] - left[1:-1]) - e * (left[1:-1] - left[:-2])) / step
    mass[n] = 1 + ((calls[1] - calls[0]) - e * (left[-1] - left[-2])) / step
    mass[0] = (left[1] - left[0]) / step - left[0]
    mass[2 * n] = (calls[n - 1] - calls[n]) / -math.expm1(-h)
    return PldPmf(-n, np.maximum(mass, 0.0), float(calls[n]))


_OUTSIDE = math.log(1e-20)  # probability, under the tilt, that may lie outside the window
_TILT_TOLERANCE = 1e-2  # any tilt is right; a good one is precise
_ROUNDING = 1 + 1e-6  # what FFT rounding can take away, and more
_FAR = 60.0  # θ·(x − ε) beyond which a term is bounded and not computed
_LARGEST_WINDOW = 1 << 24


class GridTooFineError(Exception):
    """The grid would hold more points than memory should."""


@dataclass(frozen=True)
class Repeated:
    """One step's losses, and how often the step is taken."""

    dots: PldPmf
    times: int


class ComposedPld:
    """The privacy loss of all steps together, in one direction."""

    def __init__(self, parts: Sequence[Repeated], interval: float) -> None:
        self._h = interval
        self._parts = [_Part.of(part, interval) for part in parts]
        survive = sum(p.times * math.log1p(-p.dots.infinite) for p in parts)
        self.infinite = -math.expm1(survive)
        self._highest = sum(p.times * p.losses[-1] for p in self._parts)

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε ≥ 0 with δ(ε) ≤ delta; ∞ if there is none."""
        finite = delta / _ROUNDING - self.infinite
        if finite <= 0:
            return math.inf
        first = self._tilted(self._tilt_for(finite)).epsilon(finite, 1e-4)
        # The first tilt is as good as its search; the second is exact for the ε that it gave.
        return self._tilted(self._tilt_at(first)).epsilon(finite, 1e-9)

    def delta(self, epsilon: float) -> float:
        """Return δ at ε ≥ 0."""
        tilted = self._tilted(self._tilt_at(epsilon))
        return min(1.0, (self.infinite + math.exp(tilted.log_delta(epsilon))) * _ROUNDING)

    def _cumulant(self, theta: float) -> float:
        return sum(part.times * part.cumulant(theta) for part in self._parts)

    def _mean(self, theta: float) -> float:
        return sum(part.times * part.mean(theta) for part in self._parts)

    def _tilt_for(self, delta: float) -> float:
        """Return the θ that minimises the moment bound (K(θ) + g(θ) − ln δ)/θ on ε: order α − 1."""
        found = minimize_scalar(
            lambda x: (
                (self._cumulant(math.exp(x)) + _gap(math.exp(x)) - math.log(delta)) / math.exp(x)
            ),
            bounds=(math.log(1e-6), math.log(1e7)),
            method="bounded",
            options={"xatol": _TILT_TOLERANCE},
        )
        return math.exp(float(found.x))

    def _tilt_at(self, epsilon: float) -> float:
        """Return the θ that minimises the moment bound K(θ) − θε + g(θ) on ln δ, convex in θ."""

        def slope(theta: float) -> float:
            return self._mean(theta) - math.log1p(1 / theta) - epsilon

        low, high = 1e-6, 1.0
        if slope(low) >= 0:
            return low
        while slope(high) < 0:
            if high >= 1e8:
                return high  # ε is at the end of the support
            low, high = high, 2 * high
        return float(brentq(slope, low, high, xtol=1e-6, rtol=_TILT_TOLERANCE))

    def _tilted(self, theta: float) -> _TiltedSum:
        """Return the sum's distribution under e^{θx}, on a window that holds all but 1e-20."""
        low = max(self._bound(theta, -1), sum(p.times * p.losses[0] for p in self._parts))
        high = min(self._bound(theta, 1), self._highest)
        first = math.floor(low / self._h)
        size = math.ceil(high / self._h) - first + 1
        if size > _LARGEST_WINDOW:
            raise GridTooFineError(f"a privacy-loss grid of {size} points")
        length = fft.next_fast_len(max(size, 2), real=True)
        spectrum: NDArray[np.complex128] | None = None
        start = 0
        for part in self._parts:
            folded = np.bincount(
                np.arange(len(part.losses)) % length, part.tilted(theta), minlength=length
            )
            power = fft.rfft(folded) ** part.times
            spectrum = power if spectrum is None else spectrum * power
            start += part.times * part.first
        assert spectrum is not None  # noqa: S101  (parts are never empty)
        circle = np.maximum(fft.irfft(spectrum, length), 0.0)
        probabilities = np.roll(circle, (start - first) % length)
        losses = (first + np.arange(length)) * self._h
        return _TiltedSum(theta, self._cumulant(theta), losses, probabilities)

    def _bound(self, theta: float, sign: int) -> float:
        """Return Chernoff's bound, up or down, on where all but 1e-20 of the tilted sum lies."""
        base = self._cumulant(theta)

        def bound(x: float) -> float:
            s = sign * math.exp(x)
            return sign * (self._cumulant(theta + s) - base - _OUTSIDE) / s

        found = minimize_scalar(
            bound, bounds=(math.log(1e-6), math.log(1e8)), method="bounded", options={"xatol": 0.1}
        )
        return sign * float(found.fun)


def _gap(theta: float) -> float:
    """Return g(θ), by which (1 − e^{−y})₊ stays below e^{θy}."""
    return -theta * math.log1p(1 / theta) - math.log1p(theta)


@dataclass(frozen=True)
class _Part:
    """One step's losses with their log-probabilities, and how often it is taken."""

    first: int
    times: int
    losses: NDArray[np.float64]
    logs: NDArray[np.float64]

    @classmethod
    def of(cls, part: Repeated, h: float) -> _Part:
        held = np.flatnonzero(part.dots.probabilities)
        kept = part.dots.probabilities[held[0] : held[-1] + 1]
        first = part.dots.first + int(held[0])
        with np.errstate(divide="ignore"):
            logs = np.log(kept)
        return cls(first, part.times, (first + np.arange(len(kept))) * h, logs)

    def cumulant(self, theta: float) -> float:
        exponents = self.logs + theta * self.losses
        top = float(np.max(exponents))
        return top + math.log(float(np.sum(np.exp(exponents - top))))

    def tilted(self, theta: float) -> NDArray[np.float64]:
        return np.asarray(np.exp(self.logs + theta * self.losses - self.cumulant(theta)))

    def mean(self, theta: float) -> float:
        return float(np.dot(self.tilted(theta), self.losses))


@dataclass(frozen=True)
class _TiltedSum:
    """p̃ on a window of losses."""

    theta: float
    cumulant: float
    losses: NDArray[np.float64]
    probabilities: NDArray[np.float64]

    def log_delta(self, epsilon: float) -> float:
        """Return ln δ(ε), without the infinite part."""
        first = int(np.searchsorted(self.losses, epsilon, side="right"))
        reach = epsilon + _FAR / self.theta if self.theta > 0 else math.inf
        last = int(np.searchsorted(self.losses, reach, side="right"))
        distance = self.losses[first:last] - epsilon
        weights = -np.expm1(-distance) * np.exp(-self.theta * distance)
        # Each term beyond weighs less than e^−60, which stands for all of them.
        beyond = math.exp(-_FAR) * float(np.sum(self.probabilities[last:]))
        total = float(np.dot(weights, self.probabilities[first:last])) + beyond
        if total == 0:
            return -math.inf
        return self.cumulant - self.theta * epsilon + math.log(total)

    def epsilon(self, delta: float, tolerance: float) -> float:
        """Return the ε ≥ 0 with δ(ε) = delta, from above, to a relative tolerance."""
        target = math.log(delta)
        low = max(0.0, float(self.losses[0]))
        high = max(float(self.losses[-1]), low)
        if self.log_delta(low) <= target:
            return low
        if self.log_delta(high) > target:
            return high
        root = brentq(
            lambda e: max(self.log_delta(e), target - 1e3) - target,
            low,
            high,
            xtol=tolerance * 1e-3,
            rtol=tolerance,
        )
        return float(root) * (1 + tolerance)


@dataclass(frozen=True)
class EpsilonDelta(MechanismEvent):
    """(ε, δ)-DP and nothing else known: an event of a calculation, never one of the ledger."""

    epsilon: float
    delta: float
    under: NeighboringRelation

    @property
    def relation(self) -> NeighboringRelation:
        """The relation under which it is stated."""
        return self.under


@dataclass(frozen=True)
class StatedProfile:
    """The dominating pair of (ε, δ)-DP: δ + (1 − δ)(e^ε − e^x)₊/(e^ε + 1), symmetric."""

    epsilon: float
    delta: float

    def directions(self, epsilon: Floats) -> tuple[Floats, Floats]:
        """Return the profile twice: the pair is symmetric."""
        gap = np.minimum(epsilon - self.epsilon, 0.0)
        hidden = -np.expm1(gap) / (1 + math.exp(-self.epsilon))
        both = self.delta + (1 - self.delta) * hidden
        return both, both

    def reach(self) -> float:
        """Return ε itself: beyond it there is δ alone."""
        return self.epsilon


def resolved(
    event: MechanismEvent, epsilon_of: Callable[[MechanismEvent, float], float]
) -> MechanismEvent:
    """Return the event with every part that has no profile of its own stated as (ε, δ).

    Args:
        event: any event.
        epsilon_of: the ε of an event at a δ, by PLD.
    """
    match event:
        case Composed(events=parts):
            return Composed(tuple(resolved(e, epsilon_of) for e in parts), unit=event.unit)
        case ConvertedRelation(to=NeighboringRelation.REPLACE, event=inner, delta=delta):
            epsilon, grown = replace_one(epsilon_of(inner, delta), delta)
            return _stated(event, epsilon, grown)
        case RandomCountSelection(delta=delta):
            found = epsilon_rdp(event, delta)
            return _stated(event, math.inf if found is None else found, delta)
        case _:
            return event


def replace_one(epsilon: float, delta: float) -> tuple[float, float]:
    """Return what add-or-remove (ε, δ) is under replace-one: (2ε, (1 + e^ε)δ).

    Two steps of the triangle inequality: one unit removed, another added (Vadhan 2017, Lemma 2.2).
    """
    return 2 * epsilon, math.inf if epsilon > 700 else (1 + math.exp(epsilon)) * delta


def _stated(event: MechanismEvent, epsilon: float, delta: float) -> MechanismEvent:
    if math.isinf(epsilon) or delta >= 1:
        return _Nothing("its ε is infinite at that δ", under=event.relation, unit=event.unit)
    return EpsilonDelta(epsilon, delta, event.relation, unit=event.unit)


@dataclass(frozen=True)
class _Nothing(Unaccounted):
    """No guarantee, for the neighbours of what it stands for."""

    kind = ""
    under: NeighboringRelation = NeighboringRelation.ADD_REMOVE

    @property
    def relation(self) -> NeighboringRelation:
        """The relation of what it stands for."""
        return self.under


_BLUR = 4e-3  # blur allowed, as a share of ε
_ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)  # whole numbers: quick
_DELTA = 1e-6  # at which the scale of ε is guessed
COARSEST = 1.0  # beyond it e^h is no longer near 1 + h, and nobody needs the digits
_LARGEST_STEP_GRID = 1 << 20
_LARGEST_TOTAL_GRID = 1 << 22


def interval_for(event: MechanismEvent, epsilon: float) -> float:
    """Return the spacing of the privacy-loss grid: 1, 2 or 5 times a power of ten.

    Args:
        epsilon: the scale of ε; a guess from `scale_of`, or what a coarser grid gave.
    """
    steps = sum(times for times, _ in _steps(event))
    reach = max(r for _, r in _steps(event))
    wanted = min(1e-3 * max(1.0, epsilon / 5), 2 * _BLUR * epsilon / math.sqrt(steps))
    affordable = max(reach / _LARGEST_STEP_GRID, 4 * epsilon / _LARGEST_TOTAL_GRID)
    return _round_down(max(wanted, affordable))


def scale_of(event: MechanismEvent) -> float:
    """Return roughly the ε of `event` at δ = 1e-6, at least 1e-3, from whole Rényi orders."""
    return max(_scale(event), 1e-3)


def _scale(event: MechanismEvent) -> float:
    curve = np.zeros(len(_ORDERS))
    for leaf in _leaves(event):
        if isinstance(leaf, TruncatedPoissonGaussian):
            leaf = PoissonGaussian(leaf.phases)
        if isinstance(leaf, FixedSizeGaussian):  # near enough, and its own curve takes seconds
            half = ((batch / leaf.slots, sigma / 2, n) for batch, sigma, n in leaf.phases)
            leaf = PoissonGaussian(tuple(half))
        if isinstance(leaf, ThresholdedHistogram):
            leaf = Gaussian(leaf.sigma / math.sqrt(leaf.words_per_unit))
        if isinstance(leaf, EpsilonDelta):  # a divergence is at most ε, and αε²/2 where small
            curve = curve + np.minimum(leaf.epsilon, np.asarray(_ORDERS) * leaf.epsilon**2 / 2)
            continue
        part = rdp_curve(leaf, _ORDERS)
        if part is not None:
            curve = curve + part
    orders = np.asarray(_ORDERS, dtype=np.float64)
    return float(np.min(curve + math.log(1 / _DELTA) / (orders - 1)))


def _leaves(event: MechanismEvent) -> Iterator[MechanismEvent]:
    if isinstance(event, Composed):
        for part in event.events:
            yield from _leaves(part)
    elif isinstance(event, ConvertedRelation):
        yield event.event
    else:
        yield event


def _steps(event: MechanismEvent) -> Iterator[tuple[int, float]]:
    """Yield (times, largest privacy loss of one) for every phase of every part."""
    for leaf in _leaves(event):
        match leaf:
            case PoissonGaussian(phases=phases):
                yield from ((n, _reach(rate, 1 / sigma)) for rate, sigma, n in phases)
            case TruncatedPoissonGaussian(phases=phases):
                yield from ((n, _reach(rate, 2 / sigma)) for rate, sigma, n in phases)
            case FixedSizeGaussian(slots=slots, phases=phases):
                yield from ((n, _reach(b / slots, 2 / sigma)) for b, sigma, n in phases)
            case EpsilonDelta(epsilon=epsilon):
                yield 1, 2 * epsilon
            case Gaussian(noise_multiplier=sigma, count=n):
                yield 1, _reach(1.0, math.sqrt(n) / sigma)
            case ShuffledGaussian(noise_multiplier=sigma, participations=n):
                yield 1, _reach(1.0, math.sqrt(n) / sigma)
            case ThresholdedHistogram(words_per_unit=n, sigma=sigma):
                yield 1, _reach(1.0, math.sqrt(n) / sigma)


def _reach(rate: float, mu: float) -> float:
    """Return the width of one step's losses, 12 standard deviations out on each side."""
    loss = mu * mu / 2 + 12 * mu
    amplified = loss + math.log(rate) if loss > 700 else math.log1p(rate * math.expm1(loss))
    return 2 * amplified


def _round_down(value: float) -> float:
    exponent = math.floor(math.log10(value))
    mantissa = value / 10**exponent
    return float(f"{max(m for m in (1, 2, 5) if m <= mantissa * (1 + 1e-9))}e{exponent}")


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
        case ConvertedRelation(event=inner):
            return is_unaccounted(inner)
        case _:
            return isinstance(event, Unaccounted)


def without_pld(event: MechanismEvent) -> bool:
    """Return whether some part has no PLD, and enters a total as a proven (ε, δ)."""
    match event:
        case Composed(events=parts):
            return any(without_pld(part) for part in parts)
        case ConvertedRelation(to=to):
            return to is NeighboringRelation.REPLACE
        case _:
            return isinstance(event, RandomCountSelection)


def _sides(event: MechanismEvent, interval: float) -> tuple[ComposedPld, ...]:
    """Return the summed loss with the unit against without it, and the reverse if it differs."""
    pairs = [(dots_of(profile, interval), times) for profile, times in _grid_steps(event)]
    with_unit = [Repeated(pair[0], times) for pair, times in pairs]
    without = [Repeated(pair[1], times) for pair, times in pairs]
    if all(pair[0] is pair[1] for pair, _ in pairs):
        return (ComposedPld(with_unit, interval),)
    return ComposedPld(with_unit, interval), ComposedPld(without, interval)


def _grid_steps(event: MechanismEvent) -> Iterator[tuple[Profile, int]]:
    """Yield the profile of each kind of step, and how often it is taken."""
    match event:
        case Composed(events=events):
            for part in events:
                yield from _grid_steps(part)
        case ConvertedRelation(to=NeighboringRelation.ZERO_OUT, event=inner):
            yield from _grid_steps(inner)
        case EpsilonDelta(epsilon=epsilon, delta=delta):
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
