"""The compiled half of training: gradient sums of micro-batches, then one update.

Each device adds the sums of its micro-batches to its own accumulators; an update adds them across
devices, adds the noise ONCE, divides, and moves the weights. With noise keyed by variable and
update alone, the layout (devices, micro-batches) cannot change what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.bert.config import BertConfig
from dp_core.bert.heads import mlm_row_losses
from dp_core.bert.layers import Layers, Tensor
from dp_core.bert.parameters import Arrays
from dp_core.privacy.clipping.engine import clipped_sum
from dp_core.training.adamw import AdamW
from dp_core.training.noise_blocks import Keys, NoiseBlocks
from dp_core.training.rows import MicroBatch

_MEAN, _SQUARE = "adam-mean/", "adam-square/"
_TALLIES = 3  # sum of unit losses, units, clipped units


@dataclass(frozen=True)
class Clipping:
    """What makes a step private: `noise_stddev` is that of one draw, in units of the sum."""

    clip_norm: float
    noise_stddev: float


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
        clipping: clip and noise; None trains without privacy.
    """

    def __init__(
        self,
        strategy: Any,
        config: BertConfig,
        parameters: Arrays,
        optimizer: AdamW,
        clipping: Clipping | None,
    ) -> None:
        self._strategy, self._config = strategy, config
        self._optimizer, self._clipping = optimizer, clipping
        self.names = list(parameters)
        self.noise = NoiseBlocks({n: a.shape for n, a in parameters.items()})
        with strategy.scope():
            self._weights = {n: tf.Variable(a, name=n) for n, a in parameters.items()}
            self._means = {n: tf.Variable(np.zeros_like(a)) for n, a in parameters.items()}
            self._squares = {n: tf.Variable(np.zeros_like(a)) for n, a in parameters.items()}
            self._sums = {n: _accumulator(a.shape) for n, a in parameters.items()}
            self._tallies = _accumulator((_TALLIES,))
        self._add = tf.function(self._add_everywhere, autograph=False)
        self._move = tf.function(self._move_everywhere, autograph=False)
        self._read = tf.function(self._read_everywhere, autograph=False)

    @property
    def devices(self) -> int:
        """Number of devices that share a micro-batch."""
        return int(self._strategy.num_replicas_in_sync)

    def add(self, batch: MicroBatch) -> None:
        """Add a micro-batch's gradients to the accumulators, its units dealt to the devices."""
        n = self.devices
        shares = [np.split(array, n) for array in batch.arrays()]

        def of_device(context: Any) -> tuple[Tensor, ...]:
            return tuple(tf.constant(s[context.replica_id_in_sync_group]) for s in shares)

        self._add(self._strategy.experimental_distribute_values_from_function(of_device))

    def move(self, *, t: int, rate: float, divisor: float, keys: Keys | None) -> None:
        """Make update t (from 0) from the accumulators, and empty them.

        Args:
            t: number of the update.
            rate: learning rate.
            divisor: what the sums are divided by: the EXPECTED batch when training is private.
            keys: from `noise.keys`; None draws no noise.
        """
        scalars = [tf.constant(x, tf.float32) for x in (rate, t + 1, divisor)]
        self._move(*scalars, None if keys is None else tf.constant(keys))

    def read_tallies(self) -> Tallies:
        """Return the counts since the last reading."""
        loss, units, clipped = self._read().numpy()
        return Tallies(float(loss), round(float(units)), round(float(clipped)))

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

    def _add_everywhere(self, batch: tuple[Any, ...]) -> None:
        self._strategy.run(self._add_here, args=batch)

    def _add_here(
        self,
        ids: Tensor,
        lengths: Tensor,
        positions: Tensor,
        labels: Tensor,
        weights: Tensor,
        shares: Tensor,
    ) -> None:
        u, r, s = ids.shape
        k = positions.shape[2]

        def unit_losses(layers: Layers) -> Tensor:
            losses = mlm_row_losses(
                layers,
                self._config,
                tf.reshape(ids, (u * r, s)),
                tf.reshape(lengths, (u * r,)),
                tf.reshape(positions, (u * r, k)),
                tf.reshape(labels, (u * r, k)),
                tf.reshape(weights, (u * r, k)),
            )
            return tf.reduce_sum(tf.reshape(losses, (u, r)) * shares, axis=1)  # (U,)

        real = tf.reduce_sum(shares, axis=1) > 0  # (U,) padding is no unit
        sums, losses, clipped = self._gradient_sums(unit_losses, u)
        for name in self.names:
            self._sums[name].assign_add(sums[name])
        tallies = (tf.where(real, losses, 0.0), real, tf.logical_and(real, clipped))
        self._tallies.assign_add(tf.stack([tf.reduce_sum(tf.cast(x, tf.float32)) for x in tallies]))

    def _gradient_sums(
        self, unit_losses: Callable[[Layers], Tensor], units: int
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        if self._clipping is None:
            return ordinary_sum(unit_losses, self._weights, units)
        clip_norm = self._clipping.clip_norm
        clipped = clipped_sum(unit_losses, self._weights, units, clip_norm)
        return clipped.sums, clipped.losses, clipped.norms > clip_norm

    def _read_everywhere(self) -> Tensor:
        # With one device, `reduce` answers with the variable itself: copy it before emptying it.
        total = tf.identity(self._strategy.reduce("SUM", self._tallies, axis=None))
        with tf.control_dependencies([total]):
            self._strategy.run(lambda: self._tallies.assign(tf.zeros((_TALLIES,))))
        return total

    def _move_everywhere(
        self, rate: Tensor, step: Tensor, divisor: Tensor, keys: Tensor | None
    ) -> None:
        totals = {n: self._strategy.reduce("SUM", self._sums[n], axis=None) for n in self.names}
        if keys is not None and self._clipping is not None:
            noise = self.noise.draw(keys, self._clipping.noise_stddev)
            totals = {name: total + noise[name] for name, total in totals.items()}
        for name, total in totals.items():
            arguments = (self._means[name], self._squares[name], total / divisor)
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


def ordinary_sum(
    unit_losses: Callable[[Layers], Tensor], parameters: Mapping[str, Any], units: int
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the plain gradient of the summed losses, the losses (U,), and that none is clipped."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(list(parameters.values()))
        losses = unit_losses(Layers(parameters))
        total = tf.reduce_sum(losses)
    gradients = tape.gradient(total, list(parameters.values()))
    dense = [tf.convert_to_tensor(g) for g in gradients]
    return dict(zip(parameters, dense, strict=True)), losses, tf.zeros((units,), tf.bool)


def _accumulator(shape: tuple[int, ...]) -> Any:
    """Return a variable of which every device has its own, added up when read."""
    return tf.Variable(
        np.zeros(shape, np.float32),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
