"""The exact privacy profile of a thresholded histogram with discrete Gaussian noise.

A unit v with ℓ words that nobody else has, and at most N − ℓ others. On a shared word the noise
hides a step of 1; a word of its own is released with probability τ = Pr[1 + Z ≥ C], and only if
v is there. With P the release with v and Q the one without, and δ_m the profile of m shared words:

    H_ε(P‖Q) = 1 − (1−τ)^ℓ + (1−τ)^ℓ · δ_{N−ℓ}(ε − ℓ ln(1−τ))        "with"
    H_ε(Q‖P) = δ_{N−ℓ}(ε + ℓ ln(1−τ))                                "without"

Each is maximised over ℓ; fewer shared words, or a threshold that hides some, is post-processing.
δ_m for m unit steps in independent discrete Gaussian noise (Canonne, Kamath and Steinke 2020,
arXiv:2004.00010, Theorem 7, whose argument carries over): the privacy loss depends on the sum S
of the m noise terms alone, so with t = εσ² + m/2

    δ_m(ε) = Pr[S > t − m] − e^ε · Pr[S > t].

S is a discrete Gaussian of variance mσ² up to a factor e^{±κ} (`convolution_slack`), taken the
pessimistic way. The continuous formula is *not* used: it is another mechanism's. The maximum over
ℓ is again the profile of a dominating pair (Zhu, Dong and Wang 2022, arXiv:2106.08567,
Proposition 8), so it composes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dp_core.privacy.accounting.discrete_gaussian import (
    DiscreteGaussianTail,
    convolution_slack,
    upper_tail,
)

_BLOCKS = 256  # ℓ is exact up to this many words per unit, then taken in blocks, from above


@dataclass(frozen=True)
class HistogramProfile:
    """δ(ε) of one released histogram, in both directions.

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

    def delta(self, epsilon: float) -> float:
        """Return δ at ε: the worse of the two directions."""
        return float(max(side[0] for side in self.directions([epsilon])))

    def directions(self, epsilon: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (with, without): the hockey-stick divergences at each ε, from above."""
        eps = np.asarray(epsilon, dtype=np.float64)
        stay = math.log1p(-self.tail)  # log-probability that a lone word stays hidden
        with_unit, without_unit = np.zeros_like(eps), np.zeros_like(eps)
        for first, last in lone_word_blocks(self.words_per_unit):
            # In a block of ℓ both bounds only grow by taking the shared words of its first
            # member and the lone words of its last.
            shared = _SharedWords(self.words_per_unit - first, self.sigma)
            hidden = shared.delta(eps - first * stay)
            released = -math.expm1(last * stay)
            with_unit = np.maximum(with_unit, released + (1 - released) * hidden)
            without_unit = np.maximum(without_unit, shared.delta(eps + last * stay))
        return with_unit, without_unit

    def reach(self) -> float:
        """Return the loss 12 standard deviations out, if every word is shared."""
        mu = math.sqrt(self.words_per_unit) / self.sigma
        return mu * mu / 2 + 12 * mu


def lone_word_blocks(words_per_unit: int) -> list[tuple[int, int]]:
    """Return the (first, last) ℓ of each block; every ℓ by itself where N is small."""
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
        self._tail = DiscreteGaussianTail(math.sqrt(m) * sigma) if m else None
        self._kappa = convolution_slack(m, sigma)

    def delta(self, eps: NDArray[np.float64]) -> NDArray[np.float64]:
        if self._tail is None:
            return np.maximum(0.0, -np.expm1(eps))
        if math.isinf(self._kappa):
            return np.ones_like(eps)
        # One rounding for both tails: they are the two probabilities of one and the same event.
        beyond = np.floor(eps * self._variance + self._m / 2) + 1
        _, upper = self._tail.bounds(beyond - self._m)
        lower, _ = self._tail.bounds(beyond)
        delta = math.exp(self._kappa) * upper - np.exp(eps - self._kappa) * lower
        return np.asarray(np.clip(delta, np.maximum(0.0, -np.expm1(eps)), 1.0))
