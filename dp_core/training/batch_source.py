"""What a run reads, update by update: drawn by the plan's sampler, or in shuffled epochs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

from dp_core.corpus.token_store import TokenStore
from dp_core.privacy.plan import TrainingPlan
from dp_core.privacy.sampling import sampler_for
from dp_core.privacy.samplings import PoissonSampling, TruncatedPoissonSampling
from dp_core.privacy.seeds import PrivacySeed
from dp_core.training.recipe import Recipe
from dp_core.training.rows import Examples, MicroBatch, OrdinaryBatches, PrivateBatches


class BatchSource(Protocol):
    """Micro-batches of a run, by update."""

    def update(self, t: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of update t, all of one shape; maybe none."""


def private_batches(
    store: TokenStore,
    plan: TrainingPlan,
    recipe: Recipe,
    seed: PrivacySeed,
    *,
    devices: int,
    examples: Examples,
) -> PrivateBatches:
    """Return the batches that the plan accounts for.

    Raises:
        BadInput: the store has more units than the plan declares.
    """
    units = max(1, recipe.micro_rows // recipe.examples_per_step) * devices
    coins = int.from_bytes(seed.derive("rows and masks")[:8], "little")
    return PrivateBatches(
        store,
        sampler_for(plan, seed, store.n_units),
        coins,
        units,
        recipe.examples_per_step,
        largest=_largest(plan),
        examples=examples,
    )


def ordinary_batches(
    store: TokenStore, recipe: Recipe, init_seed: int, *, devices: int, examples: Examples
) -> OrdinaryBatches:
    """Return shuffled epochs over the rows, for training without privacy."""
    rows = recipe.batch_size * recipe.examples_per_step
    parts = math.ceil(rows / (recipe.micro_rows * devices))
    units = math.ceil(rows / (parts * devices)) * devices  # even parts: little padding
    firsts, phases = 0, []
    for phase in recipe.phases():
        phases.append((firsts, round(phase.expected_batch) * recipe.examples_per_step))
        firsts += phase.steps
    return OrdinaryBatches(store, init_seed, units, phases, examples=examples)


def stream(batches: BatchSource, start: int, end: int) -> Iterator[tuple[int, MicroBatch | None]]:
    """Yield each update's micro-batches and then None: also an empty batch makes an update."""
    for t in range(start, end):
        for batch in batches.update(t):
            yield t, batch
        yield t, None


def _largest(plan: TrainingPlan) -> int:
    """Return the most units of one update, where the sampling bounds them; else 0."""
    match plan.sampling:
        case PoissonSampling():
            return 0
        case TruncatedPoissonSampling(cap=cap):
            return min(cap, plan.declared_units)
        case sampling:
            return sampling.batch
