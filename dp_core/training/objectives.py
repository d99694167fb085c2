"""Training objectives: what rows ask of a model, its losses by unit, and their gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.data.hashing import U64
from dp_core.data.masking import MaskedRows
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds
from dp_core.models.bert import mlm_row_losses
from dp_core.models.causal import causal_row_losses
from dp_core.models.config import CausalConfig
from dp_core.models.parameters import ModelConfig
from dp_core.nn.layers import Layers, RowLosses, Tensor, embedding_sum
from dp_core.training.batches import Examples, Indices, masked_examples

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
    frozen: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the plain gradient of the summed losses, the losses (U,), and zeros for norms (U,).

    It is by `parameters` alone; `frozen` ones are read.
    """
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(list(parameters.values()))
        layers = _LookupsApart(parameters, tape, precision, frozen)
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

    def __init__(
        self,
        parameters: Mapping[str, Any],
        tape: tf.GradientTape,
        precision: str,
        frozen: Mapping[str, Any] | None,
    ):
        super().__init__({**(frozen or {}), **parameters}, precision)
        self._tape, self._trained = tape, frozenset(parameters)
        self.lookups: dict[str, Tensor] = {}  # name of a lookup -> (M, S, D)
        self.read: dict[str, tuple[str, Tensor]] = {}  # name of a lookup -> table, ids

    def embed(
        self, ids: Tensor, types: Tensor | None, word: str, position: str | None, kind: str | None
    ) -> Tensor:
        """As in `Layers`."""
        if word not in self._trained:
            return super().embed(ids, types, word, position, kind)
        fixed = {**self._parameters, word: tf.stop_gradient(self._parameters[word])}
        y = embedding_sum(fixed, ids, types, word, position, kind)
        self._tape.watch(y)
        name = f"lookup {len(self.read)} of {word}"
        self.lookups[name], self.read[name] = y, (word, ids)
        return y


Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Objective:
    """A training objective over the rows of a token store.

    Attributes:
        name: for logs, and for telling runs apart.
        examples: (store, row numbers (M,), row keys (M,)) -> inputs and predictions, in NumPy. Each
            row's is a function of that row and its key alone.
        row_losses: in TensorFlow; reads parameters through the layers, and divides by nothing of
            the batch.
        masks: whether `examples` draws masks by the keys: else copies of a row would be the same.
        continuation: the flags by which whole words are masked, if they are.
    """

    name: str
    examples: Examples
    row_losses: RowLosses
    masks: bool = False
    continuation: Flags | None = field(default=None, repr=False, compare=False)


def objective_for(config: ModelConfig, continuation: Flags | None = None) -> Objective:
    """Return what a model of this architecture is trained on: masked or next pieces.

    `continuation` is as in `masked_lm`; a causal model does without.
    """
    return causal_lm() if isinstance(config, CausalConfig) else masked_lm(continuation)


def masked_lm(continuation: Flags | None = None) -> Objective:
    """BERT's: 15% of the pieces, by what stands on both sides (Devlin et al. 2019).

    Args:
        continuation: (V,) true for pieces that go on with a word, to mask whole words; see
            `wordpiece.continuation_tokens`. None masks pieces one by one.
    """
    examples = partial(masked_examples, continuation=continuation)
    return Objective("masked-lm", examples, mlm_row_losses, masks=True, continuation=continuation)


def causal_lm() -> Objective:
    """GPT-2's: every ordinary piece, by what stands before it (Radford et al. 2019)."""
    return Objective("causal-lm", causal_examples, causal_row_losses)


def causal_examples(store: TokenStore, rows: Indices, keys: U64) -> MaskedRows:
    """Ask each place for the piece after it.

    The markers of rows and unknown pieces are read but not predicted, as under a mask: the first
    stand at places that the row's length gives away, the second would reward not knowing.

    Args:
        store: the rows.
        rows: (M,) row numbers.
        keys: (M,) unused: nothing here is random.

    Returns:
        K = S − 1 predictions of each row, those beyond its length of weight 0.
    """
    ids = store.tokens[rows].astype(np.int32)  # (M, S)
    labels = ids[:, 1:]
    asked = np.arange(1, ids.shape[1])[None, :] < store.lengths[rows][:, None]
    asked &= ~np.isin(labels, SpecialIds().as_tuple())
    positions = np.broadcast_to(np.arange(labels.shape[1], dtype=np.int32), labels.shape)
    return MaskedRows(ids, positions, np.where(asked, labels, 0), asked.astype(np.float32))
