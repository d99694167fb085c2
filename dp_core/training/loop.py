"""The training loop: runs updates from the last checkpoint, for every model and objective.

An update rule defines an update: `PrivateUpdates` executes an execution plan, `OrdinaryUpdates`
trains without privacy in shuffled epochs, and `ClippedUpdates` clips without a guarantee. The loop
draws batches, adds noise, updates the weights and saves checkpoints. Gradients come from this
process or from hosts (`gradient_sources`).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.config.training import TrainingConfig
from dp_core.data.token_store import TokenStore
from dp_core.errors import BadInput, ConfideError, Unfinished
from dp_core.models.adapters import prepared, trained_names
from dp_core.models.parameters import Arrays, C, Model, ModelConfig, shape_facts
from dp_core.privacy.batch_selection import BatchSampler, PoissonSampling
from dp_core.privacy.correlated_noise import PastNoise
from dp_core.privacy.execution_plan import Clipper, ExecutionPlan
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.batches import Batches, Sampler, ShuffledRows, SingleRows, UnitRows
from dp_core.training.checkpoints import CheckpointPlace, Checkpoints, arrays_digest, run_digest
from dp_core.training.devices import strategy_for
from dp_core.training.gradient_sources import GradientHosts, GradientSource, local_gradients
from dp_core.training.objectives import Objective
from dp_core.training.trainer import AdamW, Observer, PublicNoise, Trainer

REPORT_SECONDS = 1.0
CURVE_POINTS = 40
_COUNTS = "since-the-last-point"


@dataclass(frozen=True)
class PrivateUpdates:
    """DP-SGD by an execution plan.

    Formal guarantee: the weights after every update are the output of the mechanism
    `plan.event()`, in real arithmetic, if `seed` stays secret and is used for nothing else.

    Attributes:
        plan: makes the sampler, the clipper and the noise.
        seed: secret of the reservation. All randomness is drawn from it.
        manifest: keyed digests of everything that the noise is drawn for.
    """

    plan: ExecutionPlan
    seed: PrivacySeed = field(repr=False)
    manifest: bytes = field(repr=False)
    _past: PastNoise = field(default_factory=PastNoise, init=False, repr=False, compare=False)

    @property
    def updates(self) -> int:
        """Number of updates of the plan."""
        return self.plan.steps

    def identity(self) -> object:
        """Return the digests of manifest and plan."""
        return hashlib.sha256(self.manifest).hexdigest(), self.plan.digest()

    def clipper(self) -> Clipper:
        """Return the plan's clipper."""
        return self.plan.clipper()

    def sampler(self, store: TokenStore) -> Sampler:
        """Return the plan's sampler of the store's units.

        Raises:
            BadInput: the store has more units than the plan declares.
        """
        return self.plan.sampler(self.seed, store.n_units)

    def rows(self, micro_rows: int, devices: int, hosts: int = 1) -> UnitRows:
        """Return the rows of each unit that the plan states.

        If the sampler bounds the draw, every update has at least the number of micro-batches that
        the largest draw needs.
        """
        plan, rows = self.plan, self.plan.examples_per_step * self.plan.maskings_per_example
        units = max(1, micro_rows // rows) * devices
        largest = plan.sampling.largest_batch(plan.declared_units) or 0
        coins = int.from_bytes(self.seed.derive("rows and masks")[:8], "little")
        least = math.ceil(largest / (units * hosts))
        return UnitRows(coins, units, rows, plan.maskings_per_example, least)

    def apply_update(self, trainer: Trainer, step: int, learning_rate: float) -> None:
        """Add the plan's noise to the clipped sum and divide by the expected batch.

        AdamW divides by the root of its second moment, which includes the noise of each update.
        Later updates cancel most of the correlated noise, so the step is multiplied by the noise's
        loudness: a learning rate then means the same for any number of bands.
        """
        clipper, batch = trainer.clipper, self.plan.expected_batch(step)
        assert clipper is not None  # noqa: S101 - narrows the type
        noise = self.plan.noise(self.seed, self.manifest, step, clipper, self._past)
        trainer.apply_update(
            step=step,
            learning_rate=learning_rate,
            divisor=batch,
            noise=noise,
            loudness=self.plan.strategy.loudness(self.plan.steps),
        )
        if self.plan.adaptive:
            count = trainer.take_count_within()
            clipper.learn_clip_norm(count, self.seed, self.manifest, step, batch)


@dataclass(frozen=True)
class OrdinaryUpdates:
    """AdamW without privacy, in shuffled epochs over the rows.

    Attributes:
        updates: number of updates; with 0 the model stays unchanged.
        batch_rows: rows that an update reads.
        seed: public; determines the order of rows and the masks.
    """

    updates: int
    batch_rows: int
    seed: int

    def __post_init__(self) -> None:
        for name, least in (("updates", 0), ("batch_rows", 1)):
            if getattr(self, name) < least:
                raise BadInput(f"{getattr(self, name)} is below {least}", where=name)

    def identity(self) -> object:
        """Return the three numbers."""
        return self

    def clipper(self) -> None:
        """Return None: gradients are not clipped."""

    def sampler(self, store: TokenStore) -> ShuffledRows:
        """Return the rows of the store in shuffled epochs."""
        return ShuffledRows(store.n_rows, self.seed, self.batch_rows)

    def rows(self, micro_rows: int, devices: int, hosts: int = 1) -> SingleRows:
        """Return micro-batches of equal size, which need little padding."""
        share = math.ceil(self.batch_rows / hosts)
        parts = math.ceil(share / (micro_rows * devices))
        return SingleRows(self.seed, math.ceil(share / (parts * devices)) * devices)

    def apply_update(self, trainer: Trainer, step: int, learning_rate: float) -> None:
        """Divide the sum by the number of rows."""
        trainer.apply_update(
            step=step, learning_rate=learning_rate, divisor=self.batch_rows, noise=None
        )


@dataclass(frozen=True)
class ClippedUpdates:
    """The clipping and noise of DP-SGD without its guarantee: ε is infinite.

    For experiments on clipping alone (Thakkar et al. 2020, arXiv:2006.07490) and on noise that is
    too small to protect (Jagannatha et al. 2021). Batches and noise follow from a public seed, and
    there is no plan that could be accounted for.

    Attributes:
        updates: number of updates.
        batch_size: expected units of an update, which divide the sum.
        sampling_rate: probability with which a unit takes part in an update.
        unit_rows: most rows of a unit in an update; clipped together.
        clip_norm: bound on a unit's gradient.
        noise_multiplier: σ, in units of the clip norm; may be 0.
        seed: public.
    """

    updates: int
    batch_size: int
    sampling_rate: float
    unit_rows: int
    clip_norm: float
    noise_multiplier: float
    seed: int

    def identity(self) -> object:
        """Return the numbers."""
        return self

    def clipper(self) -> Clipper:
        """Return a flat clipper."""
        return Clipper(self.clip_norm)

    def sampler(self, store: TokenStore) -> Sampler:
        """Return Poisson batches of the store's units."""
        seed = PrivacySeed.fixed(self.seed)
        return BatchSampler(PoissonSampling(), seed, store.n_units, lambda _: self.sampling_rate)

    def rows(self, micro_rows: int, devices: int, hosts: int = 1) -> UnitRows:
        """Return the rows of each unit."""
        return UnitRows(self.seed, max(1, micro_rows // self.unit_rows) * devices, self.unit_rows)

    def apply_update(self, trainer: Trainer, step: int, learning_rate: float) -> None:
        """Add the noise, if any, to the clipped sum and divide by the expected batch."""
        noise = PublicNoise(self.seed, step, self.noise_multiplier * self.clip_norm)
        trainer.apply_update(
            step=step,
            learning_rate=learning_rate,
            divisor=self.batch_size,
            noise=noise if self.noise_multiplier else None,
        )


# An update's batches, and the use of their sum.
UpdateRule = PrivateUpdates | OrdinaryUpdates | ClippedUpdates


@dataclass(frozen=True)
class Progress:
    """Progress of a run. `loss`, `batch` and `clipped` are `operator` numbers in private training.

    Reports at the points of the curve depend only on the number of updates. A run that was stopped
    and resumed therefore reports the same points as an uninterrupted run, and the points do not
    reveal the speed of the training.

    Attributes:
        update: number of updates done.
        updates: number of updates of the whole run.
        loss: mean unit loss since the last point of the curve, in nats; NaN if no unit was drawn.
        batch: mean realised batch size since that point, in units.
        clipped: share of units whose gradient was clipped since that point.
        clip_norm: clip norm of the next update; a released number if it is learned.
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
class EvaluationHook:
    """A function that is called with the weights during training; private training releases them.

    Attributes:
        at: numbers of updates done, fixed beforehand. Points chosen by the clock would reveal the
            speed of the training, and thereby the number of units.
        evaluate: receives (updates done, weights by name). A resumed run may repeat the evaluation
            at its checkpoint, with the same weights.
    """

    at: frozenset[int]
    evaluate: Callable[[int, Arrays], None]


NO_EVALUATION = EvaluationHook(frozenset(), lambda done, weights: None)


def curve_points(updates: int) -> list[int]:
    """Return the points of a run's curve: 40 numbers of updates, or all if there are fewer."""
    return sorted({max(1, round(updates * i / CURVE_POINTS)) for i in range(CURVE_POINTS + 1)})


def train(
    start: Model[C],
    objective: Objective,
    *,
    store: TokenStore,
    updates: UpdateRule,
    config: TrainingConfig,
    seed: int,
    checkpoints: CheckpointPlace,
    device: str = "cpu",
    progress: Callable[[Progress], None] = lambda now: None,
    points: Collection[int] | None = None,
    hook: EvaluationHook = NO_EVALUATION,
    observe: Observer | None = None,
    hosts: GradientHosts | None = None,
) -> Model[C]:
    """Train a model on the rows of a store, resuming from a checkpoint if there is one.

    On one machine the same arguments give the same weights, bit for bit, even if the run was
    stopped and resumed. Another kind of processor, number of threads or number of hosts may round
    sums differently, although the noise is the same: compare the weights after repeating a
    released training elsewhere.

    Args:
        start: the model before the first update; `config` selects the trained parameters.
        objective: the training objective.
        store: the rows, by unit.
        updates: the update rule, private or ordinary.
        config: optimizer, checkpoints and time limit.
        seed: public, part of the run's identity.
        checkpoints: place of the checkpoints. Treat checkpoints of private training as private:
            moments are functions of the released weights, but the run may be unfinished.
        device: cpu, gpu, tpu or mock-tpu:N.
        progress: called at the points of the curve, and about once a second. A resumed run may
            repeat the report of its checkpoint.
        points: points of the curve; `curve_points` if None.
        hook: called with the weights at some updates.
        observe: called with every update's noised means; see `Trainer`.
        hosts: hosts that compute the gradients on their devices; None computes them here.

    Raises:
        BadInput: model, store and update rule do not fit together, or the checkpoints belong to
            another run.
        Unfinished: `config.stop_after_seconds` passed; another run continues the training.
        ConfideError: the weights are not finite, or a checkpoint could not be written.
    """
    deadline = time.monotonic() + (config.stop_after_seconds or math.inf)
    _refuse_contradictions(start.config, objective, store, updates, config)
    start = prepared(start, config, seed)
    trained = trained_names(start, config)
    # The noise is fixed by its key, so sums must not depend on the order in which threads add.
    tf.config.experimental.enable_op_determinism()
    trainer = Trainer(
        strategy_for(device if hosts is None else "cpu"),
        start.config,
        start.parameters,
        AdamW(
            config.beta1, config.beta2, config.weight_decay, config.noise_floor, config.adam_epsilon
        ),
        updates.clipper(),
        precision=config.precision,
        row_losses=objective.row_losses,
        trained=trained,
        dropout=config.dropout,
        observe=observe,
    )
    count = 1 if hosts is None else hosts.hosts.count
    micro_rows = config.rows_at_once(
        **shape_facts(start.config),
        sequence_length=store.sequence_length,
        vocabulary_size=start.config.vocab_size,
    )
    rows = updates.rows(micro_rows, trainer.devices, count)
    batches = Batches(store, updates.sampler(store), rows, objective.examples)
    gradients: GradientSource = partial(local_gradients, trainer, batches)
    if hosts is not None:
        gradients = hosts.source(trainer, objective, batches, device)
    settings = (sorted(config.identity().items()), start.config, seed, objective.name)
    # Checkpoints hold only trained parameters; the frozen ones are part of the run's identity.
    frozen = {name: a for name, a in start.parameters.items() if name not in trained}
    run = run_digest(updates.identity(), *settings, sorted(trained), arrays_digest(frozen))
    if points is None:
        points = curve_points(updates.updates)
    kept = Checkpoints(checkpoints, run)
    training = _Run(trainer, updates, config, kept, points, progress, hook, deadline)
    training.to_its_end(gradients)
    weights = trainer.weights()
    if not all(np.isfinite(w).all() for w in weights.values()):
        raise ConfideError(
            "the weights are not finite", where="training", fix="Lower the learning rate."
        )
    return Model(start.config, weights, start.labels)


@dataclass
class _Run:
    """A run in progress, which starts from the last checkpoint.

    It accumulates the trainer's counts since the last point of the curve. Reading them waits for
    the devices.
    """

    trainer: Trainer
    updates: UpdateRule
    config: TrainingConfig
    checkpoints: Checkpoints
    points: Collection[int]
    progress: Callable[[Progress], None]
    hook: EvaluationHook
    deadline: float

    def __post_init__(self) -> None:
        self.reported = time.monotonic()
        self.done, self.point = 0, 0
        self.counts: NDArray[Any] = np.zeros(3)
        if (latest := self.checkpoints.latest()) is not None:
            self.done, arrays = latest
            self.trainer.restore(arrays)
            self.point, self.counts = int(arrays[_COUNTS][0]), arrays[_COUNTS][1:]
        self.saved = self.done

    def to_its_end(self, gradients: GradientSource) -> None:
        total = self.updates.updates
        if self.done:  # the run may have ended between its checkpoint and its report
            self._report(last=self.done == total)
        for step in gradients(self.done, total):
            learning_rate = self.config.learning_rate_at(step, total)
            self.updates.apply_update(self.trainer, step, learning_rate)
            self.done = step + 1
            self._between_updates()

    def _between_updates(self) -> None:
        """Save a checkpoint, report and stop, each when it is due."""
        ends = self.done == self.updates.updates
        late = not ends and time.monotonic() >= self.deadline
        due = self.done - self.saved >= self.config.checkpoint_every
        # The checkpoint precedes the evaluation, so a resumed run has the evaluated weights.
        if ends or late or due or self.done in self.hook.at:
            counts = np.array([self.point, *self._read_counts()])
            self.checkpoints.save(self.done, self.trainer.state() | {_COUNTS: counts})
            self.saved = self.done
        self._report(last=ends or late)
        if late:
            raise Unfinished(
                f"time is up after {self.done} of {self.updates.updates} updates",
                where="training",
                fix="Run it again: it continues from its checkpoint.",
            )

    def _report(self, *, last: bool) -> None:
        """Evaluate if it is due; report at points of the curve, at the end, and every second."""
        if self.done in self.hook.at:
            self.hook.evaluate(self.done, self.trainer.weights())
        now, at_point = time.monotonic(), self.done in self.points
        if not at_point and not last and now - self.reported < REPORT_SECONDS:
            return
        loss, units, clipped = self._read_counts().tolist()
        since = self.done - self.point
        self.progress(
            Progress(
                update=self.done,
                updates=self.updates.updates,
                loss=loss / units if units else float("nan"),
                batch=units / since if since else 0.0,
                clipped=clipped / units if units else 0.0,
                clip_norm=self.trainer.clip_norm,
                at_point=at_point,
            )
        )
        self.reported = now
        if at_point:
            self.point, self.counts = self.done, np.zeros(3)

    def _read_counts(self) -> NDArray[np.float64]:
        """Return losses, units and clipped units since the last point of the curve: (3,)."""
        self.counts = self.counts + self.trainer.read_tallies()
        return self.counts


def _refuse_contradictions(
    config: ModelConfig,
    objective: Objective,
    store: TokenStore,
    updates: UpdateRule,
    training: TrainingConfig,
) -> None:
    """Refuse rows that the model cannot read, and settings of masks that have no effect."""
    if store.vocabulary_size > config.vocab_size:
        raise BadInput(
            f"the store's vocabulary of {store.vocabulary_size} is larger than the model's of "
            f"{config.vocab_size}",
            where="model",
            fix="Load the model with the store's vocabulary.",
        )
    if store.sequence_length > config.max_positions:
        raise BadInput(
            f"rows of {store.sequence_length} tokens are longer than the model's "
            f"{config.max_positions} positions",
            where="model",
        )
    several = isinstance(updates, PrivateUpdates) and updates.plan.maskings_per_example > 1
    if several and not objective.masks:
        raise BadInput(
            f"{objective.name} has no masks, so every masking of a row would be the same",
            where="maskings_per_example",
            fix="Set it to 1.",
        )
    words = objective.continuation
    if training.whole_words and (words is None or words.shape != (store.vocabulary_size,)):
        raise BadInput(
            "masking whole words needs the vocabulary's continuation pieces",
            where="whole_words",
            fix="Give one flag for each piece of the store's vocabulary.",
        )
