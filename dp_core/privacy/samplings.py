"""The ways in which a batch of units may be drawn, and what is proven for each.

| sampling            | proven ε                                     | neighbours        |
| ------------------- | -------------------------------------------- | ----------------- |
| Poisson             | PLD of the subsampled Gaussian               | add or remove one |
| truncated Poisson   | PLD mixture with the probability of the cut  | add or remove one |
| fixed size          | profile of sampling without replacement      | replace one       |
| shuffled epochs     | one unamplified Gaussian per epoch           | zero out one      |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dp_core.errors import PlanError


@dataclass(frozen=True)
class PoissonSampling:
    """Each unit enters each batch independently, at the plan's rate for that update."""

    kind: ClassVar[str] = "poisson"

    def check_batch(self, expected_batch: float) -> None:
        """Accept any expected batch: the rate follows from it."""


@dataclass(frozen=True)
class TruncatedPoissonSampling:
    """Poisson, then a uniform subset of `cap` units when more were drawn.

    The cut is global, by unit, over all shards of an update together: a cap per shard is another
    mechanism, and a far worse one.
    """

    kind: ClassVar[str] = "truncated-poisson"
    cap: int

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise PlanError(f"{self.cap} is below 1", where="plan.sampling.cap")

    def check_batch(self, expected_batch: float) -> None:
        """Accept any expected batch: the accounting covers every cap."""


@dataclass(frozen=True)
class FixedSizeSampling:
    """Each batch is a uniform subset of exactly `batch` of the units, drawn afresh."""

    kind: ClassVar[str] = "fixed-size"
    batch: int

    def check_batch(self, expected_batch: float) -> None:
        """Refuse an expected batch that is not the batch."""
        _check_same(self.batch, expected_batch)


@dataclass(frozen=True)
class ShuffledSampling:
    """Each epoch is a fresh permutation of the units, cut into whole batches."""

    kind: ClassVar[str] = "shuffled"
    batch: int

    def check_batch(self, expected_batch: float) -> None:
        """Refuse an expected batch that is not the batch."""
        _check_same(self.batch, expected_batch)


def _check_same(batch: int, expected_batch: float) -> None:
    if batch < 1 or batch != expected_batch:
        raise PlanError(
            f"batches of {batch} units, but the schedule says {expected_batch:g}",
            where="plan.sampling.batch",
        )


Sampling = PoissonSampling | TruncatedPoissonSampling | FixedSizeSampling | ShuffledSampling
