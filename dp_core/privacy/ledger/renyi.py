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

from dp_core.privacy.accounting import epsilon_pld
from dp_core.privacy.mechanisms import MechanismEvent, compose


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
    return added([Charge(*event.approximate_rdp(order, delta)) for event, delta in events])


def added(charges: list[Charge]) -> Charge:
    """Return the charge of everything together."""
    return Charge(math.fsum(c.rho for c in charges), math.fsum(c.delta for c in charges))
