"""A micro-batch on one device as losses by unit, and their ordinary gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dp_core.bert.layers import Layers, Tensor
from dp_core.bert.parameters import ModelConfig

# (layers, config, ids, lengths, positions, labels, weights) -> (M,), as `heads.mlm_row_losses`
RowLosses = Callable[..., Tensor]
Batch = tuple[Tensor, ...]  # ids, lengths, positions, labels, weights, shares: each (U, R, ...)


@dataclass(frozen=True)
class UnitBatch:
    """U units of R rows; a unit's loss is the sum of its rows', each by its share."""

    row_losses: RowLosses
    config: ModelConfig
    batch: Batch

    def __call__(self, layers: Layers) -> Tensor:
        """Layers -> (U,)."""
        *arrays, shares = self.batch
        units, rows = shares.shape
        flat = [tf.reshape(array, (units * rows, *array.shape[2:])) for array in arrays]
        losses = self.row_losses(layers, self.config, *flat)  # (U·R,)
        return tf.reduce_sum(tf.reshape(losses, (units, rows)) * shares, axis=1)

    def of_unit(self, unit: Tensor) -> UnitBatch:
        """Scalar index -> that unit alone."""
        alone = tuple(array[unit][None] for array in self.batch)
        return UnitBatch(self.row_losses, self.config, alone)


def ordinary_sum(
    unit_losses: Callable[[Layers], Tensor],
    parameters: Mapping[str, Any],
    units: int,
    precision: str = "float32",
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the plain gradient of the summed losses, the losses (U,), and zeros for norms (U,)."""
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(list(parameters.values()))
        losses = unit_losses(Layers(parameters, precision))
        total = tf.reduce_sum(losses)
    gradients = tape.gradient(total, list(parameters.values()))
    dense = [tf.convert_to_tensor(g) for g in gradients]
    return dict(zip(parameters, dense, strict=True)), losses, tf.zeros((units,))
