"""The privacy profile of one step of each mechanism: δ(ε) for ε ≥ 0, in both directions.

"With" is the hockey-stick divergence H_ε(P‖Q) of the output P with the unit from the output Q
without it; "without" is H_ε(Q‖P). Negative ε follow, because H_{−ε}(P‖Q) = 1 − e^{−ε} +
e^{−ε} H_ε(Q‖P). For symmetric relations the two are equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binom

from dp_core.privacy.accounting.gaussian import gaussian_delta

Floats = NDArray[np.float64]


class Profile(Protocol):
    """δ(ε) of one step, from above."""

    def directions(self, epsilon: Floats) -> tuple[Floats, Floats]:
        """Return (with, without) at each ε ≥ 0."""

    def reach(self) -> float:
        """Return an ε beyond which only probability that no ε repairs is left."""


@dataclass(frozen=True)
class SubsampledGaussian:
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
        return loss if loss > 600 else math.log1p(self.rate * math.expm1(loss))


@dataclass(frozen=True)
class TruncatedSubsampledGaussian:
    """Poisson sampling, cut to a uniform subset of `cap` units where more were drawn.

    Let B be the number of *other* units drawn; it does not depend on the unit in question. If
    B < cap nothing is cut, with or without the unit: the plain subsampled Gaussian. Otherwise
    the other units send a uniform subset of `cap`, and the unit, if drawn, takes the place of one
    of them with probability cap/(B+1) < 1: given the subset and the one replaced, a Gaussian
    whose sum moves by up to 2 C, with probability at most q. So a step is at most the mixture of
    both, weighted with Pr[B ≥ cap]. (The decomposition of arXiv:2508.15089, which bounds the
    second part by replace-one.) The second part is the worse and its weight grows with n, so a
    declared upper bound may stand for the true number of units.
    """

    units: int
    cap: int
    rate: float
    mu: float

    def directions(self, epsilon: Floats) -> tuple[Floats, Floats]:
        """Return (with, without) at each ε ≥ 0."""
        plain = SubsampledGaussian(self.rate, self.mu).directions(epsilon)
        cut = float(binom.sf(self.cap - 1, self.units - 1, self.rate))
        replaced = SubsampledGaussian(self.rate, 2 * self.mu).directions(epsilon)
        first, second = ((1 - cut) * a + cut * b for a, b in zip(plain, replaced, strict=True))
        return first, second

    def reach(self) -> float:
        """Return the reach of the part with twice the sensitivity."""
        return SubsampledGaussian(self.rate, 2 * self.mu).reach()


@dataclass(frozen=True)
class FixedSizeProfile:
    """A uniform subset of fixed size, a share `rate` of the slots; replace-one, symmetric.

    Balle, Barthe and Gaboardi 2018 (arXiv:1807.01647), Theorems 2 and 11: with G the replace-one
    profile of the Gaussian (sensitivity 2, also where one unit takes another's place in the
    batch), δ(ln(1 + q(e^ε − 1))) = q·G(ε).
    """

    rate: float
    mu: float

    def directions(self, epsilon: Floats) -> tuple[Floats, Floats]:
        """Return the profile twice: the relation is symmetric."""
        both = self.rate * gaussian_delta(_deamplified(epsilon, self.rate), 2 * self.mu)
        return both, both

    def reach(self) -> float:
        """Return the loss 12 standard deviations out."""
        return SubsampledGaussian(self.rate, 2 * self.mu).reach()


def _deamplified(epsilon: Floats, rate: float) -> Floats:
    """Return ln(1 + (e^ε − 1)/q), in the form that neither cancels nor overflows."""
    small = np.log1p(np.expm1(np.minimum(epsilon, 1.0)) / rate)
    large = epsilon + np.log1p(-(1 - rate) * np.exp(-np.maximum(epsilon, 1.0))) - math.log(rate)
    return np.where(epsilon < 1, small, large)
