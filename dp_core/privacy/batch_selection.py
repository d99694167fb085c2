"""Sampling laws: the choice of the units of each update, and the resulting mechanism.

A law defines its batches, its accounting event, its checks and its serialised form. A new law is a
subclass of `SamplingLaw` with a `kind`, and tests
(tests/dp_core/privacy/test_batch_selection.py runs the same tests on every law).

| law               | proven ε                                    | neighbours        |
| ----------------- | ------------------------------------------- | ----------------- |
| Poisson           | PLD of the subsampled Gaussian              | add or remove one |
| truncated Poisson | PLD mixture with the probability of the cut | add or remove one |
| cyclic Poisson    | PLD of every b-th update's Gaussian         | add or remove one |

Batches are a function of seed and step, so training can be resumed at any step. Every draw is from
Philox4x64 with a separate key: the first 16 bytes of HMAC-SHA256(seed; "sampling", stream, step).
Only raw 64-bit words are used and compared as integers, so no NumPy release can change a batch and
no rate is off by more than 2⁻⁶⁴.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dp_core.errors import PlanError
from dp_core.privacy.mechanisms import (
    CyclicPoissonGaussian,
    MechanismEvent,
    Phases,
    PoissonGaussian,
    PrivacyUnit,
    TruncatedPoissonGaussian,
)
from dp_core.privacy.seed_store import PrivacySeed

Indices = NDArray[np.int64]
_CHUNK = 1 << 16  # units per pass: it bounds memory and does not change the stream of words
_WORD = 1 << 64


class SamplingLaw(ABC):
    """A way to draw the units of an update, each at the plan's sampling rate for that update.

    The number of units is private: probabilities may depend on the declared bound alone.
    """

    kind: ClassVar[str]

    @abstractmethod
    def draw(self, seed: PrivacySeed, n_units: int, sampling_rate: float, step: int) -> Indices:
        """Return the sorted indices of the units of update `step` (from 0); may be empty.

        Args:
            seed: of the reservation.
            n_units: true number of units, at most the declared one.
            sampling_rate: expected batch over declared units.
            step: number of the update; draws of different steps are independent.
        """

    @abstractmethod
    def event(self, declared_units: int, phases: Phases, unit: PrivacyUnit) -> MechanismEvent:
        """Return the mechanism of releasing noised sums, for adding or removing one unit."""

    @property
    def separation(self) -> int:
        """The least number of updates between two in which the same unit takes part."""
        return 1

    def largest_batch(self, declared_units: int) -> int | None:
        """Return the most units that one update can have, or None if there is no bound.

        With a bound every update is padded to the same number of micro-batches.
        """
        return None

    def to_json(self) -> dict[str, Any]:
        """Return kind and parameters as plain JSON data."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class PoissonSampling(SamplingLaw):
    """Each unit takes part with the sampling rate, independently of all others."""

    kind: ClassVar[str] = "poisson"

    def draw(self, seed: PrivacySeed, n_units: int, sampling_rate: float, step: int) -> Indices:
        """Return the sorted indices of the units drawn."""
        return _poisson(n_units, sampling_rate, _words(seed, "poisson", step))

    def event(self, declared_units: int, phases: Phases, unit: PrivacyUnit) -> MechanismEvent:
        """Return the Poisson-subsampled Gaussian mechanism."""
        return PoissonGaussian(phases, unit=unit)


@dataclass(frozen=True)
class TruncatedPoissonSampling(SamplingLaw):
    """Poisson sampling, cut to a uniformly chosen subset of `cap` units if more were drawn.

    The cut is by unit, over all devices and micro-batches of an update together. A cap for each
    shard would be another mechanism, with a far larger ε.
    """

    kind: ClassVar[str] = "truncated-poisson"
    cap: int

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise PlanError(f"{self.cap} is below 1", where="plan.sampling.cap")

    def draw(self, seed: PrivacySeed, n_units: int, sampling_rate: float, step: int) -> Indices:
        """Return the sorted indices of the at most `cap` units that stay."""
        drawn = PoissonSampling().draw(seed, n_units, sampling_rate, step)
        if len(drawn) <= self.cap:
            return drawn
        return drawn[_subset(len(drawn), self.cap, _words(seed, "truncation", step))]

    def event(self, declared_units: int, phases: Phases, unit: PrivacyUnit) -> MechanismEvent:
        """Return the mixture over whether the batch was cut, which depends on `declared_units`."""
        return TruncatedPoissonGaussian(declared_units, self.cap, phases, unit=unit)

    def largest_batch(self, declared_units: int) -> int:
        """Return the cap."""
        return min(self.cap, declared_units)


@dataclass(frozen=True)
class CyclicPoissonSampling(SamplingLaw):
    """Poisson sampling from the parts of the units in turn (Choquette-Choo et al. 2023).

    An independent secret coin assigns every unit to one of b parts for the whole run. Update t
    draws from part t mod b, each unit at b times the sampling rate. So a unit takes part at most
    once in b updates, as noise of b bands requires.

    Attributes:
        parts: b.
    """

    kind: ClassVar[str] = "cyclic-poisson"
    parts: int

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise PlanError(f"{self.parts} is below 1", where="plan.sampling.parts")

    @property
    def separation(self) -> int:
        """The number of parts."""
        return self.parts

    def draw(self, seed: PrivacySeed, n_units: int, sampling_rate: float, step: int) -> Indices:
        """Return the sorted indices of the units drawn from the part whose turn it is."""
        rate = self._rate_within(sampling_rate)
        drawn = _poisson(n_units, rate, _words(seed, "poisson", step))
        turn: Indices = drawn[self.parts_of(seed, n_units)[drawn] == step % self.parts]
        return turn

    def parts_of(self, seed: PrivacySeed, n_units: int) -> Indices:
        """Return the part of each unit, (n_units,). It depends on the unit's coin alone."""
        words = _words(seed, "parts", 0)(n_units) >> np.uint64(32)
        return (words * np.uint64(self.parts) >> np.uint64(32)).astype(np.int64)

    def event(self, declared_units: int, phases: Phases, unit: PrivacyUnit) -> MechanismEvent:
        """Return the mechanism of every b-th update, at the rate within a part."""
        within = tuple((self._rate_within(rate), sigma, steps) for rate, sigma, steps in phases)
        return CyclicPoissonGaussian(self.parts, within, unit=unit)

    def _rate_within(self, sampling_rate: float) -> float:
        return min(1.0, self.parts * sampling_rate)  # above 1 by rounding alone: plans refuse more


@dataclass(frozen=True)
class BatchSampler:
    """The batches of one run.

    Attributes:
        law: how they are drawn.
        seed: of the reservation.
        n_units: true number of units; private, so no message may hold it.
        sampling_rate: of each update.
    """

    law: SamplingLaw
    seed: PrivacySeed
    n_units: int
    sampling_rate: Callable[[int], float]

    def batch(self, step: int) -> Indices:
        """Return the sorted indices of the units of update `step` (from 0); may be empty."""
        return self.law.draw(self.seed, self.n_units, self.sampling_rate(step), step)


def _poisson(
    n_units: int, sampling_rate: float, words: Callable[[int], NDArray[np.uint64]]
) -> Indices:
    """Return the sorted indices of the units whose word is below the rate. Time: O(n_units)."""
    rate = Fraction(sampling_rate)
    if rate >= 1:
        return np.arange(n_units, dtype=np.int64)
    threshold = np.uint64(rate.numerator * _WORD // rate.denominator)
    chosen = [
        start + np.flatnonzero(words(min(_CHUNK, n_units - start)) < threshold)
        for start in range(0, n_units, _CHUNK)
    ]
    return np.concatenate(chosen) if chosen else np.zeros(0, np.int64)


def _words(seed: PrivacySeed, stream: str, step: int) -> Callable[[int], NDArray[np.uint64]]:
    key = np.frombuffer(seed.derive("sampling", stream, step)[:16], dtype="<u8")
    return np.random.Philox(key=key).random_raw


def _subset(population: int, size: int, words: Callable[[int], NDArray[np.uint64]]) -> Indices:
    """Return a uniform subset of `size` < `population` indices, sorted: the smallest words win.

    A tie across the border would favour an index, so everything is then drawn again.
    """
    while True:
        drawn = words(population)
        order = np.argpartition(drawn, (size - 1, size))
        if drawn[order[size - 1]] != drawn[order[size]]:
            return np.sort(order[:size])
