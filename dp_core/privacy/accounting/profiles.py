"""The privacy profile of one step of each mechanism: δ(ε) for ε ≥ 0, in both directions.

"With" is the hockey-stick divergence H_ε(P‖Q) of the output P with the unit from the output Q
without it; "without" is H_ε(Q‖P). Negative ε follow, because H_{−ε}(P‖Q) = 1 − e^{−ε} +
e^{−ε} H_ε(Q‖P). For symmetric relations the two are equal.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

# SciPy imports its parts at their first use. So does this module with dp_accounting: together they
# take a second of processor time, and most steps and commands compute no ε.
if TYPE_CHECKING:
    import dp_accounting as dpa

Floats = NDArray[np.float64]


def gaussian_delta(epsilon: ArrayLike, mu: ArrayLike) -> NDArray[np.float64]:
    """Return δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), exact in both directions.

    Args:
        epsilon: any real numbers.
        mu: sensitivity over standard deviation, ≥ 0; broadcast against `epsilon`.
    """
    eps, m = np.asarray(epsilon, dtype=np.float64), np.asarray(mu, dtype=np.float64)
    safe = np.where(m > 0, m, 1.0)
    upper = scipy.special.log_ndtr(safe / 2 - eps / safe)
    lower = eps + scipy.special.log_ndtr(-safe / 2 - eps / safe)
    delta = np.exp(upper) * -np.expm1(np.minimum(lower - upper, 0.0))
    return np.where(m > 0, delta, np.maximum(0.0, -np.expm1(np.minimum(eps, 0.0))))


def library_curve(event: dpa.DpEvent, orders: ArrayLike, relation: str) -> Floats:
    """Return the curve of an event of dp_accounting, under the relation of this name in it."""
    return _curve(event, tuple(np.asarray(orders, np.float64).tolist()), relation).copy()


@functools.lru_cache(maxsize=256)  # charge, statement and report need the same curve
def _curve(event: dpa.DpEvent, orders: tuple[float, ...], relation: str) -> Floats:
    import dp_accounting as dpa
    from absl import logging as absl_logging  # type: ignore[import-untyped]

    accountant = dpa.rdp.RdpAccountant(np.asarray(orders), dpa.NeighboringRelation[relation])
    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)  # an order whose series diverges is left out
    try:
        return np.asarray(accountant.compose(event).rdp, dtype=np.float64)
    finally:
        absl_logging.set_verbosity(verbosity)


class Profile(abc.ABC):
    """The privacy profile δ(ε) of one step of a mechanism, bounded from above, and its RDP."""

    @abc.abstractmethod
    def directions(self, epsilon: Floats) -> tuple[Floats, Floats]:
        """Return (with, without) at each ε ≥ 0; the same array twice where it is symmetric."""

    def delta_at(self, epsilon: float) -> float:
        """Return δ at ε: the worse of the two directions."""
        return float(max(side[0] for side in self.directions(np.array([epsilon]))))

    @abc.abstractmethod
    def reach(self) -> float:
        """Return an ε beyond which only the probability of an infinite loss is left."""

    def rdp(self, orders: ArrayLike) -> Floats | None:
        """Return the Rényi divergence bound at each order, or None where none is known."""
        return None

    def rdp_estimate(self, orders: Floats) -> Floats:
        """Return an estimate of the Rényi curve: it chooses a grid, and need not be a bound."""
        known = self.rdp(orders)
        return np.zeros_like(orders) if known is None else known


class SelfComposed(NamedTuple):
    """A step, adaptively composed with itself so many `times`."""

    step: Profile
    times: int


@dataclass(frozen=True)
class SubsampledGaussian(Profile):
    """Poisson sampling at `rate`, then the Gaussian mechanism with μ = sensitivity/σ.

    P = (1−q) N(0,1) + q N(μ,1) against Q = N(0,1) dominates every pair of neighbours, in each
    direction (Zhu, Dong and Wang 2022, arXiv:2106.08567, Theorem 11). With G the profile of the
    Gaussian mechanism, P − e^ε Q = q·[N(μ,1) − e^{a} N(0,1)] with e^a = (e^ε − 1 + q)/q, and
    Q − e^ε P = (1 − e^ε(1−q))·[N(0,1) − e^{b} N(μ,1)] with e^b = q e^ε/(1 − e^ε(1−q)).
    """

    rate: float
    mu: float

    def directions(self, epsilon: Floats) -> tuple[Floats, Floats]:
        """Return (with, without) at each ε ≥ 0."""
        q = self.rate
        if q == 1:
            both = gaussian_delta(epsilon, self.mu)
            return both, both
        with_unit = q * gaussian_delta(_deamplified(epsilon, q), self.mu)
        rest = -np.expm1(np.minimum(epsilon + math.log1p(-q), 1.0))  # 1 − e^ε(1−q), where above 0
        positive = rest > 0
        safe = np.where(positive, rest, 1.0)
        shifted = epsilon + math.log(q) - np.log(safe)
        without = np.where(positive, safe * gaussian_delta(shifted, self.mu), 0.0)
        return with_unit, without

    def reach(self) -> float:
        """Return the loss 12 standard deviations out."""
        loss = self.mu * self.mu / 2 + 12 * self.mu
        if loss > 600:
            return float(np.logaddexp(0.0, loss + math.log(self.rate)))  # not below 0 at tiny rates
        return math.log1p(self.rate * math.expm1(loss))

    def rdp(self, orders: ArrayLike) -> Floats:
        """Return the exact Rényi curve (Mironov, Talwar and Zhang 2019, arXiv:1908.10530)."""
        if self.rate == 1:
            return np.asarray(orders, dtype=np.float64) * (self.mu * self.mu / 2)
        import dp_accounting as dpa

        event = dpa.PoissonSampledDpEvent(self.rate, dpa.GaussianDpEvent(1 / self.mu))
        return library_curve(event, orders, "ADD_OR_REMOVE_ONE")


def gaussian(mu: float) -> SubsampledGaussian:
    """Return the profile of the Gaussian mechanism with μ = sensitivity/σ, unsampled."""
    return SubsampledGaussian(1.0, mu)


@dataclass(frozen=True)
class TruncatedSubsampledGaussian(Profile):
    """Poisson sampling, cut to a uniform subset of `cap` units if more were drawn.

    With m other units, their number B in the draw is Bin(m, q). If B < cap, nothing is cut and the
    step is the subsampled Gaussian of rate q. If B ≥ cap, the others send a uniform subset of
    `cap`, which is independent of B, and the unit takes the place of one of them with probability
    p(m) = E[q·cap/(B + 1) | B ≥ cap]: a subsampled Gaussian of rate p(m) and sensitivity 2C. The
    step is the mixture of both with weight t(m) = Pr[B ≥ cap] (arXiv:2508.15089).

    The true m is private and at most `units` − 1. t grows with m and p falls, and a smaller m can
    be worse, so the profile is an upper bound over all m: m is divided into ranges, each of which
    counts with the t of its largest and the p of its smallest m (docs/proofs.md, "Batches that are
    cut").
    """

    units: int
    cap: int
    rate: float
    mu: float

    def directions(self, epsilon: Floats) -> tuple[Floats, Floats]:
        """Return (with, without) at each ε ≥ 0."""
        plain = SubsampledGaussian(self.rate, self.mu).directions(epsilon)
        first, second = plain
        for cut, rate in self._cuts():
            replaced = SubsampledGaussian(rate, 2 * self.mu).directions(epsilon)
            first = np.maximum(first, (1 - cut) * plain[0] + cut * replaced[0])
            second = np.maximum(second, (1 - cut) * plain[1] + cut * replaced[1])
        return first, second

    def _cuts(self) -> Iterator[tuple[float, float]]:
        """Yield (t, p) of each range of m; their widths are 1, 1, 2, 4, … from the largest m."""
        top, width = self.units - 1, 1
        largest = top
        while top >= self.cap and (cut := self._at_least(self.cap, top)) > 0:
            bottom = max(self.cap, top - width + 1)
            yield cut, self._replacing_rate(bottom)
            top, width = bottom - 1, max(1, largest - bottom + 1)

    def _replacing_rate(self, others: int) -> float:
        """Return p(m); at most q·cap/(cap + 1), also if no batch is ever cut in floating point."""
        most = self.rate * self.cap / (self.cap + 1)
        cut = self._at_least(self.cap, others)
        if cut == 0:
            return most
        taken = self._at_least(self.cap + 1, others + 1) * self.cap / (others + 1)
        return min(most, taken / cut)

    def _at_least(self, drawn: int, units: int) -> float:
        """Return the probability that at least `drawn` of the units are drawn."""
        return float(scipy.stats.binom.sf(drawn - 1, units, self.rate))

    def reach(self) -> float:
        """Return the reach of the part with twice the sensitivity."""
        return SubsampledGaussian(self.rate, 2 * self.mu).reach()

    def rdp_estimate(self, orders: Floats) -> Floats:
        """Return the curve of batches that are not cut."""
        return SubsampledGaussian(self.rate, self.mu).rdp(orders)


@dataclass(frozen=True)
class FixedSizeProfile(Profile):
    """A uniform subset of `batch` of the `slots`; replace-one, symmetric. μ = clip norm/σ.

    Balle, Barthe and Gaboardi 2018 (arXiv:1807.01647), Theorems 2 and 11: with G the replace-one
    profile of the Gaussian (sensitivity 2, also where one unit takes another's place in the
    batch), δ(ln(1 + q(e^ε − 1))) = q·G(ε).
    """

    slots: int
    batch: int
    mu: float

    def directions(self, epsilon: Floats) -> tuple[Floats, Floats]:
        """Return the profile twice: the relation is symmetric."""
        rate = self.batch / self.slots
        both = rate * gaussian_delta(_deamplified(epsilon, rate), 2 * self.mu)
        return both, both

    def reach(self) -> float:
        """Return the loss 12 standard deviations out."""
        return SubsampledGaussian(self.batch / self.slots, 2 * self.mu).reach()

    def rdp(self, orders: ArrayLike) -> Floats:
        """Return the curve of sampling without replacement.

        Wang, Balle and Kasiviswanathan 2019 (arXiv:1808.00087), Theorem 27.
        """
        import dp_accounting as dpa

        gaussian_event = dpa.GaussianDpEvent(1 / (2 * self.mu))
        event = dpa.SampledWithoutReplacementDpEvent(self.slots, self.batch, gaussian_event)
        return library_curve(event, orders, "REPLACE_ONE")

    def rdp_estimate(self, orders: Floats) -> Floats:
        """Return the curve of Poisson sampling: a close estimate; the exact curve takes seconds."""
        return SubsampledGaussian(self.batch / self.slots, 2 * self.mu).rdp(orders)


@dataclass(frozen=True)
class EpsilonDelta(Profile):
    """(ε, δ)-DP and nothing else known: its dominating pair, symmetric.

    Randomised response that gives itself away with probability δ (Kairouz, Oh and Viswanath 2015):
    δ + (1 − δ)(e^ε − e^x)₊/(e^ε + 1) at x.
    """

    epsilon: float
    delta: float

    def directions(self, epsilon: Floats) -> tuple[Floats, Floats]:
        """Return the profile twice: the pair is symmetric."""
        gap = np.minimum(epsilon - self.epsilon, 0.0)
        hidden = -np.expm1(gap) / (1 + math.exp(-self.epsilon))
        both = self.delta + (1 - self.delta) * hidden
        return both, both

    def reach(self) -> float:
        """Return ε, beyond which only δ is left, or ∞ without a guarantee."""
        return self.epsilon if self.delta < 1 else math.inf

    def rdp_estimate(self, orders: Floats) -> Floats:
        """Return the divergence without the part of δ: at most ε, and αε²/2 where ε is small."""
        return np.minimum(self.epsilon, orders * self.epsilon**2 / 2)


NO_GUARANTEE = EpsilonDelta(math.inf, 1.0)


def _deamplified(epsilon: Floats, rate: float) -> Floats:
    """Return ln(1 + (e^ε − 1)/q), in the form that neither cancels nor overflows."""
    small = np.log1p(np.expm1(np.minimum(epsilon, 1.0)) / rate)
    large = epsilon + np.log1p(-(1 - rate) * np.exp(-np.maximum(epsilon, 1.0))) - math.log(rate)
    return np.where(epsilon < 1, small, large)


_SUMMED_UP_TO = 4_000.0  # largest s whose tail is summed term by term
_REACH = 14.0  # standard deviations summed; beyond lies less than 1e-42


class DiscreteGaussianTail:
    """T(k) = Pr[X ≥ k] at integers k of any sign, as bounds from below and above that enclose it.

    Up to s = 4,000 the terms are summed, and both bounds are the sum wherever it has terms. Above,
    where no array holds them, convexity of the density beyond s gives midpoint (above) and
    trapezoid (below) bounds; within s the midpoint rule errs by at most
    (∫|f''| + ∫|f'''|)/24 < 0.05/s².
    """

    def __init__(self, s: float) -> None:
        self._s = s
        if s <= _SUMMED_UP_TO:
            k = np.arange(1, math.ceil(_REACH * s) + 3, dtype=np.float64)
            terms = np.exp(-(k * k) / (2 * s * s))
            sums = np.cumsum(terms[::-1])[::-1]
            tail = sums / (1.0 + 2.0 * sums[0])  # T(1), T(2), … T(last)
            # Pr[X ≥ k] = 1 − Pr[X ≥ 1 − k] by symmetry; beyond `last` on either side lies a bound.
            both = np.concatenate([1 - tail[::-1], tail])
            self._last = len(tail)
            self._lower = np.concatenate([both[:1], both, [0.0]])  # from k = −last on
            self._upper = np.concatenate([[1.0], both, both[-1:]])

    def lower(self, k: ArrayLike) -> Floats:
        """Return a lower bound of Pr[X ≥ k]."""
        if self._s <= _SUMMED_UP_TO:
            return np.asarray(self._lower.take(self._places(k), mode="clip"))
        at: Floats = np.asarray(k, dtype=np.float64)
        return np.where(at >= 1, self._beyond(at)[0], 1 - self._beyond(1 - at)[1])

    def upper(self, k: ArrayLike) -> Floats:
        """Return an upper bound of Pr[X ≥ k]."""
        if self._s <= _SUMMED_UP_TO:
            return np.asarray(self._upper.take(self._places(k), mode="clip"))
        at: Floats = np.asarray(k, dtype=np.float64)
        return np.where(at >= 1, self._beyond(at)[1], 1 - self._beyond(1 - at)[0])

    def _places(self, k: ArrayLike) -> NDArray[np.int64]:
        return np.add(k, self._last).astype(np.int64)

    def _beyond(self, k: Floats) -> tuple[Floats, Floats]:
        """Return both bounds at k ≥ 1, without a sum."""
        x, s = k - 0.5, self._s
        upper = scipy.special.ndtr(-x / s)
        density = np.exp(-(k * k) / (2 * s * s)) / (math.sqrt(2 * math.pi) * s)
        beyond = x >= s
        slack = 0.05 / (s * s)
        lower = np.where(beyond, scipy.special.ndtr(-k / s) + density / 2, upper - slack)
        return lower, np.where(beyond, upper, upper + slack)


def upper_tail(k: int, sigma: float) -> float:
    """Return Pr[N_ℤ(0, σ²) ≥ k], from above."""
    return float(DiscreteGaussianTail(sigma).upper(k))


def convolution_slack(m: int, sigma: float) -> float:
    """Return κ with e^{−κ} ≤ Pr[X₁+…+X_m = z] / Pr[N_ℤ(0, mσ²) = z] ≤ e^κ for every z.

    The sum of two discrete Gaussians of variances a², b² at z is exp(−z²/2(a²+b²)) times
    Σₓ exp(−(x−μz)²/2s²), s² = a²b²/(a²+b²). By Poisson summation that sum lies within
    √(2π)s·(1 ± 2T), T = Σⱼ exp(−2π²s²j²), so the ratio, which averages to 1, stays within
    (1+2T)/(1−2T); adding one term after another adds the logarithms. (The same fact with another
    constant: Kairouz, Liu and Steinke 2021, arXiv:2102.06387, Theorem 11.) Beyond σ = 2 it is
    nothing: 256 terms give κ < 1e-13.
    """
    k = np.arange(1, m, dtype=np.float64)
    first = np.exp(-2 * math.pi**2 * sigma**2 * k / (k + 1))
    t = first / (1 - first)  # Σⱼ first^(j²) ≤ Σⱼ first^j
    if np.any(t >= 0.5):
        return math.inf
    return float(np.sum(np.log1p(2 * t) - np.log1p(-2 * t)))


_BLOCKS = 256  # ℓ is exact up to this many words per unit, then taken in blocks, from above


@dataclass(frozen=True)
class HistogramProfile(Profile):
    """One released histogram: discrete Gaussian noise on the words present, cut at a threshold.

    Attributes:
        words_per_unit: N. sigma: of the discrete Gaussian. threshold: whole number C.
    """

    words_per_unit: int
    sigma: float
    threshold: int

    @property
    def tail(self) -> float:
        """τ: the probability that a word that one unit alone holds is released."""
        return upper_tail(self.threshold - 1, self.sigma)

    @property
    def coin(self) -> float:
        """The probability that any of N words that one unit alone holds is released."""
        return -math.expm1(self.words_per_unit * math.log1p(-self.tail))

    def directions(self, epsilon: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (with, without): the hockey-stick divergences at each ε, from above."""
        every = np.asarray(epsilon, dtype=np.float64)
        stay = math.log1p(-self.tail)  # log-probability that a lone word stays hidden

        def bounds(first: int, last: int, eps: Floats) -> Floats:
            """Bound both directions for every ℓ from first to last: (2, n).

            Both only grow by taking the shared words of the first and the lone words of the last.
            """
            shared = _SharedWords(self.words_per_unit - first, self.sigma)
            hidden = shared.delta(eps - first * stay)
            released = -math.expm1(last * stay)
            with_unit = released + (1 - released) * hidden
            return np.stack([with_unit, shared.delta(eps + last * stay)])

        blocks = lone_word_blocks(self.words_per_unit)
        end, places = len(blocks) - 1, np.arange(len(every))
        worst = np.zeros((2, len(every)))
        # The two ends (no lone word, or only lone words) are the worst nearly everywhere. The
        # range between them is halved only where its bound is above both ends.
        waiting = [(1, end, places), (end, end, places), (0, 0, places)]
        while waiting:
            i, j, places = waiting.pop()
            upper = bounds(blocks[i][0], blocks[j][1], every[places])
            above = np.any(upper > worst[:, places], axis=0)
            places = places[above]
            if i == j:
                worst[:, places] = np.maximum(worst[:, places], upper[:, above])
            elif len(places):
                middle = (i + j) // 2
                waiting += [(i, middle, places), (middle + 1, j, places)]
        return worst[0], worst[1]

    def reach(self) -> float:
        """Return the loss 12 standard deviations out, or ∞ if a lone word is certain to pass."""
        return self._all_words_shared.reach() if self.coin < 1 else math.inf

    def rdp_estimate(self, orders: Floats) -> Floats:
        """Return the curve of the continuous Gaussian on words that all others hold too."""
        return self._all_words_shared.rdp(orders)

    @property
    def _all_words_shared(self) -> SubsampledGaussian:
        return gaussian(math.sqrt(self.words_per_unit) / self.sigma)


@dataclass(frozen=True)
class NewItemsProfile(Profile):
    """Gaussian noise on items that other units hold too, and a coin for items of one unit alone.

    While no item that the unit alone holds is released, the outputs are post-processing of
    adaptively composed Gaussians with `mu` in all. A new item passes only if *its own noise* is
    large, which has probability at most `coin` for all of them, whatever weights the unit gives
    them; that noise has the same law on both sides. Given noise with which none passes:

      with:    coin + (1 − coin)·δ_G(ε − ln(1 − coin); μ),
      without: δ_G(ε + ln(1 − coin); μ)   (docs/proofs.md, "Items that one unit brings").
    """

    mu: float
    coin: float

    def directions(self, epsilon: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (with, without) at each ε, from above."""
        eps = np.asarray(epsilon, dtype=np.float64)
        if self.coin >= 1:
            return np.ones_like(eps), np.ones_like(eps)
        stay = math.log1p(-self.coin)
        hidden = gaussian_delta(eps - stay, self.mu)
        return self.coin + (1 - self.coin) * hidden, gaussian_delta(eps + stay, self.mu)

    def reach(self) -> float:
        """Return the loss 12 standard deviations out, or ∞ if a new item is certain to pass."""
        return gaussian(self.mu).reach() if self.coin < 1 else math.inf

    def rdp_estimate(self, orders: Floats) -> Floats:
        """Return the curve of the Gaussians."""
        return gaussian(self.mu).rdp(orders)


def lone_word_blocks(words_per_unit: int) -> list[tuple[int, int]]:
    """Return the (first, last) ℓ of each block; for small N every block holds one ℓ."""
    width = math.ceil(words_per_unit / _BLOCKS)
    starts = range(1, words_per_unit + 1, width)
    return [(0, 0)] + [(a, min(a + width - 1, words_per_unit)) for a in starts]


def shared_deltas(words_per_unit: int, sigma: float, epsilon: float) -> NDArray[np.float64]:
    """Return δ_{N−ℓ}(ε) for the first ℓ of each block of `lone_word_blocks`."""
    eps = np.asarray([epsilon])
    firsts = [first for first, _ in lone_word_blocks(words_per_unit)]
    return np.array([_SharedWords(words_per_unit - ell, sigma).delta(eps)[0] for ell in firsts])


class _SharedWords:
    """δ_m: m words that others hold too, each moved by 1."""

    def __init__(self, m: int, sigma: float) -> None:
        self._m, self._variance = m, sigma * sigma
        self._tail = DiscreteGaussianTail(math.sqrt(max(m, 1)) * sigma)
        self._kappa = convolution_slack(m, sigma)

    def delta(self, eps: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._m == 0:
            return np.maximum(0.0, -np.expm1(eps))
        if math.isinf(self._kappa):
            return np.ones_like(eps)
        # Losses lie at (k − m/2)/σ². Between two of them a profile is linear in e^ε: the chord of
        # two bounds is a bound. It is convex, as the grid of a PLD needs: bounds evaluated between
        # the losses would fall by 2κPr[k] at each, which a fine grid takes for probability.
        k = np.floor(eps * self._variance + self._m / 2)
        loss = (k - self._m / 2) / self._variance
        share = np.expm1(eps - loss) / math.expm1(1 / self._variance)
        here, after = self._bound(k, loss), self._bound(k + 1, loss + 1 / self._variance)
        delta = (1 - share) * here + share * after
        least = np.maximum(0.0, -np.expm1(eps)) if np.min(eps) < 0 else 0.0
        return np.asarray(np.minimum(np.maximum(delta, least), 1.0))

    def _bound(self, k: Floats, loss: Floats) -> Floats:
        """Return a bound on δ at a loss, where outputs above k are more likely with the unit."""
        upper, lower = self._tail.upper(k + 1 - self._m), self._tail.lower(k + 1)
        bound: Floats = math.exp(self._kappa) * upper - np.exp(loss - self._kappa) * lower
        return bound
