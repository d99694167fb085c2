"""The pipeline that writes a batch plan: one element per update, workers in parallel.

It runs in an environment of its own (`requirements/beam.in`: Beam and TensorFlow want different
releases of the same packages) and needs no TensorFlow:

    with beam.Pipeline(options=…) as pipeline:
        pipeline | WriteBatchPlan(BatchJob(…))

Every worker must reach the token store, the seed store and the target folder by the same paths (a
shared or mounted disk). The seed itself never enters the pipeline: an element would be logged,
spilled and kept by the runner. Workers open it by its key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import apache_beam as beam
import numpy as np

from dp_core.corpus.token_store import TokenStore
from dp_core.privacy.plan import TrainingPlan
from dp_core.privacy.seeds import SeedStore
from dp_core.training.batch_plan import BatchPlanKey, write_update
from dp_core.training.batch_source import private_batches
from dp_core.training.recipe import Recipe
from dp_core.training.rows import masked_examples


@dataclass(frozen=True)
class BatchJob:
    """What is to be written, as workers are told.

    Attributes:
        store: folder of the token store.
        seeds: folder of the seed store.
        seed_key: of the reservation's seed in it.
        manifest: what the run's noise is drawn for.
        plan: sampling and schedule.
        recipe: rows of a unit and of a micro-batch, masking.
        devices: that share a micro-batch.
        folder: where the files go.
        continuation: for `recipe.whole_words`, one flag per piece.
    """

    store: str
    seeds: str
    seed_key: str
    manifest: bytes
    plan: TrainingPlan
    recipe: Recipe
    devices: int
    folder: str
    continuation: tuple[bool, ...] = ()


class WriteBatchPlan(beam.PTransform):  # type: ignore[misc]  # Beam's classes have no types
    """Pipeline -> the numbers of the updates whose batches are written.

    Args:
        job: what to write.
        first: update to begin with.
        updates: how many; None for all that are left.
    """

    def __init__(self, job: BatchJob, first: int = 0, updates: int | None = None) -> None:
        super().__init__()
        end = job.plan.steps if updates is None else min(job.plan.steps, first + updates)
        self._job, self._updates = job, range(first, end)

    def expand(self, begin: beam.Pipeline) -> beam.PCollection:
        """Deal the updates out, and write each."""
        return (
            begin
            | "updates" >> beam.Create(self._updates)
            | "deal out" >> beam.Reshuffle()
            | "write" >> beam.ParDo(_WriteUpdate(self._job))
        )


class _WriteUpdate(beam.DoFn):  # type: ignore[misc]
    """Draws one update's units, masks their rows, writes the files."""

    def __init__(self, job: BatchJob) -> None:
        super().__init__()
        self._job = job

    def setup(self) -> None:
        """Open what every element needs, once per worker."""
        job = self._job
        store = TokenStore.open(job.store)
        seed = SeedStore(job.seeds).get(job.seed_key)
        words = np.array(job.continuation) if job.recipe.whole_words else None
        self._key = BatchPlanKey(
            seed, job.manifest, job.plan, job.recipe, store.digest, job.devices
        )
        self._batches = private_batches(
            store,
            job.plan,
            job.recipe,
            seed,
            devices=job.devices,
            examples=partial(masked_examples, continuation=words),
        )

    def process(self, t: int) -> Iterator[int]:
        """Write update t."""
        write_update(Path(self._job.folder), self._key, t, self._batches.update(t))
        yield t
