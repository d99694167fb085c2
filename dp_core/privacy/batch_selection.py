"""Which units take part in update t: a function of the seed and t, so any t can be resumed.

Every sampler draws from Philox4x64 under a key of its own for each t (or epoch): the first
16 bytes of HMAC-SHA256(seed; "sampling", kind, t). Only raw 64-bit words are used and compared as
integers, so no NumPy release can change a batch and no rate is off by more than 2⁻⁶⁴.

The size of the data set is private. Poisson sampling does not need it. The other samplers work on
`declared_units` slots, of which the units fill the first and the rest stay empty: their
probabilities are those of the declared, public size, whatever the true one is, and an empty slot
is a unit like any other, whose gradient is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dp_core.errors import BadInput
from dp_core.privacy.execution_plan import (
    ExecutionPlan,
    FixedSizeSampling,
    PoissonSampling,
    ShuffledSampling,
    TruncatedPoissonSampling,
)
from dp_core.privacy.seed_store import PrivacySeed

Indices = NDArray[np.int64]
_CHUNK = 1 << 16  # units looked at together: memory is flat, the stream of words the same
_WORD = 1 << 64


class UnitSampler(Protocol):
    """Tells, for each update, the units whose gradients are summed."""

    def batch(self, t: int) -> Indices:
        """Return the sorted indices of the units of update `t` (from 0); may be empty."""


def sampler_for(plan: ExecutionPlan, seed: PrivacySeed, n_units: int) -> UnitSampler:
    """Return the sampler that the plan's accounting assumes.

    Args:
        plan: says how, and at which rate in each update.
        seed: of the reservation.
        n_units: true number of units; private, so no message may hold it.

    Raises:
        BadInput: more units than the plan declares.
    """
    if n_units > plan.declared_units:
        raise BadInput(
            "the data set has more units than declared",
            where="declared_units",
            fix=f"The declared bound is {plan.declared_units}: declare a larger one.",
        )
    match plan.sampling:
        case PoissonSampling():
            return PoissonSampler(seed, n_units, plan.sampling_rate)
        case TruncatedPoissonSampling(cap=cap):
            return TruncatedPoissonSampler(seed, n_units, plan.sampling_rate, cap)
        case FixedSizeSampling(batch=batch):
            return FixedSizeSampler(seed, n_units, plan.declared_units, batch)
        case ShuffledSampling(batch=batch):
            return ShuffledSampler(
                seed, n_units, plan.declared_units, batch, plan.batches_per_epoch
            )


@dataclass(frozen=True)
class PoissonSampler:
    """Every unit takes part with probability `rate(t)`, independently of all others."""

    seed: PrivacySeed
    n_units: int
    rate: Callable[[int], float]

    def batch(self, t: int) -> Indices:
        """Return the sorted indices of the units of update `t`. Time: O(n_units)."""
        rate = Fraction(self.rate(t))
        if rate >= 1:
            return np.arange(self.n_units, dtype=np.int64)
        threshold = np.uint64(rate.numerator * _WORD // rate.denominator)
        words = _words(self.seed, "poisson", t)
        chosen = [
            start + np.flatnonzero(words(min(_CHUNK, self.n_units - start)) < threshold)
            for start in range(0, self.n_units, _CHUNK)
        ]
        return np.concatenate(chosen) if chosen else np.zeros(0, np.int64)


@dataclass(frozen=True)
class TruncatedPoissonSampler:
    """Poisson sampling, of which a uniformly chosen `cap` stay where more were drawn.

    The cut is global and by unit: a cap for each shard costs far more privacy.
    """

    seed: PrivacySeed
    n_units: int
    rate: Callable[[int], float]
    cap: int

    def batch(self, t: int) -> Indices:
        """Return the sorted indices of the at most `cap` units of update `t`."""
        drawn = PoissonSampler(self.seed, self.n_units, self.rate).batch(t)
        if len(drawn) <= self.cap:
            return drawn
        return drawn[_subset(len(drawn), self.cap, _words(self.seed, "truncation", t))]


@dataclass(frozen=True)
class FixedSizeSampler:
    """Each update takes `size` of the slots, uniformly without replacement, afresh."""

    seed: PrivacySeed
    n_units: int
    slots: int
    size: int

    def batch(self, t: int) -> Indices:
        """Return the sorted indices of the units in the chosen slots (at most `size`)."""
        chosen = _subset(self.slots, self.size, _words(self.seed, "fixed-size", t))
        return chosen[chosen < self.n_units]


@dataclass(frozen=True)
class ShuffledSampler:
    """Each epoch deals a new permutation of the slots into `per_epoch` disjoint batches.

    What is left sits the epoch out, so that no unit takes part twice in one.
    """

    seed: PrivacySeed
    n_units: int
    slots: int
    size: int
    per_epoch: int

    def batch(self, t: int) -> Indices:
        """Return the sorted indices of the units in the slots dealt to update `t`."""
        epoch, place = divmod(t, self.per_epoch)
        order = _permutation(self.slots, _words(self.seed, "shuffle", epoch))
        dealt = np.sort(order[place * self.size : (place + 1) * self.size])
        return dealt[dealt < self.n_units]


def _words(seed: PrivacySeed, kind: str, t: int) -> Callable[[int], NDArray[np.uint64]]:
    key = np.frombuffer(seed.derive("sampling", kind, t)[:16], dtype="<u8")
    return np.random.Philox(key=key).random_raw


def _subset(population: int, size: int, words: Callable[[int], NDArray[np.uint64]]) -> Indices:
    """Return a uniform subset of `size` out of range(population), sorted: the smallest words win.

    A tie across the border would favour an index, so everything is then drawn again.
    """
    if size >= population:
        return np.arange(population, dtype=np.int64)
    while True:
        drawn = words(population)
        order = np.argpartition(drawn, (size - 1, size))
        if drawn[order[size - 1]] != drawn[order[size]]:
            return np.sort(order[:size])


def _permutation(size: int, words: Callable[[int], NDArray[np.uint64]]) -> Indices:
    """Return a uniform permutation of range(size): the order of distinct random words."""
    while True:
        drawn = words(size)
        order = np.argsort(drawn, kind="stable")
        ranked = drawn[order]
        if not np.any(ranked[1:] == ranked[:-1]):
            return order
