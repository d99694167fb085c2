"""What a release costs at one Rényi order: the currency of the filter.

A charge (ρ, δ) says: the release is δ-approximately (α, ρ)-Rényi private. That is, one can toss a
coin with probability δ, the same for both neighbours, such that while it does not come up the
Rényi divergence of order α between them is at most ρ, in both directions. δ = 0 is plain RDP
(Mironov 2017). For α = ∞ it is plain (ε, δ)-DP with ε = ρ (Kairouz, Oh and Viswanath 2015: every
(ε, δ)-DP mechanism has such a coin).
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass

import numpy as np

from dp_core.privacy.accounting import compose, epsilon_pld, rdp_curve
from dp_core.privacy.accounting.profiles import upper_tail
from dp_core.privacy.mechanisms import (
    Composed,
    ConvertedRelation,
    MechanismEvent,
    NeighboringRelation,
    ThresholdedHistogram,
)


@dataclass(frozen=True)
class Charge:
    """δ-approximate Rényi privacy (α, ρ), at an order that the context tells."""

    rho: float
    delta: float

    def __add__(self, other: Charge) -> Charge:
        return Charge(self.rho + other.rho, self.delta + other.delta)


Release = tuple[str, float]  # canonical JSON of an event, and the δ of its own (ε, δ)


@functools.lru_cache(maxsize=4096)
def charge(group: tuple[Release, ...], order: float) -> Charge:
    """Return what a group of releases, fixed together before the first of them, costs.

    Args:
        group: the releases; more than one only if the plan was registered whole.
        order: Rényi order α > 1, or ∞.
    """
    events = [(MechanismEvent.from_json(json.loads(text)), delta) for text, delta in group]
    if math.isinf(order):
        total = math.fsum(delta for _, delta in events)
        return Charge(epsilon_pld(compose(*(event for event, _ in events)), total), total)
    return added([_finite_order(event, delta, order) for event, delta in events])


def added(charges: list[Charge]) -> Charge:
    """Return the charge of everything together."""
    return Charge(math.fsum(c.rho for c in charges), math.fsum(c.delta for c in charges))


def _finite_order(event: MechanismEvent, delta: float, order: float) -> Charge:
    if isinstance(event, Composed):
        # each part may need a δ of its own: equal shares keep their sum what was stated
        share = delta / len(event.events)
        return added([_finite_order(part, share, order) for part in event.events])
    if isinstance(event, ConvertedRelation) and event.to is NeighboringRelation.ZERO_OUT:
        return _finite_order(event.event, delta, order)  # the same two distributions
    if isinstance(event, ThresholdedHistogram):
        return _histogram(event, order)
    curve = rdp_curve(event, [order])
    if curve is not None:
        return Charge(float(curve[0]), 0.0)
    return Charge(pure(epsilon_pld(event, delta), order), delta)


def _histogram(event: ThresholdedHistogram, order: float) -> Charge:
    """Return the charge of a thresholded histogram with discrete Gaussian noise.

    The coin: does a word that only this unit holds pass the threshold? It has N such words at
    most, and they pass independently of everything else. While none does, the neighbours differ
    by 1 in at most N counts, and ρ = αN/2σ² (Canonne, Kamath and Steinke 2020, Proposition 5).
    """
    tail = upper_tail(event.threshold - 1, event.sigma)
    coin = -math.expm1(event.words_per_unit * math.log1p(-tail))
    return Charge(order * event.words_per_unit / (2 * event.sigma**2), coin)


def pure(epsilon: float, order: float) -> float:
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
