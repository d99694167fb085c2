"""Training objectives: predictions of rows, losses by unit, their gradient, and their evaluation.

Masked models are evaluated by their accuracy under masks, causal models by their perplexity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from dp_core.errors import BadInput
from dp_core.models.bert import mlm_logits, mlm_row_losses
from dp_core.models.causal import causal_row_losses
from dp_core.models.config import CausalConfig
from dp_core.models.parameters import AnyModel, ModelConfig
from dp_core.nn import Layers, RowLosses, Tensor
from dp_core.training.batches import Examples, Indices, masked_examples, row_keys

# ids, lengths, positions, labels, weights, shares, and keys for dropout: each (U, R, ...)
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class UnitBatch:
    """U units of R rows. A unit's loss is the sum of its rows' losses, weighted by their shares."""

    row_losses: RowLosses
    config: ModelConfig
    batch: Batch
    dropout: float = 0.0

    def __call__(self, layers: Layers) -> Tensor:
        """Layers -> (U,)."""
        *arrays, shares = self.batch[:6]
        units, rows = shares.shape
        if self.dropout:
            layers.drop(self.dropout, tf.reshape(self.batch[6], (units * rows,)))
        flat = [tf.reshape(array, (units * rows, *array.shape[2:])) for array in arrays]
        losses = self.row_losses(layers, self.config, *flat)  # (U·R,)
        return tf.reduce_sum(tf.reshape(losses, (units, rows)) * shares, axis=1)


def ordinary_sum(
    unit_losses: Callable[[Layers], Tensor],
    parameters: Mapping[str, Any],
    precision: str = "float32",
    frozen: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the plain gradient of the summed losses, and the losses (U,).

    The gradient is by `parameters`; parameters in `frozen` are only read.
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
    return sums, losses


class _LookupsApart(Layers):
    """Layers that differentiate word lookups by position instead of by table.

    Automatic differentiation would build a second gradient as large as the table and add the two.
    Adding rows in place to the output projection's gradient costs only as much as the rows.
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
        y = Layers(fixed).embed(ids, types, word, position, kind)
        self._tape.watch(y)
        name = f"lookup {len(self.read)} of {word}"
        self.lookups[name], self.read[name] = y, (word, ids)
        return y


Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Objective:
    """A training objective over the rows of a token store.

    name: name in logs and in the run's identity.
    examples: (store, row numbers (M,), row keys (M,)) -> inputs and predictions, in NumPy. The
        example of a row depends only on that row and its key.
    row_losses: losses in TensorFlow. It reads parameters through the layers and never divides
        by a property of the batch.
    masks: whether `examples` draws masks by the keys; otherwise copies of a row are identical.
    continuation: flags of word continuations for masking whole words, or None.
    """

    name: str
    examples: Examples
    row_losses: RowLosses
    masks: bool = False
    continuation: Flags | None = field(default=None, repr=False, compare=False)


def objective_for(config: ModelConfig, continuation: Flags | None = None) -> Objective:
    """Return the objective of a model's architecture: masked or next pieces.

    BERT predicts 15% of the pieces from both sides (Devlin et al. 2019), a causal model every
    ordinary piece from its left (Radford et al. 2019).

    Args:
        config: the model's shape.
        continuation: (V,) true for pieces that continue a word, to mask whole words; see
            `continuation_tokens`. None masks single pieces. Causal models ignore it.
    """
    if isinstance(config, CausalConfig):
        return Objective("causal-lm", causal_examples, causal_row_losses)
    examples = partial(masked_examples, continuation=continuation)
    return Objective("masked-lm", examples, mlm_row_losses, masks=True, continuation=continuation)


def causal_examples(store: TokenStore, rows: Indices, keys: U64) -> MaskedRows:
    """Predict at each position the next piece.

    Row markers and unknown pieces are read but not predicted, as under masks. The positions of the
    markers follow from the row's length, and predicting unknown pieces would reward ignorance.

    Args:
        store: the rows.
        rows: (M,) row numbers.
        keys: (M,) unused: nothing here is random.

    Returns:
        K = S − 1 predictions of each row; predictions beyond its length have weight 0.
    """
    ids = store.tokens[rows].astype(np.int32)  # (M, S)
    labels = ids[:, 1:]
    predicted = np.arange(1, ids.shape[1])[None, :] < store.lengths[rows][:, None]
    predicted &= ~np.isin(labels, SpecialIds().as_tuple())
    positions = np.broadcast_to(np.arange(labels.shape[1], dtype=np.int32), labels.shape)
    return MaskedRows(ids, positions, np.where(predicted, labels, 0), predicted.astype(np.float32))


_ROWS_AT_ONCE = 64


def mlm_accuracy(model: AnyModel, store: TokenStore, *, seed: int, max_rows: int = 1024) -> float:
    """Return the share of masked pieces that the model predicts correctly with its first guess.

    Rows and masks are a function of the store and the public seed, so all models are compared on
    the same predictions. On private rows the result is an `operator` number.

    Args:
        model: model with its MLM head.
        store: rows that did not train the model.
        seed: public; chooses at most `max_rows` rows, and the masks.
        max_rows: limits the computing time.

    Raises:
        BadInput: the model is causal and cannot fill in masks.
    """
    if isinstance(model.config, CausalConfig):
        raise BadInput("a causal model has no MLM accuracy", fix="Measure its perplexity.")
    correct = predicted = 0.0
    made = _evaluated(model, store, seed, max_rows, masked_examples, _hits)
    for weights, hits in made:
        correct += float((hits * weights).sum())
        predicted += float(weights.sum())
    return correct / predicted if predicted else 0.0


def perplexity(model: AnyModel, store: TokenStore, *, seed: int, max_rows: int = 1024) -> float:
    """Return exp(mean cross-entropy) of the next piece, over the ordinary pieces of held-out rows.

    Markers and unknown pieces are not predicted (`causal_examples`), so report the share
    of unknown pieces as well. Perplexity depends on the vocabulary: short pieces are easier to
    predict. On private rows the result is an `operator` number.

    Args:
        model: a causal model.
        store: rows that did not train the model.
        seed: public; chooses at most `max_rows` rows.
        max_rows: limits the computing time.

    Returns:
        1 or more, possibly infinite; NaN without predictions, or if a loss is NaN.

    Raises:
        BadInput: the model is not causal.
    """
    if not isinstance(model.config, CausalConfig):
        raise BadInput("a masked model has no perplexity", fix="Measure its MLM accuracy.")
    total = predicted = 0.0
    made = _evaluated(model, store, seed, max_rows, causal_examples, causal_row_losses)
    for weights, means in made:
        total += float((means.astype(np.float64) * weights.sum(1)).sum())
        predicted += float(weights.sum())
    return float(np.exp(np.float64(total) / predicted)) if predicted else float("nan")


def _hits(layers: Layers, config: Any, *row: Tensor) -> Tensor:
    """Return 1 where the first guess is the label: (M, K)."""
    *inputs, labels, _ = row
    logits = mlm_logits(layers, config, *inputs)
    guesses = tf.argmax(logits, axis=1, output_type=tf.int32)  # (M·K,)
    return tf.cast(tf.reshape(guesses, tf.shape(labels)) == labels, tf.float32)


def _evaluated(
    model: AnyModel,
    store: TokenStore,
    seed: int,
    max_rows: int,
    examples: Examples,
    values_of: RowLosses,
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Yield weights and values of at most `max_rows` rows, in batches of one shape."""
    layers = Layers({name: tf.constant(value) for name, value in model.parameters.items()})
    compiled = tf.function(partial(values_of, layers, model.config), autograph=False)
    unit_of = np.repeat(np.arange(store.n_units), np.diff(store.unit_rows))
    rows = np.sort(np.random.default_rng(seed).permutation(store.n_rows)[:max_rows])
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = np.resize(rows[start : start + _ROWS_AT_ONCE], _ROWS_AT_ONCE)
        made = examples(store, part, row_keys(store, unit_of[part], part[:, None], seed, 0)[:, 0])
        real = np.arange(_ROWS_AT_ONCE) < len(rows) - start
        weights = made.weights * real[:, None].astype(np.float32)
        lengths = store.lengths[part].astype(np.int32)
        arrays = (made.input_ids, lengths, made.positions, made.labels, weights)
        yield weights, compiled(*(tf.constant(a) for a in arrays)).numpy()
