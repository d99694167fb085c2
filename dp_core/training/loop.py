"""What a run says about itself while it goes on: about once a second, and at points of its curve.

Where the points lie follows from the number of updates alone, and what is said there holds for the
updates since the point before. So a run that was killed and went on says what an undisturbed one
says, and nothing of it tells how fast the training goes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.data.token_store import TokenStore
from dp_core.errors import ConfideError, Unfinished
from dp_core.models.hugging_face import load_model
from dp_core.models.parameters import AnyModel, Arrays, C, Model, ModelConfig, fresh, language_model
from dp_core.privacy.execution_plan import HALF, ExecutionPlan
from dp_core.privacy.noise_addition import UpdateNoise, lattice_scale, noise_key, noised_mean
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.batches import (
    BatchSource,
    MicroBatch,
    ordinary_batches,
    prefetch,
    private_batches,
    stream,
)
from dp_core.training.checkpoints import Checkpoint, CheckpointPlace, Checkpoints, run_digest
from dp_core.training.config import TrainingConfig, check_model, check_plan, check_words
from dp_core.training.devices import strategy_for
from dp_core.training.objectives import Objective, objective_for
from dp_core.training.trainer import AdamW, Clipping, Trainer

REPORT_SECONDS = 1.0
CURVE_POINTS = 40
_STATE = "since-the-last-point"


@dataclass(frozen=True)
class Progress:
    """How far a run is. `loss`, `batch` and `clipped` are `operator` numbers in private training.

    Attributes:
        update: updates done.
        updates: of how many.
        loss: mean unit loss since the last point of the curve, in nats; NaN if no unit was drawn.
        batch: mean realised batch size since that point, in units.
        clipped: share of units whose gradient was clipped since that point.
        clip_norm: bound of the next update; a released number where it is learned.
        at_point: whether this is a point of the curve.
    """

    update: int
    updates: int
    loss: float
    batch: float
    clipped: float
    clip_norm: float
    at_point: bool


@dataclass(frozen=True)
class Probe:
    """A look at the weights on the way. In private training they are released ones.

    Attributes:
        at: numbers of updates done, fixed beforehand: a point that followed the clock would tell
            how fast, and so on how many units, the training goes.
        look: given (updates done, weights by name). A run that goes on may look once more at
            where it goes on from, and sees the same.
    """

    at: frozenset[int]
    look: Callable[[int, Arrays], None]


def curve_points(updates: int) -> list[int]:
    """Return the points of a run's curve: 40 numbers of updates done, or all if there are fewer."""
    return sorted({max(1, round(updates * i / CURVE_POINTS)) for i in range(CURVE_POINTS + 1)})


class Reporter:
    """Gathers counts and reports them: reading them waits for the devices.

    Args:
        trainer: that counts.
        updates: of the whole run.
        progress: is told.
    """

    def __init__(
        self, trainer: Trainer, updates: int, progress: Callable[[Progress], None]
    ) -> None:
        self._trainer, self._updates, self._progress = trainer, updates, progress
        self._points, self._at = frozenset(curve_points(updates)), time.monotonic()
        self._begin(0)

    def tell(self, done: int, clip_norm: float, *, last: bool) -> None:
        """Report, if this is a point of the curve, or it is time, or the run ends here."""
        now, at_point = time.monotonic(), done in self._points
        if not at_point and not last and now - self._at < REPORT_SECONDS:
            return
        self._read()
        units, since = self._units, done - self._since
        self._progress(
            Progress(
                update=done,
                updates=self._updates,
                loss=self._loss / units if units else float("nan"),
                batch=units / since if since else 0.0,
                clipped=self._clipped / units if units else 0.0,
                clip_norm=clip_norm,
                at_point=at_point,
            )
        )
        self._at = now
        if at_point:
            self._begin(done)

    def state(self) -> Arrays:
        """Return what a checkpoint needs: the counts since the last point."""
        self._read()
        counts = (self._since, self._loss, self._units, self._clipped)
        return {_STATE: np.array(counts, np.float64)}

    def restore(self, state: Arrays) -> None:
        """Set what `state` returned."""
        since, loss, units, clipped = state[_STATE].tolist()
        self._since, self._loss = int(since), loss
        self._units, self._clipped = int(units), int(clipped)

    def _begin(self, done: int) -> None:
        self._since, self._loss, self._units, self._clipped = done, 0.0, 0, 0

    def _read(self) -> None:
        tallies = self._trainer.read_tallies()
        self._loss += tallies.loss
        self._units += tallies.units
        self._clipped += tallies.clipped


_CLIP_NORM_STATE = "clip-norm"


class PrivateUpdates:
    """The plan as it is carried out. The clip norm is state of the run, kept in checkpoints.

    Args:
        plan: what is accounted.
        seed: of the reservation; all noise is drawn from it.
        manifest: what the noise is drawn for.
    """

    def __init__(self, plan: ExecutionPlan, seed: PrivacySeed, manifest: bytes) -> None:
        self._plan, self._seed, self._manifest = plan, seed, manifest
        self.clip_norm = plan.clip_norm

    def clipping(self, style: str) -> Clipping:
        """Return how the first update clips; `add` says what changes."""
        return Clipping(self.clip_norm, style)

    def add(self, trainer: Trainer, batch: MicroBatch) -> None:
        """Add a micro-batch of the update at hand, clipped."""
        trainer.add(batch, self.clip_norm)

    def move(self, trainer: Trainer, t: int, rate: float) -> None:
        """Make update t: noise on the sum, divided by the expected batch; learn the clip norm."""
        multiplier = self._plan.gradient_noise_multiplier()
        noise = UpdateNoise(self._seed, self._manifest, t, multiplier, self.clip_norm)
        trainer.move(t=t, rate=rate, divisor=self._plan.expected_batch(t), noise=noise)
        self._learn(trainer, t)

    def state(self) -> Arrays:
        """Return what a checkpoint needs."""
        return {_CLIP_NORM_STATE: np.array([self.clip_norm], np.float64)}

    def restore(self, state: Arrays) -> None:
        """Set what `state` returned."""
        self.clip_norm = float(state[_CLIP_NORM_STATE][0])

    def _learn(self, trainer: Trainer, t: int) -> None:
        """Set the next clip norm from how many units of update t were within this one.

        Only the noised count is seen, whose cost is in the plan's noise multiplier.
        """
        adaptive = self._plan.adaptive
        if adaptive is None:
            return
        noised = noised_count(
            trainer.noised_below(0.0), self._seed, self._manifest, t, adaptive.count_noise
        )
        share = adaptive.share_within(noised, self._plan.expected_batch(t))
        self.clip_norm = adaptive.next_norm(self.clip_norm, share, self._plan.clip_norm)


def noised_count(count: float, seed: PrivacySeed, manifest: bytes, t: int, stddev: float) -> float:
    """Return update t's count plus N(0, stddev²), on a lattice as noised sums are.

    Args:
        count: Σ (bᵢ − 1/2).
        seed: of the reservation.
        manifest: what the noise is drawn for.
        t: number of the update.
        stddev: σ_b, in units.
    """
    key = noise_key(seed, manifest, t, "units within the clip norm")
    noised = np.empty(1, np.float32)
    scale = lattice_scale(stddev / HALF, HALF, values=1)
    noised_mean(np.array([count], np.float32), key, 0, scale, 1.0, noised)
    return float(noised[0])


_AHEAD = 8  # micro-batches made in advance


def fit(
    start: Model[C],
    objective: Objective,
    *,
    store: TokenStore,
    plan: ExecutionPlan | None,
    training_config: TrainingConfig,
    seed: PrivacySeed | None,
    manifest: bytes,
    order_seed: int,
    checkpoints: CheckpointPlace,
    device: str,
    progress: Callable[[Progress], None],
    probe: Probe | None = None,
) -> Model[C]:
    """Train a model on the rows of a store, going on from a checkpoint if there is one.

    Guarantee, arguments and errors are those of `pretrain`, apart from:

    Args:
        start: the model before the first update; every parameter of it is trained.
        objective: what the rows teach.
        order_seed: public; order and masks without a plan, and part of the run's identity.
    """
    deadline = time.monotonic() + (training_config.stop_after_seconds or math.inf)
    check_plan(plan, training_config, seed)
    check_model(start.config, store)
    # With the noise fixed by its key, sums must not depend on the order in which threads add.
    tf.config.experimental.enable_op_determinism()
    private = PrivateUpdates(plan, seed, manifest) if plan and seed else None
    trainer = Trainer(
        strategy_for(device),
        start.config,
        start.parameters,
        AdamW(training_config.beta1, training_config.beta2, training_config.weight_decay),
        private.clipping(training_config.clipping) if private else None,
        engine=training_config.engine,
        precision=training_config.precision,
        row_losses=objective.row_losses,
    )
    settings = (
        sorted(training_config.identity().items()),
        start.config,
        order_seed,
        objective.name,
    )
    run = run_digest(manifest, *settings, plan and plan.digest())
    dealt = (order_seed, trainer.devices, objective)
    source = _batches(plan, seed, store, training_config, *dealt)
    kept = Checkpoints(checkpoints, run, training_config.keep_checkpoints)
    _Run(trainer, private, training_config, kept, progress, deadline, probe).to_its_end(source)
    weights = trainer.weights()
    if not all(np.isfinite(w).all() for w in weights.values()):
        raise ConfideError("the weights are not finite", where="training", fix="Lower the rate.")
    return Model(start.config, weights, start.labels)


def _batches(
    plan: ExecutionPlan | None,
    seed: PrivacySeed | None,
    store: TokenStore,
    training_config: TrainingConfig,
    order_seed: int,
    devices: int,
    objective: Objective,
) -> BatchSource:
    made = objective.examples
    if plan and seed:
        return private_batches(store, plan, training_config, seed, devices=devices, examples=made)
    return ordinary_batches(store, training_config, order_seed, devices=devices, examples=made)


class _Run:
    """A run under way: from the last checkpoint, update by update."""

    def __init__(
        self,
        trainer: Trainer,
        private: PrivateUpdates | None,
        training_config: TrainingConfig,
        checkpoints: Checkpoints,
        progress: Callable[[Progress], None],
        deadline: float,
        probe: Probe | None,
    ) -> None:
        self._trainer, self._private, self._training_config = trainer, private, training_config
        self._checkpoints, self._deadline, self._probe = checkpoints, deadline, probe
        self._reporter = Reporter(trainer, training_config.updates, progress)
        self._done = self._kept = self._resume()

    def to_its_end(self, batches: BatchSource) -> None:
        if self._done:  # it may have ended after the checkpoint and before it could say so
            self._tell(last=self._done == self._training_config.updates)
        for t, batch in prefetch(
            stream(batches, self._done, self._training_config.updates), _AHEAD
        ):
            if batch is None:
                self._move(t)
                self._look_up()
            elif self._private is None:
                self._trainer.add(batch)
            else:
                self._private.add(self._trainer, batch)

    def _move(self, t: int) -> None:
        rate = self._training_config.rate(t)
        if self._private is None:
            rows = self._training_config.batch_at(t) * self._training_config.examples_per_step
            self._trainer.move(t=t, rate=rate, divisor=rows, noise=None)
        else:
            self._private.move(self._trainer, t, rate)
        self._done = t + 1

    def _look_up(self) -> None:
        """Keep, report, stop: what there is to do between two updates."""
        ends = self._done == self._training_config.updates
        late = not ends and time.monotonic() >= self._deadline
        due = self._done - self._kept >= self._training_config.checkpoint_every
        # What is looked at is kept first: a run that goes on does so from there, not beside it.
        if ends or late or due or self._is_looked_at():
            self._keep()
        self._tell(last=ends or late)
        if late:
            raise Unfinished(
                f"time is up after {self._done} of {self._training_config.updates} updates",
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


def pretrain(
    *,
    model: Path | ModelConfig | AnyModel,
    store: TokenStore,
    plan: ExecutionPlan | None,
    training_config: TrainingConfig,
    seed: PrivacySeed | None,
    manifest: bytes,
    init_seed: int,
    checkpoints: CheckpointPlace,
    device: str,
    progress: Callable[[Progress], None],
    continuation: NDArray[np.bool_] | None = None,
    objective: Objective | None = None,
    probe: Probe | None = None,
) -> AnyModel:
    """Train a model on the rows of a token store, going on from a checkpoint if there is one.

    Formal guarantee, with a plan: the weights after every update are those of DP-SGD with the
    plan's sampling, clip norm and noise, so their privacy is that of `plan.event()`; in real
    arithmetic, and as long as `seed` stays secret and is used for nothing else.

    On one machine the same arguments give the same weights, bit for bit, however often the run
    was stopped. On another kind of processor, or with other threads, sums may round otherwise:
    who runs a released training again must compare (the noise is the same).

    Args:
        model: folder of initial weights, a model, or the shape of a fresh one.
        store: the rows, by unit.
        plan: sampling, clip and noise; None trains ordinarily, in shuffled epochs over the rows
            and `training_config.batch_size · training_config.examples_per_step` rows an update.
        training_config: the rest.
        seed: secret of the reservation; given exactly if there is a plan.
        manifest: keyed digests of everything the noise is drawn for.
        init_seed: public; initial weights, and order and masks without a plan.
        checkpoints: where they are kept. Of private training, treat them as private: moments are
            functions of the released weights, but the run may not be finished.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: called at the points of the curve, and about once a second; a run that goes on
            may tell the point it goes on from once more.
        continuation: (V,) true for pieces that go on with a word; needed by
            `training_config.whole_words`.
        objective: what rows teach; by the architecture if None: masked pieces, or the next.
        probe: looks at the weights at some updates.

    Raises:
        BadInput: plan, training_config, model and store do not fit together, or the checkpoints
            belong to another run.
        Unfinished: `training_config.stop_after_seconds` passed; run again, it goes on.
        ConfideError: the weights stopped being finite, or a checkpoint could not be written.
    """
    check_words(training_config, store, continuation)
    initial = _initial(model, init_seed)
    if objective is None:
        objective = objective_for(
            initial.config, continuation if training_config.whole_words else None
        )
    return fit(
        initial,
        objective,
        store=store,
        plan=plan,
        training_config=training_config,
        seed=seed,
        manifest=manifest,
        order_seed=init_seed,
        checkpoints=checkpoints,
        device=device,
        progress=progress,
        probe=probe,
    )


def _initial(model: Path | ModelConfig | AnyModel, init_seed: int) -> AnyModel:
    if isinstance(model, Path):
        return language_model(load_model(model))
    return model if isinstance(model, Model) else fresh(model, init_seed)
