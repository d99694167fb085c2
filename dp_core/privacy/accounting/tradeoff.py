"""Hypothesis testing: bounds on any attack that decides whether one unit was in the data.

An attack decides from the release whether it was made with the unit (P) or without it (Q). Its
true positive rate (TPR) is P(S), its false positive rate (FPR) Q(S), for the set S of releases on
which it says "in". Every (ε, δ(ε)) of the privacy profile bounds the one by the other, in both
directions, so the errors of saying "out" are bounded too (Dong, Roth and Su 2022,
arXiv:1905.02383). Group privacy gives the same bounds for several units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import scipy
from numpy.typing import NDArray

from dp_core.errors import BadInput
from dp_core.privacy.accounting.accountants import composed_profile, epsilon_pld, gaussian_epsilon

if TYPE_CHECKING:
    from dp_core.privacy.mechanisms import MechanismEvent

Floats = NDArray[np.float64]

# δ at the last of a profile's points: the least at which the mechanism has an ε. Attacks on so few
# units see nothing below the first; released words have no ε below the chance that one slips out.
_LEAST_DELTAS = (1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2)
_PROFILE_POINTS = 128
_AREA_POINTS = 4000


class GroupGuarantee(NamedTuple):
    """(ε, δ) for data sets that differ by up to `size` units."""

    size: int
    epsilon: float
    delta: float


def group_privacy(epsilon: float, delta: float, size: int) -> GroupGuarantee:
    """Return the guarantee for `size` = k units: (kε, δ(e^{kε} − 1)/(e^ε − 1)).

    Dwork and Roth 2014, Theorem 2.2 with the δ of the k-fold triangle inequality. Both
    parameters grow with the size of the group.
    """
    if size < 1:
        raise BadInput(f"a group of {size}", where="size")
    if epsilon == 0:
        return GroupGuarantee(size, 0.0, min(1.0, size * delta))
    if size * epsilon > 700:
        return GroupGuarantee(size, size * epsilon, 1.0)
    factor = math.expm1(size * epsilon) / math.expm1(epsilon)
    return GroupGuarantee(size, size * epsilon, min(1.0, delta * factor))


class TradeOff(Protocol):
    """A bound on every test that distinguishes a unit's presence from its absence."""

    def least_false_positive_rate(self, true_positive_rate: float) -> float:
        """Return x(r), the least false positive rate at a true positive rate r, both in [0, 1].

        It is convex and never falls; a lower bound on the truth is valid, and only weaker.
        """


@dataclass(frozen=True)
class PrivacyProfile:
    """Several (ε, δ) that hold together and bound every attack on one unit's membership.

    Every pair bounds both errors of every test (Kairouz, Oh and Viswanath 2015, arXiv:1311.0776,
    Theorem 2.1): TPR ≤ e^ε·FPR + δ, which says that "in" is not much likelier with the unit, and
    1 − FPR ≤ e^ε·(1 − TPR) + δ, that "out" is not much likelier without it. So the least of all
    pairs' bounds holds. The bounds are on expectations over training and over which units are
    members: a measurement on a few units may exceed them by chance.

    Attributes:
        pairs: (ε, δ); none: nothing is excluded.

    Raises:
        BadInput: a pair that is no guarantee.
    """

    pairs: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        for epsilon, delta in self.pairs:
            if not (0 <= epsilon < math.inf and 0 <= delta <= 1):
                raise BadInput(f"({epsilon}, {delta}) is no guarantee", where="privacy profile")

    @classmethod
    def of_claim(cls, epsilon: float, delta: float) -> PrivacyProfile:
        """Return the stated (ε, δ) alone; of ε = ∞, nothing."""
        return cls(((epsilon, delta),) if epsilon != math.inf else ())

    @classmethod
    def of_event(cls, event: MechanismEvent) -> PrivacyProfile:
        """Return points of a mechanism's profile δ(ε), by PLD, from above, in both directions.

        Only some ε are evaluated, so the profile is weaker than the mechanism, and evidence
        against the profile is evidence against the mechanism. There are no points without a
        guarantee.
        """
        profile = composed_profile(event)
        ends = (epsilon_pld(event, delta) for delta in _LEAST_DELTAS)
        highest = next(filter(math.isfinite, ends), math.inf)
        if not math.isfinite(highest):
            return cls(())
        points = highest * np.linspace(0, 1, _PROFILE_POINTS) ** 1.5  # denser where δ falls fast
        return cls(tuple((float(e), min(1.0, profile(float(e)))) for e in points))

    def for_group(self, units: int) -> PrivacyProfile:
        """Return the profile for a group of that many units (Dwork and Roth 2014, Theorem 2.2)."""
        groups = [group_privacy(epsilon, delta, units) for epsilon, delta in self.pairs]
        return PrivacyProfile(tuple((g.epsilon, min(1.0, g.delta)) for g in groups))

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Return the largest TPR at an FPR.

        Raises:
            BadInput: FPR is not in [0, 1].
        """
        if not 0 <= false_positive_rate <= 1:
            raise BadInput(
                f"{false_positive_rate} is not between 0 and 1", where="false positive rate"
            )
        up, down, deltas = self._columns
        first = up * false_positive_rate + deltas
        second = 1 - down * (1 - deltas - false_positive_rate)
        return float(np.minimum(first, second).min(initial=1.0))

    def least_false_positive_rate(self, true_positive_rate: float) -> float:
        """Return x(r), the least FPR at a TPR r in [0, 1] (Dong, Roth and Su, Proposition 2.5)."""
        up, down, deltas = self._columns
        first = down * (true_positive_rate - deltas)
        second = 1 - deltas - up * (1 - true_positive_rate)
        return float(np.maximum(first, second).max(initial=0.0))

    @property
    def leakage(self) -> float:
        """The largest TPR − FPR: (e^ε − 1 + 2δ)/(e^ε + 1), where both lines meet."""
        bounds = (math.tanh(e / 2) + 2 * d / (math.exp(min(e, 700.0)) + 1) for e, d in self.pairs)
        return min((1.0, *bounds))

    @property
    def area(self) -> float:
        """The largest AUC: the area under the largest TPR, from above."""
        rates = np.union1d(np.geomspace(1e-9, 1, _AREA_POINTS), np.linspace(0, 1, _AREA_POINTS))
        highest = [self.true_positive_rate(float(rate)) for rate in rates[1:]]  # it never falls
        # The factor exceeds the rounding of the sum, whose order depends on the processor.
        return min(1.0, float(np.dot(np.diff(rates), highest)) * (1 + 1e-12))

    @cached_property
    def _columns(self) -> tuple[Floats, Floats, Floats]:
        """e^ε, e^{−ε} and δ of all pairs."""
        epsilons, deltas = np.array(self.pairs, np.float64).reshape(-1, 2).T
        return np.exp(np.minimum(epsilons, 700.0)), np.exp(-epsilons), deltas


@dataclass(frozen=True)
class GaussianTradeOff:
    """The trade-off of μ-GDP, N(0, 1) against N(μ, 1): x = Φ(Φ⁻¹(r) − μ)."""

    mu: float

    @classmethod
    def of_epsilon(cls, epsilon: float, delta: float) -> GaussianTradeOff:
        """Return the curve of the Gaussian mechanism whose ε at δ this is."""
        return cls(_gaussian_mu(epsilon, delta))

    def epsilon(self, delta: float) -> float:
        """Return ε at δ of this curve."""
        return gaussian_epsilon(delta, self.mu) if self.mu > 0 else 0.0

    def least_false_positive_rate(self, true_positive_rate: float) -> float:
        """Return x(r)."""
        return float(scipy.special.ndtr(scipy.special.ndtri(true_positive_rate) - self.mu))


@lru_cache(maxsize=4096)  # searches for a bound evaluate the same ε again
def _gaussian_mu(epsilon: float, delta: float) -> float:
    if epsilon <= 0:
        return 0.0
    high = 1.0
    while gaussian_epsilon(delta, high) < epsilon:
        high *= 2

    def excess(mu: float) -> float:
        return gaussian_epsilon(delta, mu) - epsilon

    return float(scipy.optimize.brentq(excess, 1e-9, high, xtol=1e-8))
