"""What is protected: the privacy unit. Neighbouring data sets differ by one whole unit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, ClassVar, Self

from dp_core.errors import BadInput


class PrivacyUnit(StrEnum):
    """The unit that is added or removed between neighbouring data sets."""

    EXAMPLE = "example"  # one N-word tuple, as in Hoory et al. 2021
    DOCUMENT = "document"
    PATIENT = "patient"


class NeighboringRelation(StrEnum):
    """Which data sets are neighbours."""

    ADD_REMOVE = "add-or-remove-one"  # one unit is added or removed
    ZERO_OUT = "zero-out-one"  # one unit's contribution is replaced by nothing; n is public
    REPLACE = "replace-one"  # one unit becomes any other; n is public


_REGISTRY: dict[tuple[str, int], type[MechanismEvent]] = {}


@dataclass(frozen=True)
class MechanismEvent:
    """Base of all events. `unit` is None where nobody stated it (a bare calculation)."""

    kind: ClassVar[str] = ""
    version: ClassVar[int] = 1
    unit: PrivacyUnit | None = field(default=None, kw_only=True)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.kind:
            _REGISTRY[cls.kind, cls.version] = cls

    @property
    def relation(self) -> NeighboringRelation:
        """The neighbouring relation for which this event's ε holds."""
        return NeighboringRelation.ADD_REMOVE

    def stating(self, unit: PrivacyUnit) -> Self:
        """Return the same event with its unit written into it and into all its parts."""
        return replace(self, unit=unit)

    def to_json(self) -> dict[str, Any]:
        """Return the event as plain JSON data; `MechanismEvent.from_json` reads it back."""
        body = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        return {"kind": self.kind, "version": self.version, **body}

    @staticmethod
    def from_json(data: dict[str, Any]) -> MechanismEvent:
        """Return the event written by `to_json`.

        Raises:
            BadInput: unknown kind or version, missing or unknown fields, impossible values.
        """
        if not isinstance(data, dict):
            raise BadInput("not an object", where="privacy event")
        kind, version = data.get("kind"), data.get("version")
        named = isinstance(kind, str) and isinstance(version, int)
        cls = _REGISTRY.get((kind, version)) if named else None  # type: ignore[arg-type]
        if cls is None:
            raise BadInput(
                f"unknown event kind {kind!r} version {version!r}",
                where="privacy event",
                fix="Use the release of Confide that wrote it, or a newer one.",
            )
        body = {k: v for k, v in data.items() if k not in ("kind", "version")}
        expected = {f.name for f in fields(cls)}
        if set(body) != expected:
            wrong = ", ".join(sorted(set(body) ^ expected))
            raise BadInput(f"event {kind} has missing or unknown fields: {wrong}", where="event")
        try:
            if body["unit"] is not None:
                body["unit"] = PrivacyUnit(body["unit"])
            return cls._from_body(body)
        except (TypeError, ValueError) as error:
            raise BadInput(f"event {kind} holds values of the wrong type", where="event") from error

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Self:
        return cls(**body)


def _plain(value: Any) -> Any:
    if isinstance(value, MechanismEvent):
        return value.to_json()
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value.value if isinstance(value, StrEnum) else value


def require(condition: bool, what: str, where: str) -> None:
    """Refuse an impossible value.

    Raises:
        BadInput: the condition does not hold.
    """
    if not condition:
        raise BadInput(what, where=where)


@dataclass(frozen=True)
class ThresholdedHistogram(MechanismEvent):
    """A word histogram with discrete Gaussian noise on the words present, cut at a threshold.

    Attributes:
        words_per_unit: most distinct words N that a unit counts towards, each once.
        sigma: parameter of the discrete Gaussian.
        threshold: whole number C; noised counts below it are not released.
    """

    kind = "thresholded_histogram"
    words_per_unit: int
    sigma: float
    threshold: int
    mechanism: str = "set-counts"
    noise: str = "discrete-gaussian"

    def __post_init__(self) -> None:
        require(self.words_per_unit >= 1, "words_per_unit must be 1 or more", self.kind)
        require(math.isfinite(self.sigma) and self.sigma > 0, "sigma must be above 0", self.kind)
        require(
            self.threshold >= 1 and self.threshold == int(self.threshold),
            "threshold must be a whole number, 1 or more",
            self.kind,
        )
        require(self.mechanism == "set-counts", f"unknown mechanism {self.mechanism!r}", self.kind)
        require(self.noise == "discrete-gaussian", f"unknown noise {self.noise!r}", self.kind)


def check_phases(
    phases: tuple[tuple[float, float, int], ...], where: str
) -> tuple[tuple[float, float, int], ...]:
    """Return phases as (float, float, int) tuples: (rate or batch, noise multiplier, steps)."""
    require(len(phases) > 0, "an event needs at least one phase", where)
    for phase in phases:
        require(len(phase) == 3, "a phase is (rate or batch, noise multiplier, steps)", where)
        _, sigma, steps = phase
        require(
            math.isfinite(sigma) and sigma > 0,
            f"noise multiplier {sigma} is not finite and above 0",
            where,
        )
        require(steps >= 1 and steps == int(steps), f"steps {steps} is not 1 or more", where)
    return tuple((float(a), float(sigma), int(steps)) for a, sigma, steps in phases)


@dataclass(frozen=True)
class PoissonGaussian(MechanismEvent):
    """Gaussian sums over Poisson samples, phase by phase (Mironov, Talwar and Zhang 2019).

    Attributes:
        phases: (sampling rate q, noise multiplier σ, steps), composed in order.
    """

    kind = "poisson_gaussian"
    phases: tuple[tuple[float, float, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", check_phases(self.phases, self.kind))
        for rate, _, _ in self.phases:
            require(0 < rate <= 1, f"sampling rate {rate} is not in (0, 1]", self.kind)

    @classmethod
    def single(
        cls, sampling_rate: float, noise_multiplier: float, steps: int, **more: Any
    ) -> PoissonGaussian:
        """Return the event with one phase."""
        return cls(phases=((sampling_rate, noise_multiplier, steps),), **more)


@dataclass(frozen=True)
class TruncatedPoissonGaussian(MechanismEvent):
    """Poisson samples cut to at most `cap` units, uniformly at random over the whole batch.

    Attributes:
        declared_units: upper bound on the number of units from which one samples.
        cap: the largest batch, in units, over all shards together.
        phases: (sampling rate q, noise multiplier σ, steps).
    """

    kind = "truncated_poisson_gaussian"
    declared_units: int
    cap: int
    phases: tuple[tuple[float, float, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", check_phases(self.phases, self.kind))
        require(self.declared_units >= 1, "declared_units must be 1 or more", self.kind)
        require(self.cap >= 1, "cap must be 1 or more", self.kind)
        for rate, _, _ in self.phases:
            require(0 < rate <= 1, f"sampling rate {rate} is not in (0, 1]", self.kind)


@dataclass(frozen=True)
class FixedSizeGaussian(MechanismEvent):
    """Gaussian sums over uniformly drawn batches of a fixed size, without replacement.

    The relation is replace-one over a public number of slots, of which some may be empty (an
    emptied slot is one way of replacing). `slots` is the number sampled from, not an upper bound:
    with fewer each unit is drawn more often.

    Attributes:
        slots: number of slots from which one samples.
        phases: (batch in slots, noise multiplier σ for clip norm 1, steps).
    """

    kind = "fixed_size_gaussian"
    slots: int
    phases: tuple[tuple[float, float, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", check_phases(self.phases, self.kind))
        require(self.slots >= 1, "slots must be 1 or more", self.kind)
        for batch, _, _ in self.phases:
            require(
                1 <= batch <= self.slots and batch == int(batch),
                f"batch {batch} is not a whole number from 1 to {self.slots}",
                self.kind,
            )

    @property
    def relation(self) -> NeighboringRelation:
        """Replace one: no bound for add-or-remove is claimed."""
        return NeighboringRelation.REPLACE


@dataclass(frozen=True)
class Gaussian(MechanismEvent):
    """`count` Gaussian mechanisms in which every unit takes part: no sampling."""

    kind = "gaussian"
    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        check_phases(((1.0, self.noise_multiplier, self.count),), self.kind)


@dataclass(frozen=True)
class ShuffledGaussian(MechanismEvent):
    """Batches cut from shuffled epochs: each unit takes part once an epoch, unamplified.

    Whatever the permutation, one epoch is one Gaussian mechanism for each unit (the other
    batches do not depend on it), so `participations` epochs are as many Gaussian mechanisms,
    adaptively composed. The relation is zero-out: adding a unit would shift all later batches.
    """

    kind = "shuffled_gaussian"
    noise_multiplier: float
    participations: int

    def __post_init__(self) -> None:
        check_phases(((1.0, self.noise_multiplier, self.participations),), self.kind)

    @property
    def relation(self) -> NeighboringRelation:
        """Zero-out; `accounting.epsilon_shuffled_replace_one` has the other."""
        return NeighboringRelation.ZERO_OUT


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
    def relation(self) -> NeighboringRelation:
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
class ConvertedRelation(MechanismEvent):
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
    to: NeighboringRelation
    delta: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", NeighboringRelation(self.to))
        inner = self.event
        require(inner.unit is self.unit, "the unit is that of the event", self.kind)
        require(
            inner.relation is NeighboringRelation.ADD_REMOVE,
            "only add-or-remove is restated",
            self.kind,
        )
        require(not isinstance(inner, Composed | ConvertedRelation), "restate each part", self.kind)
        require(
            self.to is not NeighboringRelation.ADD_REMOVE, "that is what it says already", self.kind
        )
        if self.to is NeighboringRelation.ZERO_OUT:
            proven = isinstance(inner, ThresholdedHistogram | PoissonGaussian | Gaussian)
            require(proven, f"an empty unit may change a {inner.kind}", self.kind)
            require(self.delta == 0, "zero-out needs no delta", self.kind)
        else:
            require(0 < self.delta < 1, f"delta {self.delta} is not in (0, 1)", self.kind)

    @property
    def relation(self) -> NeighboringRelation:
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
    def relation(self) -> NeighboringRelation:
        """The relation that all candidates share."""
        return self.candidates[0].relation

    def stating(self, unit: PrivacyUnit) -> Self:
        """Return the selection with the unit in every candidate."""
        return replace(self, candidates=tuple(c.stating(unit) for c in self.candidates), unit=unit)

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Self:
        candidates = tuple(MechanismEvent.from_json(c) for c in body["candidates"])
        return cls(**(body | {"candidates": candidates}))
