"""The compiled half of training: gradient sums of micro-batches, then one update.

Each device adds the sums of its micro-batches to its own accumulators; an update adds them across
devices, adds the noise ONCE, divides, and moves the weights. With noise keyed by variable and
update alone, the layout (devices, micro-batches) cannot change what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.models.bert import mlm_row_losses
from dp_core.models.parameters import Arrays, ModelConfig, decays
from dp_core.nn.layers import Tensor, compute_type
from dp_core.privacy.clipping.book_keeping import factors_named
from dp_core.privacy.clipping.reference import engine_named
from dp_core.privacy.noise_addition import UpdateNoise, noised_means
from dp_core.training.batches import MicroBatch
from dp_core.training.objectives import RowLosses, UnitBatch, ordinary_sum

EPSILON = 1e-8


@dataclass(frozen=True)
class AdamW:
    """The constants of the optimizer."""

    beta1: float
    beta2: float
    weight_decay: float

    def apply(
        self,
        name: str,
        weight: Any,
        mean: Any,
        square: Any,
        gradient: Tensor,
        rate: Tensor,
        step: Tensor,
    ) -> None:
        """Move one variable, its two moments with it.

        Args:
            name: of the parameter; biases and LayerNorm gains do not decay.
            weight: tf.Variable.
            mean: tf.Variable, the decaying mean of the gradients.
            square: tf.Variable, the decaying mean of their squares.
            gradient: of the variable's shape.
            rate: scalar, the learning rate.
            step: scalar float32, number of this update, from 1.
        """
        if self.weight_decay and decays(name):
            weight.assign_sub(rate * self.weight_decay * weight)
        tf.raw_ops.ResourceApplyAdam(
            var=weight.handle,
            m=mean.handle,
            v=square.handle,
            beta1_power=tf.pow(self.beta1, step),
            beta2_power=tf.pow(self.beta2, step),
            lr=rate,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=EPSILON,
            grad=gradient,
        )


_MEAN, _SQUARE = "adam-mean/", "adam-square/"
_TALLIES = 3  # sum of unit losses, units, clipped units


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped.

    Attributes:
        clip_norm: C, for as long as `Trainer.add` is not told another.
        style: how to clip, `flat` or `automatic` (`dp_core.privacy.clipping.book_keeping`).
    """

    clip_norm: float
    style: str = "flat"


@dataclass(frozen=True)
class Tallies:
    """Counts since the last reading; `operator` numbers, computed without noise."""

    loss: float
    units: int
    clipped: int


class Trainer:
    """Weights, moments and accumulators on the devices of a strategy.

    Args:
        strategy: from `devices.strategy_for`.
        config: the model's shape.
        parameters: initial weights, by name.
        optimizer: the constants of AdamW.
        clipping: how to clip; None trains without privacy.
        engine: the way to the clipped sum, one of `clipping.engines.ENGINES`.
        precision: format of the factors of products, `float32` or `bfloat16`; weights, norms,
            sums and noise are float32.
        row_losses: (layers, config, ids, lengths, positions, labels, weights) -> (M,), as
            `heads.mlm_row_losses`.

    Raises:
        BadInput: no such engine, precision or style of clipping.
    """

    def __init__(
        self,
        strategy: Any,
        config: ModelConfig,
        parameters: Arrays,
        optimizer: AdamW,
        clipping: Clipping | None,
        *,
        engine: str = "book-keeping",
        precision: str = "float32",
        row_losses: RowLosses = mlm_row_losses,
    ) -> None:
        compute_type(precision)
        self._strategy, self._config = strategy, config
        self._optimizer, self._clipping = optimizer, clipping
        self._engine, self._precision = engine_named(engine), precision
        self._factors = factors_named("flat" if clipping is None else clipping.style)
        self._row_losses = row_losses
        self.names = list(parameters)
        with strategy.scope():
            self._weights = {n: tf.Variable(a, name=n) for n, a in parameters.items()}
            self._means = {n: tf.Variable(np.zeros_like(a)) for n, a in parameters.items()}
            self._squares = {n: tf.Variable(np.zeros_like(a)) for n, a in parameters.items()}
            self._sums = {n: _accumulator(a.shape) for n, a in parameters.items()}
            self._tallies = _accumulator((_TALLIES,))
            self._below = _accumulator(())
        self._add = tf.function(self._add_everywhere, autograph=False)
        self._totals = tf.function(self._added_up, autograph=False)
        self._move = tf.function(self._move_everywhere, autograph=False)
        self._move_by_totals = tf.function(self._move_without_noise, autograph=False)
        self._read = tf.function(lambda: self._take(self._tallies), autograph=False)
        self._take_below = tf.function(lambda: self._take(self._below), autograph=False)

    @property
    def devices(self) -> int:
        """Number of devices that share a micro-batch."""
        return int(self._strategy.num_replicas_in_sync)

    @property
    def compilations(self) -> int:
        """Number of traces of the gradient sum: 1, whatever the batches' realised sizes."""
        return int(self._add.experimental_get_tracing_count())

    def add(self, batch: MicroBatch, clip_norm: float | None = None) -> None:
        """Add a micro-batch's gradients to the accumulators, its units dealt to the devices.

        Args:
            batch: the units.
            clip_norm: C of this update, where it changes; `Clipping.clip_norm` if None. All
                micro-batches of an update must have the same.
        """
        if clip_norm is None:
            clip_norm = math.inf if self._clipping is None else self._clipping.clip_norm
        n = self.devices
        shares = [np.split(array, n) for array in batch.arrays()]

        def of_device(context: Any) -> tuple[Tensor, ...]:
            return tuple(tf.constant(s[context.replica_id_in_sync_group]) for s in shares)

        values = self._strategy.experimental_distribute_values_from_function(of_device)
        self._add(values, tf.constant(clip_norm, tf.float32))

    def move(self, *, t: int, rate: float, divisor: float, noise: UpdateNoise | None) -> None:
        """Make update t (from 0) from the accumulators, and empty them.

        Args:
            t: number of the update.
            rate: learning rate.
            divisor: what the sums are divided by: the EXPECTED batch when training is private.
            noise: of this update; None adds none.
        """
        scalars = [tf.constant(x, tf.float32) for x in (rate, t + 1)]
        if noise is None:
            self._move_by_totals(*scalars, tf.constant(divisor, tf.float32))
        else:
            self._move(*scalars, noised_means(self._totals(), noise, divisor))

    def read_tallies(self) -> Tallies:
        """Return the counts since the last reading."""
        loss, units, clipped = self._read().numpy()
        return Tallies(float(loss), round(float(units)), round(float(clipped)))

    def noised_below(self, noise: float) -> float:
        """Return Σ (1{norm ≤ C} − ½) over the units since the last call, plus `noise`.

        What adaptive clipping learns C from (Andrew et al. 2021, arXiv:1905.03871, eq. 1 and
        remark 4 of section 2.3): one unit moves it by ½. The sum is exact for under 2²³ units.

        Args:
            noise: one draw with the plan's standard deviation for this count.
        """
        return float(self._take_below().numpy()) + noise

    def weights(self) -> Arrays:
        """Return the weights as arrays."""
        return {n: v.numpy() for n, v in self._weights.items()}

    def state(self) -> Arrays:
        """Return everything a checkpoint needs, between two updates."""
        return (
            self.weights()
            | {_MEAN + n: v.numpy() for n, v in self._means.items()}
            | {_SQUARE + n: v.numpy() for n, v in self._squares.items()}
        )

    def restore(self, state: Mapping[str, NDArray[np.float32]]) -> None:
        """Set what `state` returned."""
        for n in self.names:
            self._weights[n].assign(state[n])
            self._means[n].assign(state[_MEAN + n])
            self._squares[n].assign(state[_SQUARE + n])

    def _add_everywhere(self, batch: tuple[Any, ...], clip_norm: Tensor) -> None:
        self._strategy.run(self._add_here, args=(clip_norm, *batch))

    def _add_here(
        self,
        clip_norm: Tensor,
        ids: Tensor,
        lengths: Tensor,
        positions: Tensor,
        labels: Tensor,
        weights: Tensor,
        shares: Tensor,
    ) -> None:
        batch = (ids, lengths, positions, labels, weights, shares)
        unit_losses = UnitBatch(self._row_losses, self._config, batch)
        real = tf.reduce_sum(shares, axis=1) > 0  # (U,) padding is no unit
        sums, losses, norms = self._gradient_sums(unit_losses, ids.shape[0], clip_norm)
        for name in self.names:
            self._sums[name].assign_add(sums[name])
        below = norms <= clip_norm
        tallies = (tf.where(real, losses, 0.0), real, tf.logical_and(real, ~below))
        self._tallies.assign_add(tf.stack([tf.reduce_sum(tf.cast(x, tf.float32)) for x in tallies]))
        self._below.assign_add(tf.reduce_sum(tf.where(real, tf.cast(below, tf.float32) - 0.5, 0.0)))

    def _gradient_sums(
        self, unit_losses: UnitBatch, units: int, clip_norm: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        if self._clipping is None:
            return ordinary_sum(unit_losses, self._weights, units, self._precision)
        clipped = self._engine(
            unit_losses,
            self._weights,
            units,
            clip_norm,
            factors_of=self._factors,
            precision=self._precision,
        )
        return clipped.sums, clipped.losses, clipped.norms

    def _take(self, counts: Any) -> Tensor:
        # With one device, `reduce` answers with the variable itself: copy it before emptying it.
        total = tf.identity(self._strategy.reduce("SUM", counts, axis=None))
        with tf.control_dependencies([total]):
            self._strategy.run(lambda: counts.assign(tf.zeros_like(total)))
        return total

    def _added_up(self) -> dict[str, Tensor]:
        with tf.device("/cpu:0"):
            return {
                name: tf.identity(self._strategy.reduce("SUM", self._sums[name], axis=None))
                for name in self.names
            }

    def _move_without_noise(self, rate: Tensor, step: Tensor, divisor: Tensor) -> None:
        sums = {n: self._strategy.reduce("SUM", self._sums[n], axis=None) for n in self.names}
        self._move_everywhere(rate, step, {name: total / divisor for name, total in sums.items()})

    def _move_everywhere(self, rate: Tensor, step: Tensor, gradients: dict[str, Tensor]) -> None:
        for name in self.names:
            arguments = (self._means[name], self._squares[name], gradients[name])
            self._strategy.extended.update(
                self._weights[name], self._mover(name, rate, step), args=arguments
            )
        self._strategy.run(self._empty)

    def _mover(self, name: str, rate: Tensor, step: Tensor) -> Callable[..., None]:
        def move(weight: Any, mean: Any, square: Any, gradient: Tensor) -> None:
            self._optimizer.apply(name, weight, mean, square, gradient, rate, step)

        return move

    def _empty(self) -> None:
        for name in self.names:
            self._sums[name].assign(tf.zeros_like(self._sums[name]))


def _accumulator(shape: tuple[int, ...]) -> Any:
    """Return a variable of which every device has its own, added up when read."""
    return tf.Variable(
        np.zeros(shape, np.float32),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
