"""One run of one objective: rows to weights, with differential privacy or without.

What `pretrain` and private fine-tuning have in common, and all that a further objective needs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from dp_core.bert.parameters import C, Model
from dp_core.corpus.token_store import TokenStore
from dp_core.errors import ConfideError, Unfinished
from dp_core.privacy.plan import TrainingPlan
from dp_core.privacy.seeds import PrivacySeed
from dp_core.training.adamw import AdamW
from dp_core.training.agreement import check_model, check_plan
from dp_core.training.batch_source import (
    BatchSource,
    ordinary_batches,
    private_batches,
    stream,
)
from dp_core.training.checkpoint import Checkpoint, Checkpoints, run_digest
from dp_core.training.checkpoint_places import CheckpointPlace
from dp_core.training.devices import strategy_for
from dp_core.training.objective import Objective
from dp_core.training.prefetch import prefetch
from dp_core.training.private_updates import PrivateUpdates
from dp_core.training.progress import Probe, Progress, Reporter
from dp_core.training.recipe import Recipe
from dp_core.training.trainer import Trainer

_AHEAD = 8  # micro-batches made in advance


def fit(
    start: Model[C],
    objective: Objective,
    *,
    store: TokenStore,
    plan: TrainingPlan | None,
    recipe: Recipe,
    seed: PrivacySeed | None,
    manifest: bytes,
    order_seed: int,
    checkpoints: CheckpointPlace,
    device: str,
    progress: Callable[[Progress], None],
    batches: BatchSource | None = None,
    probe: Probe | None = None,
) -> Model[C]:
    """Train a model on the rows of a store, going on from a checkpoint if there is one.

    Guarantee, arguments and errors are those of `pretrain`, apart from:

    Args:
        start: the model before the first update; every parameter of it is trained.
        objective: what the rows teach.
        order_seed: public; order and masks without a plan, and part of the run's identity.
    """
    deadline = time.monotonic() + (recipe.stop_after_seconds or math.inf)
    check_plan(plan, recipe, seed)
    check_model(start.config, store)
    # With the noise fixed by its key, sums must not depend on the order in which threads add.
    tf.config.experimental.enable_op_determinism()
    private = PrivateUpdates(plan, seed, manifest) if plan and seed else None
    trainer = Trainer(
        strategy_for(device),
        start.config,
        start.parameters,
        AdamW(recipe.beta1, recipe.beta2, recipe.weight_decay),
        private.clipping(recipe.clipping) if private else None,
        engine=recipe.engine,
        precision=recipe.precision,
        row_losses=objective.row_losses,
    )
    settings = (sorted(recipe.identity().items()), start.config, order_seed, objective.name)
    run = run_digest(manifest, *settings, plan and plan.digest())
    dealt = (order_seed, trainer.devices, objective)
    source = batches or _batches(plan, seed, store, recipe, *dealt)
    kept = Checkpoints(checkpoints, run, recipe.keep_checkpoints)
    _Run(trainer, private, recipe, kept, progress, deadline, probe).to_its_end(source)
    weights = trainer.weights()
    if not all(np.isfinite(w).all() for w in weights.values()):
        raise ConfideError("the weights are not finite", where="training", fix="Lower the rate.")
    return Model(start.config, weights, start.labels)


def _batches(
    plan: TrainingPlan | None,
    seed: PrivacySeed | None,
    store: TokenStore,
    recipe: Recipe,
    order_seed: int,
    devices: int,
    objective: Objective,
) -> BatchSource:
    made = objective.examples
    if plan and seed:
        return private_batches(store, plan, recipe, seed, devices=devices, examples=made)
    return ordinary_batches(store, recipe, order_seed, devices=devices, examples=made)


class _Run:
    """A run under way: from the last checkpoint, update by update."""

    def __init__(
        self,
        trainer: Trainer,
        private: PrivateUpdates | None,
        recipe: Recipe,
        checkpoints: Checkpoints,
        progress: Callable[[Progress], None],
        deadline: float,
        probe: Probe | None,
    ) -> None:
        self._trainer, self._private, self._recipe = trainer, private, recipe
        self._checkpoints, self._deadline, self._probe = checkpoints, deadline, probe
        self._reporter = Reporter(trainer, recipe.updates, progress)
        self._done = self._kept = self._resume()

    def to_its_end(self, batches: BatchSource) -> None:
        if self._done:  # it may have ended after the checkpoint and before it could say so
            self._tell(last=self._done == self._recipe.updates)
        for t, batch in prefetch(stream(batches, self._done, self._recipe.updates), _AHEAD):
            if batch is None:
                self._move(t)
                self._look_up()
            elif self._private is None:
                self._trainer.add(batch)
            else:
                self._private.add(self._trainer, batch)

    def _move(self, t: int) -> None:
        rate = self._recipe.rate(t)
        if self._private is None:
            rows = self._recipe.batch_at(t) * self._recipe.examples_per_step
            self._trainer.move(t=t, rate=rate, divisor=rows, noise=None)
        else:
            self._private.move(self._trainer, t, rate)
        self._done = t + 1

    def _look_up(self) -> None:
        """Keep, report, stop: what there is to do between two updates."""
        ends = self._done == self._recipe.updates
        late = not ends and time.monotonic() >= self._deadline
        due = self._done - self._kept >= self._recipe.checkpoint_every
        # What is looked at is kept first: a run that goes on does so from there, not beside it.
        if ends or late or due or self._is_looked_at():
            self._keep()
        self._tell(last=ends or late)
        if late:
            raise Unfinished(
                f"time is up after {self._done} of {self._recipe.updates} updates",
                where="training",
                fix="Run it again: it goes on from its checkpoint.",
            )

    def _tell(self, *, last: bool) -> None:
        if self._probe and self._is_looked_at():
            self._probe.look(self._done, self._trainer.weights())
        self._reporter.tell(self._done, self._clip_norm(), last=last)

    def _is_looked_at(self) -> bool:
        return self._probe is not None and self._done in self._probe.at

    def _keep(self) -> None:
        own = self._private.state() if self._private else {}
        counts = self._reporter.state()
        self._checkpoints.save(Checkpoint(self._done, self._trainer.state() | own | counts))
        self._kept = self._done

    def _resume(self) -> int:
        checkpoint = self._checkpoints.latest()
        if checkpoint is None:
            return 0
        self._trainer.restore(checkpoint.arrays)
        if self._private:
            self._private.restore(checkpoint.arrays)
        self._reporter.restore(checkpoint.arrays)
        return checkpoint.update

    def _clip_norm(self) -> float:
        return self._private.clip_norm if self._private else math.inf
