"""Masked-language-model pre-training: with differential privacy, or without, by one trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dp_core.bert.config import BertConfig
from dp_core.bert.parameters import Bert, fresh
from dp_core.bert.weights import load
from dp_core.corpus.token_store import TokenStore
from dp_core.errors import BadInput, ConfideError
from dp_core.privacy.plan import TrainingPlan
from dp_core.privacy.sampling import sampler_for
from dp_core.privacy.seeds import PrivacySeed
from dp_core.training.adamw import AdamW
from dp_core.training.checkpoint import Checkpoint, CheckpointFolder, run_digest
from dp_core.training.devices import strategy_for
from dp_core.training.noise_blocks import Keys
from dp_core.training.prefetch import prefetch
from dp_core.training.recipe import Recipe
from dp_core.training.rows import MicroBatch, OrdinaryBatches, PrivateBatches
from dp_core.training.trainer import Clipping, Trainer

_AHEAD = 8  # micro-batches made in advance
_REPORT_SECONDS = 1.0


@dataclass(frozen=True)
class Progress:
    """How far a run is. All but the first two are `operator` numbers in private training.

    Attributes:
        update: updates done.
        updates: of how many.
        loss: mean unit loss since the last report, in nats; NaN if no unit was drawn.
        batch: mean realised batch size since the last report, in units.
        clipped: share of units whose gradient was clipped since the last report.
    """

    update: int
    updates: int
    loss: float
    batch: float
    clipped: float


def pretrain(
    *,
    model: Path | BertConfig,
    store: TokenStore,
    plan: TrainingPlan | None,
    recipe: Recipe,
    seed: PrivacySeed | None,
    manifest: bytes,
    init_seed: int,
    checkpoint_dir: Path,
    device: str,
    progress: Callable[[Progress], None],
) -> Bert:
    """Train a BERT on the rows of a token store, going on from a checkpoint if there is one.

    Formal guarantee, with a plan: the weights after every update are those of DP-SGD with the
    plan's sampling, clip norm and noise, so their privacy is that of `plan.event()`; in real
    arithmetic, and as long as `seed` stays secret and is used for nothing else.

    Args:
        model: folder of initial weights, or the shape of a fresh model.
        store: the rows, by unit.
        plan: sampling, clip and noise; None trains ordinarily, in shuffled epochs over the rows
            and `recipe.batch_size · recipe.examples_per_step` rows an update.
        recipe: the rest.
        seed: secret of the reservation; given exactly if there is a plan.
        manifest: keyed digests of everything the noise is drawn for.
        init_seed: public; initial weights, and order and masks without a plan.
        checkpoint_dir: where checkpoints are kept. Of private training, treat it as private:
            moments are functions of the released weights, but the run may not be finished.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: called about once a second, and at the end.

    Raises:
        BadInput: plan, recipe, model and store do not fit together, or the checkpoints belong to
            another run.
        ConfideError: the weights stopped being finite.
    """
    _check(plan, recipe, seed)
    initial = load(model) if isinstance(model, Path) else fresh(model, init_seed)
    _check_model(initial.config, store)
    trainer = Trainer(
        strategy_for(device),
        initial.config,
        initial.parameters,
        AdamW(recipe.beta1, recipe.beta2, recipe.weight_decay),
        None if plan is None else _clipping(plan),
    )
    settings = (sorted(asdict(recipe).items()), initial.config, init_seed, plan and plan.digest())
    run = run_digest(manifest, *settings)
    folder = CheckpointFolder(checkpoint_dir, run)
    done = _resume(trainer, folder)
    batches = _batches(plan, seed, store, recipe, init_seed, trainer.devices)
    reporter = _Reporter(trainer, recipe.updates, progress, done)
    for t, batch in prefetch(_stream(batches, done, recipe.updates), _AHEAD):
        if batch is not None:
            trainer.add(batch)
            continue
        trainer.move(
            t=t,
            rate=recipe.rate(t),
            divisor=_divisor(plan, recipe, t),
            keys=_keys(trainer, plan, seed, manifest, t),
        )
        done = t + 1
        if done % recipe.checkpoint_every == 0 or done == recipe.updates:
            folder.save(Checkpoint(done, trainer.state()))
        reporter.tell(done)
    weights = trainer.weights()
    if not all(np.isfinite(w).all() for w in weights.values()):
        raise ConfideError("the weights are not finite", where="training", fix="Lower the rate.")
    return Bert(initial.config, weights)


def _check(plan: TrainingPlan | None, recipe: Recipe, seed: PrivacySeed | None) -> None:
    if plan is None:
        if seed is not None:
            raise BadInput("a privacy seed without a plan", where="pretraining")
        return
    if seed is None:
        raise BadInput("a plan without a privacy seed", where="pretraining")
    for name, planned, asked in (
        ("updates", plan.steps, recipe.updates),
        ("examples_per_step", plan.examples_per_step, recipe.examples_per_step),
    ):
        if planned != asked:
            raise BadInput(
                f"the plan has {planned}, the recipe {asked}",
                where=name,
                fix="What is accounted must be what is done.",
            )


def _check_model(config: BertConfig, store: TokenStore) -> None:
    if store.vocabulary_size > config.vocab_size:
        raise BadInput(
            f"the store's vocabulary of {store.vocabulary_size} is larger than the model's of "
            f"{config.vocab_size}",
            where="model",
            fix="Load the model with the store's vocabulary.",
        )
    if store.sequence_length > config.max_positions:
        raise BadInput(
            f"rows of {store.sequence_length} tokens, positions for {config.max_positions}",
            where="model",
        )


def _clipping(plan: TrainingPlan) -> Clipping:
    return Clipping(plan.clip_norm, plan.noise_multiplier_per_draw() * plan.clip_norm)


def _batches(
    plan: TrainingPlan | None,
    seed: PrivacySeed | None,
    store: TokenStore,
    recipe: Recipe,
    init_seed: int,
    devices: int,
) -> PrivateBatches | OrdinaryBatches:
    if plan is None or seed is None:
        rows = recipe.batch_size * recipe.examples_per_step
        parts = -(-rows // (recipe.micro_rows * devices))
        units = -(-rows // (parts * devices)) * devices  # even parts: little padding
        return OrdinaryBatches(store, init_seed, units, rows)
    units = max(1, recipe.micro_rows // recipe.examples_per_step) * devices
    coins = int.from_bytes(seed.derive("rows and masks")[:8], "little")
    sampler = sampler_for(plan, seed, store.n_units)
    return PrivateBatches(store, sampler, coins, units, recipe.examples_per_step)


def _stream(
    batches: PrivateBatches | OrdinaryBatches, start: int, end: int
) -> Iterator[tuple[int, MicroBatch | None]]:
    """Yield each update's micro-batches and then None: also an empty batch makes an update."""
    for t in range(start, end):
        for batch in batches.update(t):
            yield t, batch
        yield t, None


def _divisor(plan: TrainingPlan | None, recipe: Recipe, t: int) -> float:
    if plan is None:
        return float(recipe.batch_size * recipe.examples_per_step)
    return plan.expected_batch(t)


def _keys(
    trainer: Trainer, plan: TrainingPlan | None, seed: PrivacySeed | None, manifest: bytes, t: int
) -> Keys | None:
    if plan is None or seed is None:
        return None
    return trainer.noise.keys(seed, manifest, t, plan.noise_draws())


def _resume(trainer: Trainer, folder: CheckpointFolder) -> int:
    checkpoint = folder.latest()
    if checkpoint is None:
        return 0
    trainer.restore(checkpoint.arrays)
    return checkpoint.update


class _Reporter:
    """Reports about once a second: reading the counts waits for the devices."""

    def __init__(
        self, trainer: Trainer, updates: int, progress: Callable[[Progress], None], done: int
    ) -> None:
        self._trainer, self._updates, self._progress = trainer, updates, progress
        self._reported, self._at = done, time.monotonic()

    def tell(self, done: int) -> None:
        now = time.monotonic()
        if done < self._updates and now - self._at < _REPORT_SECONDS:
            return
        tallies = self._trainer.read_tallies()
        units = tallies.units
        self._progress(
            Progress(
                update=done,
                updates=self._updates,
                loss=tallies.loss / units if units else float("nan"),
                batch=units / (done - self._reported),
                clipped=tallies.clipped / units if units else 0.0,
            )
        )
        self._reported, self._at = done, now
