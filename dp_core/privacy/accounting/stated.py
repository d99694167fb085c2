"""Guarantees of which only (ε, δ) is known, as parts of a PLD: restated ones, and selections.

Every (ε, δ)-DP mechanism is a post-processing of one that gives itself away with probability δ and
is randomised response at ε otherwise (Kairouz, Oh and Viswanath 2015, arXiv:1311.0776, Theorem
3.2 and its proof): that pair dominates, so its profile composes with the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dp_core.privacy.accounting.profiles import Floats
from dp_core.privacy.accounting.rdp import epsilon_rdp
from dp_core.privacy.events import (
    Composed,
    MechanismEvent,
    RandomCountSelection,
    Relation,
    Restated,
    Unaccounted,
)


@dataclass(frozen=True)
class StatedGuarantee(MechanismEvent):
    """(ε, δ)-DP and nothing else known: an event of a calculation, never one of the ledger."""

    epsilon: float
    delta: float
    under: Relation

    @property
    def relation(self) -> Relation:
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
        case Restated(to=Relation.REPLACE, event=inner, delta=delta):
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
    return StatedGuarantee(epsilon, delta, event.relation, unit=event.unit)


@dataclass(frozen=True)
class _Nothing(Unaccounted):
    """No guarantee, for the neighbours of what it stands for."""

    kind = ""
    under: Relation = Relation.ADD_REMOVE

    @property
    def relation(self) -> Relation:
        """The relation of what it stands for."""
        return self.under
