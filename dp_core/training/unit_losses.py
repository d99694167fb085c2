"""A micro-batch on one device as losses by unit, and their ordinary gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dp_core.bert.layers import Layers, Tensor, embedding_sum
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
        layers = _LookupsApart(parameters, tape, precision)
        losses = unit_losses(layers)
        total = tf.reduce_sum(losses)
    sources = {**parameters, **layers.lookups}
    zero = tf.UnconnectedGradients.ZERO
    gradients = tape.gradient(total, list(sources.values()), unconnected_gradients=zero)
    sums = {n: tf.convert_to_tensor(g) for n, g in zip(sources, gradients, strict=True)}
    for lookup, (word, ids) in layers.read.items():
        rows = tf.reshape(sums.pop(lookup), (-1, sums[word].shape[1]))  # (M·S, D)
        sums[word] = tf.tensor_scatter_nd_add(sums[word], tf.reshape(ids, (-1, 1)), rows)
    return sums, losses, tf.zeros((units,))


class _LookupsApart(Layers):
    """Layers whose word lookups are differentiated by place, not by table.

    Differentiation would make a second gradient as large as the table and add the two; rows added
    to the output projection's in place cost what the rows do.
    """

    def __init__(self, parameters: Mapping[str, Any], tape: tf.GradientTape, precision: str):
        super().__init__(parameters, precision)
        self._tape = tape
        self.lookups: dict[str, Tensor] = {}  # name of a lookup -> (M, S, D)
        self.read: dict[str, tuple[str, Tensor]] = {}  # name of a lookup -> table, ids

    def embed(
        self, ids: Tensor, types: Tensor | None, word: str, position: str, kind: str | None
    ) -> Tensor:
        """As in `Layers`."""
        fixed = {**self._parameters, word: tf.stop_gradient(self._parameters[word])}
        y = embedding_sum(fixed, ids, types, word, position, kind)
        self._tape.watch(y)
        name = f"lookup {len(self.read)} of {word}"
        self.lookups[name], self.read[name] = y, (word, ids)
        return y
