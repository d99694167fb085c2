"""What a mechanism did, as data: the ledger stores events, and ε is a function of them.

The registry is closed: an event of a kind or version that this code does not know is an error,
never a guess. An event says nothing about the data; it holds only public parameters.
Conventions: a noise multiplier is σ/C, the standard deviation of the noise in units of the clip
norm, *effective* for one whole update (summed over shards and accumulation); a sampling rate is
the probability that one unit takes part in one update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, Self

from dp_core.errors import BadInput
from dp_core.privacy.units import PrivacyUnit


class Relation(StrEnum):
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
    def relation(self) -> Relation:
        """The neighbouring relation for which this event's ε holds."""
        return Relation.ADD_REMOVE

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
        kind, version = data.get("kind"), data.get("version")
        cls = _REGISTRY.get((kind, version))  # type: ignore[arg-type]
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


def _require(condition: bool, what: str, where: str) -> None:
    if not condition:
        raise BadInput(what, where=where)


def _check_phases(
    phases: tuple[tuple[float, float, int], ...], where: str
) -> tuple[tuple[float, float, int], ...]:
    """Return phases as (float, float, int) tuples: (rate or batch, noise multiplier, steps)."""
    _require(len(phases) > 0, "an event needs at least one phase", where)
    for phase in phases:
        _require(len(phase) == 3, "a phase is (rate or batch, noise multiplier, steps)", where)
        _, sigma, steps = phase
        _require(
            math.isfinite(sigma) and sigma > 0,
            f"noise multiplier {sigma} is not finite and above 0",
            where,
        )
        _require(steps >= 1 and steps == int(steps), f"steps {steps} is not 1 or more", where)
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
        object.__setattr__(self, "phases", _check_phases(self.phases, self.kind))
        for rate, _, _ in self.phases:
            _require(0 < rate <= 1, f"sampling rate {rate} is not in (0, 1]", self.kind)

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
        object.__setattr__(self, "phases", _check_phases(self.phases, self.kind))
        _require(self.declared_units >= 1, "declared_units must be 1 or more", self.kind)
        _require(self.cap >= 1, "cap must be 1 or more", self.kind)
        for rate, _, _ in self.phases:
            _require(0 < rate <= 1, f"sampling rate {rate} is not in (0, 1]", self.kind)


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
        object.__setattr__(self, "phases", _check_phases(self.phases, self.kind))
        _require(self.slots >= 1, "slots must be 1 or more", self.kind)
        for batch, _, _ in self.phases:
            _require(
                1 <= batch <= self.slots and batch == int(batch),
                f"batch {batch} is not a whole number from 1 to {self.slots}",
                self.kind,
            )

    @property
    def relation(self) -> Relation:
        """Replace one: no bound for add-or-remove is claimed."""
        return Relation.REPLACE


@dataclass(frozen=True)
class Gaussian(MechanismEvent):
    """`count` Gaussian mechanisms in which every unit takes part: no sampling."""

    kind = "gaussian"
    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        _check_phases(((1.0, self.noise_multiplier, self.count),), self.kind)


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
        _check_phases(((1.0, self.noise_multiplier, self.participations),), self.kind)

    @property
    def relation(self) -> Relation:
        """Zero-out; `accounting.epsilon_shuffled_replace_one` has the other."""
        return Relation.ZERO_OUT


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
        _require(self.words_per_unit >= 1, "words_per_unit must be 1 or more", self.kind)
        _require(math.isfinite(self.sigma) and self.sigma > 0, "sigma must be above 0", self.kind)
        _require(
            self.threshold >= 1 and self.threshold == int(self.threshold),
            "threshold must be a whole number, 1 or more",
            self.kind,
        )
        _require(self.mechanism == "set-counts", f"unknown mechanism {self.mechanism!r}", self.kind)
        _require(self.noise == "discrete-gaussian", f"unknown noise {self.noise!r}", self.kind)


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
        _require(len(self.events) > 0, "a composition needs at least one event", self.kind)
        _require(
            len({(e.unit, e.relation) for e in self.events} | {(self.unit, self.relation)}) == 1,
            "events with different units or neighbour relations do not compose",
            self.kind,
        )

    @property
    def relation(self) -> Relation:
        """The relation that all parts share."""
        return self.events[0].relation

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Self:
        events = tuple(MechanismEvent.from_json(e) for e in body["events"])
        return cls(**(body | {"events": events}))
