"""Accountants: ε and δ of an event, by privacy loss distributions (PLD), Rényi DP or closed form.

`epsilon_pld` is behind every ε that Confide claims: profile of each step -> its privacy loss on a
grid, from above -> tilted convolution -> ε, in both directions, and the worse of the two. The
result is an upper bound, and tight: the grid is refined with the number of steps
(`_interval_for`). The rounding of the FFT is bounded and added; dp_accounting's own PLD may lie
below the truth by it.

`epsilon_rdp` is reported next to it, and the ledger's privacy filter adds up Rényi curves: a
mechanism's Rényi divergence bound, in both directions, at each order α > 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import scipy
from numpy.typing import NDArray

from dp_core.errors import BadInput
from dp_core.privacy.accounting.profiles import Floats, Profile, SelfComposed, gaussian_delta

if TYPE_CHECKING:
    from dp_core.privacy.mechanisms import MechanismEvent


@dataclass(frozen=True)
class PldPmf:
    """Probability mass function of a privacy loss, usually on a grid.

    Pr[loss = losses[i]] = probabilities[i], and Pr[loss = ∞] = infinite.
    """

    losses: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    infinite: float

    @functools.cached_property
    def _logs(self) -> NDArray[np.float64]:
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.probabilities))

    def cumulant(self, theta: float) -> float:
        """Return ln Σ Pr[x]·e^{θx} over the finite losses x."""
        exponents = self._logs + theta * self.losses
        top = float(np.max(exponents))
        return top + math.log(float(np.sum(np.exp(exponents - top))))

    def tilted(self, theta: float) -> NDArray[np.float64]:
        """Return the probabilities under the weights e^{θx}; they add up to 1."""
        return np.asarray(np.exp(self._logs + theta * self.losses - self.cumulant(theta)))

    def merged(self) -> PldPmf:
        """Return at most `_ROUGH` losses, each the mean of neighbours, for use in searches."""
        starts = np.arange(0, len(self.losses), -(-len(self.losses) // _ROUGH))
        masses = np.add.reduceat(self.probabilities, starts)
        sums = np.add.reduceat(self.probabilities * self.losses, starts)
        held = masses > 0
        return PldPmf(sums[held] / masses[held], masses[held], self.infinite)


_Parts = Sequence[tuple[PldPmf, int]]  # the loss of one step of each kind, and how often


def discretise(profile: Profile, interval: float) -> tuple[PldPmf, PldPmf]:
    """Return the (with, without) losses of one step on a grid, from above (`_connect_dots`)."""
    last = math.ceil(profile.reach() / interval) + 1
    with_unit, without = profile.directions(np.arange(last + 1, dtype=float) * interval)
    if without is with_unit:  # a symmetric profile
        both = _connect_dots(with_unit, with_unit, interval)
        return both, both
    return _connect_dots(with_unit, without, interval), _connect_dots(without, with_unit, interval)


def _connect_dots(calls: Floats, reverse: Floats, h: float) -> PldPmf:
    """Return the loss whose profile is the chords through H at 0, h, 2h, …, in terms of e^ε.

    "Connect the dots" (Doroshenko et al. 2022, arXiv:2207.04380): a profile is convex in e^ε, so
    its chords lie above it. `reverse` is the other direction at the same points.

    For negative ε the formulas use H_{−ε}(P‖Q) − (1 − e^{−ε}) = e^{−ε} H_ε(Q‖P): the part left
    out is linear in e^ε, so the second differences do not see it, and no digits cancel.
    """
    # A profile never rises. Where rounding makes a bound rise, the larger value replaces it.
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
    held = np.flatnonzero(mass > 0)
    kept = np.arange(held[0], held[-1] + 1)
    return PldPmf((kept - n) * h, np.maximum(mass[kept], 0.0), float(calls[n]))


_OUTSIDE = math.log(1e-20)  # probability, under the tilt, that may lie outside the window
_TILT_TOLERANCE = 1e-2  # any tilt gives a valid ε; a good one gives a tight ε
_TOLERANCE = 1e-9  # of ε, relative
_ROUNDING = 1 + 1e-6  # above the relative errors of the probabilities, over all steps
_FAR = 60.0  # θ·(x − ε) beyond which a term is bounded and not computed
_LARGEST_WINDOW = 1 << 24
_NEGLIGIBLE = 1e-25  # modulus of a spectrum; the FFT rounds by 1e-16 and more
_FFT_ROUNDING = 4 * 2.0**-52  # per level of an FFT of sum 1 (Higham 2002, Theorem 24.2: 3.4)
_ROUGH = 1 << 12  # losses of a step while a tilt or a window is searched for


_Answer = TypeVar("_Answer")


class GridTooFineError(Exception):
    """The grid would hold more points than memory should."""


class ComposedPld:
    """The privacy loss of all steps together, in one direction.

    Args:
        parts: the losses of the steps, on grids that contain 0.
        interval: spacing of the grid.

    Attributes:
        infinite: the probability of an infinite loss: δ that no ε repairs.
    """

    def __init__(self, parts: _Parts, interval: float) -> None:
        self._h = interval
        self._parts = parts
        self._rough = [(pmf.merged(), times) for pmf, times in parts]
        survive = sum(times * math.log1p(-pmf.infinite) for pmf, times in parts)
        self.infinite = -math.expm1(survive)

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε ≥ 0 with δ(ε) ≤ delta; ∞ if there is none."""
        finite = delta / _ROUNDING - self.infinite
        if finite <= 0:
            return math.inf
        return self._tilted(self._tilt_for(finite)).epsilon(finite)

    def delta(self, epsilon: float) -> float:
        """Return δ at ε ≥ 0."""
        tilted = self._tilted(self._tilt_at(epsilon))
        return min(1.0, (self.infinite + math.exp(tilted.log_delta(epsilon))) * _ROUNDING)

    def _tilt_for(self, delta: float) -> float:
        """Return the θ that minimises the moment bound (K(θ) + g(θ) − ln δ)/θ on ε: order α − 1."""
        log_delta = math.log(delta)
        return _minimising(lambda t: (_cumulant(self._rough, t) + _gap(t) - log_delta) / t)

    def _tilt_at(self, epsilon: float) -> float:
        """Return the θ that minimises the moment bound K(θ) − θε + g(θ) on ln δ, convex in θ."""
        return _minimising(lambda t: _cumulant(self._parts, t) + _gap(t) - t * epsilon)

    def _tilted(self, theta: float) -> _TiltedSum:
        """Return the sum's distribution under e^{θx}, from above, on a window of all but 1e-20.

        Where losses have a heavy tail, no tilt brings the probabilities near ε above the rounding
        of the FFT, so its bound is added. A value of the spectrum errs by at most `rounding`,
        because the probabilities add up to 1; its n-th power by n times as much; and the mean error
        of the spectrum bounds the error of each probability.
        """
        lowest, highest = (sum(n * pmf.losses[end] for pmf, n in self._parts) for end in (0, -1))
        low, high = max(self._bound(theta, -1), lowest), min(self._bound(theta, 1), highest)
        first = math.floor(low / self._h)
        size = math.ceil(high / self._h) - first + 1
        if size > _LARGEST_WINDOW:
            raise GridTooFineError(f"a privacy-loss grid of {size} points")
        length = scipy.fft.next_fast_len(max(size, 2), real=True)
        rounding = _FFT_ROUNDING * (1 + math.log2(length))
        spectrum, error, start = np.ones(length // 2 + 1, dtype=complex), np.zeros(()), 0
        for pmf, times in self._parts:
            folded = np.bincount(
                np.arange(len(pmf.losses)) % length, pmf.tilted(theta), minlength=length
            )
            factor = scipy.fft.rfft(folded)
            below = np.abs(factor) ** (times - 1)
            error = (error + times * rounding * np.abs(spectrum)) * below
            held = below > _NEGLIGIBLE
            spectrum[held], spectrum[~held] = spectrum[held] * factor[held] ** times, 0.0
            start += times * round(pmf.losses[0] / self._h)
        error = 2 * float(np.sum(error + rounding * np.abs(spectrum))) / length + _NEGLIGIBLE
        circle = np.maximum(scipy.fft.irfft(spectrum, length), 0.0) + error
        probabilities = np.roll(circle, (start - first) % length)
        losses = (first + np.arange(length)) * self._h
        return _TiltedSum(theta, _cumulant(self._parts, theta), losses, probabilities)

    def _bound(self, theta: float, sign: int) -> float:
        """Return Chernoff's bound, up or down, on where all but 1e-20 of the tilted sum lies."""
        base = _cumulant(self._rough, theta) + _OUTSIDE
        s = _minimising(lambda x: (_cumulant(self._rough, theta + sign * x) - base) / x, 0.1)
        # The bound holds at any s, so only its last value needs all losses.
        grown = _cumulant(self._parts, theta + sign * s) - _cumulant(self._parts, theta)
        return sign * (grown - _OUTSIDE) / s


def _cumulant(parts: _Parts, theta: float) -> float:
    return sum(times * pmf.cumulant(theta) for pmf, times in parts)


def _minimising(bound: Callable[[float], float], tolerance: float = _TILT_TOLERANCE) -> float:
    """Return the x from 1e-6 to 1e8 at which a bound is least, to a relative tolerance."""
    limits, options = (math.log(1e-6), math.log(1e8)), {"xatol": tolerance}
    least = scipy.optimize.minimize_scalar(
        lambda log_x: bound(math.exp(log_x)), bounds=limits, method="bounded", options=options
    )
    return math.exp(float(least.x))


def _gap(theta: float) -> float:
    """Return g(θ), by which (1 − e^{−y})₊ stays below e^{θy}."""
    return -theta * math.log1p(1 / theta) - math.log1p(theta)


@dataclass(frozen=True)
class _TiltedSum:
    """The probabilities of all steps' losses under e^{θx}, from above, on a window."""

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
        # Each term beyond has a weight below e^−60, which replaces all of these weights.
        beyond = math.exp(-_FAR) * float(np.sum(self.probabilities[last:]))
        beyond += 2 * math.exp(_OUTSIDE + _gap(self.theta))  # outside the window, at any weight
        total = float(np.dot(weights, self.probabilities[first:last])) + beyond
        return self.cumulant - self.theta * epsilon + math.log(total)

    def epsilon(self, delta: float) -> float:
        """Return the ε ≥ 0 with δ(ε) = delta, from above, to a relative `_TOLERANCE`."""
        target = math.log(delta)
        low = max(0.0, float(self.losses[0]))
        high = max(float(self.losses[-1]), low)
        if self.log_delta(low) <= target:
            return low
        if self.log_delta(high) > target:
            return math.inf  # a poor tilt: the window ends below ε
        root = scipy.optimize.brentq(
            lambda x: self.log_delta(x) - target, low, high, xtol=1e-3 * _TOLERANCE, rtol=_TOLERANCE
        )
        return float(root) * (1 + _TOLERANCE)


_BLUR = 4e-3  # blur allowed, as a share of ε
_ORDERS = np.array([2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256.0])  # whole numbers: quick
_DELTA = 1e-6  # at which the scale of ε is guessed
_COARSEST = 1.0  # beyond it e^h is no longer near 1 + h; ε so large needs no precision
_LARGEST_STEP_GRID = 1 << 20
_LARGEST_TOTAL_GRID = 1 << 22
_REFINEMENTS = 3


@functools.lru_cache(maxsize=256)  # a plan is calibrated, checked, added up and shown
def epsilon_pld(event: MechanismEvent, delta: float) -> float:
    """Return the claim: an upper bound on ε at δ for `event`, under its own relation.

    The result is ∞ if the event contains a release without a guarantee, or if δ is below the
    probability of an infinite privacy loss (a histogram's tail). A part without a known PLD
    (`event.has_pld`) is composed as the (ε, δ) that is proven for it; if it is the whole event,
    the result is its ε by Rényi DP.

    Raises:
        BadInput: δ is not in (0, 1).
    """
    if not 0 < delta < 1:
        raise BadInput(f"{delta} is not between 0 and 1", where="delta")
    if event.claimed_by_rdp:
        return _by_rdp(event, delta)
    steps = event.steps()
    if _without_guarantee(steps):
        return math.inf
    scale = _scale_of(steps)
    interval = _interval_for(steps, scale)
    epsilon = _epsilon(event, steps, delta, interval)
    for _ in range(_REFINEMENTS):
        # The Rényi estimate is far too high where ε is small. The ε of every grid is valid, and a
        # finer grid gives a tighter one.
        if epsilon == 0 or epsilon > scale / 4:
            break
        scale, coarser = epsilon, interval
        interval = _interval_for(steps, scale)
        if interval == coarser:  # as fine as one step's losses allow
            break
        epsilon = min(epsilon, _epsilon(event, steps, delta, interval))
    return epsilon


def composed_profile(event: MechanismEvent) -> Callable[[float], float]:
    """Return δ(ε) of `event` at ε ≥ 0 on one grid, from above; 1 if there is no guarantee."""
    steps = event.steps()
    if _without_guarantee(steps):
        return lambda _: 1.0

    def profile(plds: tuple[ComposedPld, ...]) -> Callable[[float], float]:
        max(pld.delta(0.0) for pld in plds)  # the widest window of all
        return lambda epsilon: max(pld.delta(epsilon) for pld in plds)

    return _on_grid(steps, _interval_for(steps, _scale_of(steps)), profile) or (lambda _: 1.0)


def _epsilon(
    event: MechanismEvent, steps: Sequence[SelfComposed], delta: float, interval: float
) -> float:
    by_pld = _on_grid(steps, interval, lambda plds: _larger_epsilon(*plds, delta=delta))
    return _by_rdp(event, delta) if by_pld is None else by_pld  # in the thousands: valid is enough


def _larger_epsilon(pld: ComposedPld, *reverse: ComposedPld, delta: float) -> float:
    """Return the larger ε of both directions. The reverse usually has a smaller δ at the first."""
    epsilon = pld.epsilon(delta)
    worse = [r for r in reverse if math.isfinite(epsilon) and r.delta(epsilon) > delta]
    return max([epsilon, *(r.epsilon(delta) for r in worse)])


def _by_rdp(event: MechanismEvent, delta: float) -> float:
    epsilon = epsilon_rdp(event, delta)
    return math.inf if epsilon is None else epsilon


def _on_grid(
    steps: Sequence[SelfComposed],
    interval: float,
    answer: Callable[[tuple[ComposedPld, ...]], _Answer],
) -> _Answer | None:
    """Return an answer from the losses on the finest grid that fits, or None if none does."""
    while interval <= _COARSEST:
        try:
            return answer(composed_plds(steps, interval))
        except GridTooFineError:
            interval *= 4
    return None


def composed_plds(steps: Sequence[SelfComposed], interval: float) -> tuple[ComposedPld, ...]:
    """Return the summed loss with the unit against without it, and the reverse if it differs."""
    pairs = [(discretise(step, interval), count) for step, count in steps]
    with_unit = ComposedPld([(pair[0], count) for pair, count in pairs], interval)
    if all(pair[0] is pair[1] for pair, _ in pairs):
        return (with_unit,)
    return with_unit, ComposedPld([(pair[1], count) for pair, count in pairs], interval)


def _without_guarantee(steps: Sequence[SelfComposed]) -> bool:
    return any(math.isinf(step.reach()) for step, _ in steps)


def _scale_of(steps: Sequence[SelfComposed]) -> float:
    """Return roughly the ε at δ = 1e-6, at least 1e-3, from estimated Rényi curves."""
    curve = sum((count * step.rdp_estimate(_ORDERS) for step, count in steps), np.zeros(()))
    return max(float(np.min(curve + math.log(1 / _DELTA) / (_ORDERS - 1))), 1e-3)


def _interval_for(steps: Sequence[SelfComposed], epsilon: float) -> float:
    """Return the spacing of the privacy-loss grid: 1, 2 or 5 times a power of ten.

    Args:
        epsilon: the scale of ε: an estimate from `_scale_of`, or the result on a coarser grid.
    """
    count = sum(count for _, count in steps)
    reach = 2 * max(step.reach() for step, _ in steps)  # on each side of 0
    wanted = min(1e-3 * max(1.0, epsilon / 5), 2 * _BLUR * epsilon / math.sqrt(count))
    affordable = max(reach / _LARGEST_STEP_GRID, 4 * epsilon / _LARGEST_TOTAL_GRID)
    value = max(wanted, affordable)
    exponent = math.floor(math.log10(value))
    mantissa = value / 10**exponent
    return float(f"{max(m for m in (1, 2, 5) if m <= mantissa * (1 + 1e-9))}e{exponent}")


# --- Rényi DP

ORDERS: tuple[float, ...] = (
    *range(2, 64),
    *(64, 72, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768, 1024),
)
# Fractions matter where ε is large; where it is small their series may not converge.
LOW_ORDERS: tuple[float, ...] = tuple(1 + x / 10 for x in range(1, 100))
# The orders of TensorFlow Privacy's compute_dp_sgd_privacy before 2020.
PAPER_ORDERS: tuple[float, ...] = tuple([1 + x / 10 for x in range(1, 100)] + list(range(12, 64)))


def pure_dp_rdp(epsilon: float, order: float) -> float:
    """Return the largest Rényi divergence of order α between ε-indistinguishable distributions.

    Attained by randomised response with p = e^ε/(1+e^ε), which every such pair is a
    post-processing of (Kairouz, Oh and Viswanath 2015):
    1/(α−1) · ln(p^α (1−p)^(1−α) + (1−p)^α p^(1−α)).
    """
    if math.isinf(order) or math.isinf(epsilon):
        return epsilon
    log_p, log_not_p = -np.logaddexp(0.0, -epsilon), -np.logaddexp(0.0, epsilon)
    log_sum = np.logaddexp(
        order * log_p + (1 - order) * log_not_p, order * log_not_p + (1 - order) * log_p
    )
    return min(epsilon, max(0.0, float(log_sum) / (order - 1)))


def epsilon_rdp(event: MechanismEvent, delta: float) -> float | None:
    """Return ε from Rényi DP by the conversion of Canonne, Kamath and Steinke 2020 (Prop. 12).

    None where no Rényi bound of the mechanism is known (histograms, truncated samples).
    """
    curve = event.rdp(ORDERS)
    if curve is None:
        return None
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    epsilon, order = compute_epsilon(ORDERS, curve, delta)
    if 0 < order <= LOW_ORDERS[-1] and epsilon > 0:
        low, _ = compute_epsilon(LOW_ORDERS, event.rdp(LOW_ORDERS), delta)
        epsilon = min(epsilon, low)
    return float(epsilon)


def epsilon_paper_conversion(event: MechanismEvent, delta: float) -> float:
    """Return ε by the conversion in use before 2020: min over α of RDP(α) + ln(1/δ)/(α − 1).

    Mironov 2017 (arXiv:1702.07476), Proposition 3. Valid but loose; paper mode shows it.
    """
    curve = event.rdp(PAPER_ORDERS)
    if curve is None:
        return math.inf
    return float(np.min(curve + math.log(1 / delta) / (np.asarray(PAPER_ORDERS) - 1)))


# --- the Gaussian mechanism, in closed form


def gaussian_epsilon(delta: float, mu: float) -> float:
    """Return the smallest ε ≥ 0 at which the Gaussian mechanism with μ is (ε, δ)-DP."""
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    high = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1e-9

    # The excess is monotone in ε; `high` is the zCDP bound, so the root lies between.
    def excess(epsilon: float) -> float:
        return float(gaussian_delta(epsilon, mu)) - delta

    return float(scipy.optimize.brentq(excess, 0.0, high, xtol=1e-12))
