"""Events made of others: composed, restated for other neighbours, chosen among; and none."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

from dp_core.privacy.events.base import MechanismEvent, Relation, require
from dp_core.privacy.events.histogram import ThresholdedHistogram
from dp_core.privacy.events.training import Gaussian, PoissonGaussian
from dp_core.privacy.units import PrivacyUnit


@dataclass(frozen=True)
class Unaccounted(MechanismEvent):
    """A release with no privacy guarantee: ε is infinite, whatever it is composed with."""

    kind = "unaccounted"
    reason: str


@dataclass(frozen=True)
class Composed(MechanismEvent):
    """Several events on the same data; build it with `accounting.compose`, which checks them."""

    kind = "composed"
    events: tuple[MechanismEvent, ...]

    def __post_init__(self) -> None:
        require(len(self.events) > 0, "a composition needs at least one event", self.kind)
        require(
            len({(e.unit, e.relation) for e in self.events} | {(self.unit, self.relation)}) == 1,
            "events with different units or neighbour relations do not compose",
            self.kind,
        )

    @property
    def relation(self) -> Relation:
        """The relation that all parts share."""
        return self.events[0].relation

    def stating(self, unit: PrivacyUnit) -> Self:
        """Return the composition with the unit in every part."""
        return replace(self, events=tuple(e.stating(unit) for e in self.events), unit=unit)

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Self:
        events = tuple(MechanismEvent.from_json(e) for e in body["events"])
        return cls(**(body | {"events": events}))


@dataclass(frozen=True)
class Restated(MechanismEvent):
    """An add-or-remove guarantee, restated for other neighbours by a theorem.

    *zero-out-one*: a unit that contributes nothing leaves the output as it would be without the
    unit (its words are counted nowhere; its gradient is 0 and the other units' coins are their
    own), so the two data sets that zero-out compares give the same two distributions as those
    that add-or-remove compares, and the very same profile. Not for cut batches: there an empty
    unit may still take a place.

    *replace-one*: from one data set to the other by way of the one without the unit. If both
    halves are (ε, δ)-DP the whole is (2ε, (1 + e^ε)δ)-DP (group privacy, Dwork and Roth 2014,
    Theorem 2.2 with the δ of Vadhan 2017, Lemma 2.2). ε is the event's own at `delta`.

    Attributes:
        event: the mechanism, under add-or-remove.
        to: the relation under which it is stated.
        delta: δ of the halves, for replace-one; 0 for zero-out, which needs none.
    """

    kind = "restated"
    event: MechanismEvent
    to: Relation
    delta: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", Relation(self.to))
        inner = self.event
        require(inner.unit is self.unit, "the unit is that of the event", self.kind)
        require(inner.relation is Relation.ADD_REMOVE, "only add-or-remove is restated", self.kind)
        require(not isinstance(inner, Composed | Restated), "restate each part", self.kind)
        require(self.to is not Relation.ADD_REMOVE, "that is what it says already", self.kind)
        if self.to is Relation.ZERO_OUT:
            proven = isinstance(inner, ThresholdedHistogram | PoissonGaussian | Gaussian)
            require(proven, f"an empty unit may change a {inner.kind}", self.kind)
            require(self.delta == 0, "zero-out needs no delta", self.kind)
        else:
            require(0 < self.delta < 1, f"delta {self.delta} is not in (0, 1)", self.kind)

    @property
    def relation(self) -> Relation:
        """The relation under which the guarantee is restated."""
        return self.to

    def stating(self, unit: PrivacyUnit) -> Self:
        """Return the event with the unit in both layers."""
        return replace(self, event=self.event.stating(unit), unit=unit)

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Self:
        return cls(**(body | {"event": MechanismEvent.from_json(body["event"])}))


@dataclass(frozen=True)
class RandomCountSelection(MechanismEvent):
    """The best of K trainings, K secret and random, each of a candidate drawn from a public list.

    Papernot and Steinke 2022 (arXiv:2110.03620). Every training draws its candidate uniformly and
    independently (with replacement); its score is part of what it releases, so it must be a
    function of the released model and of public data. Only the best training's model leaves.
    A candidate drawn uniformly is a mixture, whose Rényi divergence is at most the worst of the
    list at each order (quasi-convexity, van Erven and Harremoës 2014, Theorem 13).

    Attributes:
        candidates: the mechanism of each point of the list, all for the same neighbours.
        count: "truncated-negative-binomial" (Theorem 2) or "poisson" (Theorem 6): K's law.
        eta: shape η > −1 of the truncated negative binomial (1: geometric, 0: logarithmic).
        gamma: its γ in (0, 1).
        mean: μ of the Poisson law. The numbers of the other law are 0.
        delta: δ at which the Rényi bound is turned into ε where it meets a PLD: no PLD is known.
    """

    kind = "random_count_selection"
    candidates: tuple[MechanismEvent, ...]
    count: str
    delta: float
    eta: float = 0.0
    gamma: float = 0.0
    mean: float = 0.0

    def __post_init__(self) -> None:
        require(len(self.candidates) > 0, "a selection needs candidates", self.kind)
        alike = {(c.unit, c.relation) for c in self.candidates}
        require(len(alike) == 1, "candidates protect unlike things", self.kind)
        require(self.candidates[0].unit is self.unit, "the unit is the candidates'", self.kind)
        require(0 < self.delta < 1, f"delta {self.delta} is not in (0, 1)", self.kind)
        if self.count == "poisson":
            fits = self.mean > 0 and math.isfinite(self.mean) and self.eta == self.gamma == 0
        else:
            require(
                self.count == "truncated-negative-binomial",
                f"unknown law of K {self.count!r}",
                self.kind,
            )
            fits = math.isfinite(self.eta) and self.eta > -1 and 0 < self.gamma < 1
            fits = fits and self.mean == 0
        require(fits, f"impossible numbers for the law {self.count}", self.kind)

    @property
    def relation(self) -> Relation:
        """The relation that all candidates share."""
        return self.candidates[0].relation

    def stating(self, unit: PrivacyUnit) -> Self:
        """Return the selection with the unit in every candidate."""
        return replace(self, candidates=tuple(c.stating(unit) for c in self.candidates), unit=unit)

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Self:
        candidates = tuple(MechanismEvent.from_json(c) for c in body["candidates"])
        return cls(**(body | {"candidates": candidates}))
