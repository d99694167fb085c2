"""Language-model pre-training: with differential privacy, or without, by one trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.bert.config import BertConfig
from dp_core.bert.parameters import Bert, fresh
from dp_core.bert.weights import load
from dp_core.corpus.token_store import TokenStore
from dp_core.errors import ConfideError, Unfinished
from dp_core.privacy.plan import TrainingPlan
from dp_core.privacy.seeds import PrivacySeed
from dp_core.training.adamw import AdamW
from dp_core.training.agreement import check_model, check_plan, check_words
from dp_core.training.batch_source import (
    BatchSource,
    ordinary_batches,
    private_batches,
    stream,
)
from dp_core.training.checkpoint import Checkpoint, Checkpoints, run_digest
from dp_core.training.checkpoint_places import CheckpointPlace
from dp_core.training.devices import strategy_for
from dp_core.training.prefetch import prefetch
from dp_core.training.private_updates import PrivateUpdates
from dp_core.training.progress import Progress, Reporter
from dp_core.training.recipe import Recipe
from dp_core.training.rows import Examples, masked_examples
from dp_core.training.trainer import Trainer

_AHEAD = 8  # micro-batches made in advance


def pretrain(
    *,
    model: Path | BertConfig,
    store: TokenStore,
    plan: TrainingPlan | None,
    recipe: Recipe,
    seed: PrivacySeed | None,
    manifest: bytes,
    init_seed: int,
    checkpoints: CheckpointPlace,
    device: str,
    progress: Callable[[Progress], None],
    continuation: NDArray[np.bool_] | None = None,
    batches: BatchSource | None = None,
) -> Bert:
    """Train a model on the rows of a token store, going on from a checkpoint if there is one.

    Formal guarantee, with a plan: the weights after every update are those of DP-SGD with the
    plan's sampling, clip norm and noise, so their privacy is that of `plan.event()`; in real
    arithmetic, and as long as `seed` stays secret and is used for nothing else.

    On one machine the same arguments give the same weights, bit for bit, however often the run
    was stopped. On another kind of processor, or with other threads, sums may round otherwise:
    who runs a released training again must compare (the noise is the same).

    Args:
        model: folder of initial weights, or the shape of a fresh model.
        store: the rows, by unit.
        plan: sampling, clip and noise; None trains ordinarily, in shuffled epochs over the rows
            and `recipe.batch_size · recipe.examples_per_step` rows an update.
        recipe: the rest.
        seed: secret of the reservation; given exactly if there is a plan.
        manifest: keyed digests of everything the noise is drawn for.
        init_seed: public; initial weights, and order and masks without a plan.
        checkpoints: where they are kept. Of private training, treat them as private: moments are
            functions of the released weights, but the run may not be finished.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: called about once a second, and at the end.
        continuation: (V,) true for pieces that go on with a word; needed by `recipe.whole_words`.
        batches: what `batch_plan.BatchPlan` reads, drawn beforehand; None draws them here.

    Raises:
        BadInput: plan, recipe, model and store do not fit together, or the checkpoints belong to
            another run.
        Unfinished: `recipe.stop_after_seconds` passed; run again, it goes on.
        ConfideError: the weights stopped being finite, or a checkpoint could not be written.
    """
    deadline = time.monotonic() + (recipe.stop_after_seconds or math.inf)
    check_plan(plan, recipe, seed)
    check_words(recipe, store, continuation)
    # With the noise fixed by its key, sums must not depend on the order in which threads add.
    tf.config.experimental.enable_op_determinism()
    initial = load(model) if isinstance(model, Path) else fresh(model, init_seed)
    check_model(initial.config, store)
    examples = partial(masked_examples, continuation=continuation if recipe.whole_words else None)
    private = PrivateUpdates(plan, seed, manifest) if plan and seed else None
    trainer = Trainer(
        strategy_for(device),
        initial.config,
        initial.parameters,
        AdamW(recipe.beta1, recipe.beta2, recipe.weight_decay),
        private.clipping(recipe.clipping) if private else None,
        engine=recipe.engine,
        precision=recipe.precision,
    )
    settings = (sorted(recipe.identity().items()), initial.config, init_seed)
    run = run_digest(manifest, *settings, plan and plan.digest())
    source = batches or _batches(plan, seed, store, recipe, init_seed, trainer.devices, examples)
    kept = Checkpoints(checkpoints, run, recipe.keep_checkpoints)
    _Run(trainer, private, recipe, kept, progress, deadline).to_its_end(source)
    weights = trainer.weights()
    if not all(np.isfinite(w).all() for w in weights.values()):
        raise ConfideError("the weights are not finite", where="training", fix="Lower the rate.")
    return Bert(initial.config, weights)


def _batches(
    plan: TrainingPlan | None,
    seed: PrivacySeed | None,
    store: TokenStore,
    recipe: Recipe,
    init_seed: int,
    devices: int,
    examples: Examples,
) -> BatchSource:
    if plan and seed:
        return private_batches(store, plan, recipe, seed, devices=devices, examples=examples)
    return ordinary_batches(store, recipe, init_seed, devices=devices, examples=examples)


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
    ) -> None:
        self._trainer, self._private, self._recipe = trainer, private, recipe
        self._checkpoints, self._deadline = checkpoints, deadline
        self._done = self._kept = self._resume()
        self._reporter = Reporter(trainer, recipe.updates, progress, self._done)

    def to_its_end(self, batches: BatchSource) -> None:
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
            self._trainer.move(t=t, rate=rate, divisor=rows, keys=None)
        else:
            self._private.move(self._trainer, t, rate)
        self._done = t + 1

    def _look_up(self) -> None:
        """Keep, report, stop: what there is to do between two updates."""
        ends = self._done == self._recipe.updates
        late = not ends and time.monotonic() >= self._deadline
        if ends or late or self._done - self._kept >= self._recipe.checkpoint_every:
            self._keep()
        self._reporter.tell(self._done, self._clip_norm(), last=ends or late)
        if late:
            raise Unfinished(
                f"time is up after {self._done} of {self._recipe.updates} updates",
                where="training",
                fix="Run it again: it goes on from its checkpoint.",
            )

    def _keep(self) -> None:
        own = self._private.state() if self._private else {}
        self._checkpoints.save(Checkpoint(self._done, self._trainer.state() | own))
        self._kept = self._done

    def _resume(self) -> int:
        checkpoint = self._checkpoints.latest()
        if checkpoint is None:
            return 0
        self._trainer.restore(checkpoint.arrays)
        if self._private:
            self._private.restore(checkpoint.arrays)
        return checkpoint.update

    def _clip_norm(self) -> float:
        return self._private.clip_norm if self._private else math.inf
