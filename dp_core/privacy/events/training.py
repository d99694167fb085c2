"""The mechanisms of training: noised sums of clipped gradients, by how batches are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dp_core.privacy.events.base import MechanismEvent, Relation, require


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
    def relation(self) -> Relation:
        """Zero-out; `accounting.epsilon_shuffled_replace_one` has the other."""
        return Relation.ZERO_OUT
