"""Evaluation of language models: accuracy under masks, and perplexity."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.data.token_store import TokenStore
from dp_core.errors import BadInput
from dp_core.models.bert import mlm_logits
from dp_core.models.causal import causal_row_losses
from dp_core.models.config import CausalConfig
from dp_core.models.parameters import AnyModel, Bert, Model
from dp_core.nn.layers import Layers, Tensor
from dp_core.training.batches import masked_examples, micro_batch, row_keys
from dp_core.training.objectives import causal_examples

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
    unit_of = np.repeat(np.arange(store.n_units), np.diff(store.unit_rows))
    rows = _chosen(store, seed, max_rows)
    first_guess_is_right = _first_guesses(Model(model.config, model.parameters))
    correct = predicted = 0.0
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[start : start + _ROWS_AT_ONCE]
        keys = row_keys(store, unit_of[part], part[:, None], seed, 0)
        real = np.ones((len(part), 1), np.bool_)
        batch = micro_batch(store, part[:, None], real, keys, _ROWS_AT_ONCE, masked_examples)
        weights = batch.weights[:, 0]
        arrays = (batch.ids, batch.lengths, batch.positions, batch.labels)
        hits = first_guess_is_right(*(tf.constant(a[:, 0]) for a in arrays)).numpy()
        correct += float((hits.reshape(weights.shape) * weights).sum())
        predicted += float(weights.sum())
    return correct / predicted if predicted else 0.0


def perplexity(
    model: AnyModel,
    store: TokenStore,
    *,
    seed: int,
    max_rows: int = 1024,
    continuation: NDArray[np.bool_] | None = None,
) -> float:
    """Return exp(mean cross-entropy) of the next piece, over the ordinary pieces of held-out rows.

    Markers and unknown pieces are not predicted (`objective.causal_examples`), so report the share
    of unknown pieces as well. Perplexity depends on the vocabulary: short pieces are easier to
    predict. With `continuation` the same sum is divided by the number of words, which makes
    vocabularies comparable. On private rows the result is an `operator` number.

    Args:
        model: a causal model.
        store: rows that did not train the model.
        seed: public; chooses at most `max_rows` rows.
        max_rows: limits the computing time.
        continuation: (V,) true for pieces that continue a word; None counts pieces.

    Returns:
        1 or more, possibly infinite; NaN without predictions, or if a loss is NaN.

    Raises:
        BadInput: the model is not causal.
    """
    if not isinstance(model.config, CausalConfig):
        raise BadInput("a masked model has no perplexity", fix="Measure its MLM accuracy.")
    rows = _chosen(store, seed, max_rows)
    mean_losses = _row_losses(model)
    total = predicted = 0.0
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = np.resize(rows[start : start + _ROWS_AT_ONCE], _ROWS_AT_ONCE)  # one shape
        real = np.arange(_ROWS_AT_ONCE) < len(rows) - start
        made = causal_examples(store, part, np.zeros(len(part), np.uint64))
        weights = made.weights * real[:, None]
        arrays = (made.input_ids, store.lengths[part], made.positions, made.labels, weights)
        means = mean_losses(*(tf.constant(a) for a in arrays)).numpy().astype(np.float64)
        total += float((means * weights.sum(1)).sum())
        counted = weights if continuation is None else weights * ~continuation[made.labels]
        predicted += float(counted.sum())
    return float(np.exp(np.float64(total) / predicted)) if predicted else float("nan")


def _chosen(store: TokenStore, seed: int, max_rows: int) -> NDArray[np.int64]:
    return np.sort(np.random.default_rng(seed).permutation(store.n_rows)[:max_rows])


def _row_losses(model: AnyModel) -> Callable[..., Tensor]:
    parameters = {name: tf.constant(value) for name, value in model.parameters.items()}
    losses = partial(causal_row_losses, Layers(parameters), model.config)
    compiled: Callable[..., Tensor] = tf.function(losses, autograph=False)
    return compiled


def _first_guesses(model: Bert) -> Callable[..., Tensor]:
    parameters = {name: tf.constant(value) for name, value in model.parameters.items()}

    def right(ids: Tensor, lengths: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        logits = mlm_logits(Layers(parameters), model.config, ids, lengths, positions)
        guesses = tf.argmax(logits, axis=1, output_type=tf.int32)  # (M·K,)
        return tf.cast(guesses == tf.reshape(labels, (-1,)), tf.float32)

    compiled: Callable[..., Tensor] = tf.function(right, autograph=False)
    return compiled
