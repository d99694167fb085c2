"""Observations for membership attacks: losses under fresh masks, attention, and gradients.

The signals follow Jagannatha et al. 2021, section 4.1, and Min-K%++ (Zhang et al. 2024,
arXiv:2404.02936). Shapes: n rows, M rows at a time, S tokens, K predictions, H heads, V tokens of
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.data.hashing import U64
from dp_core.data.masking import MaskedRows
from dp_core.data.token_store import TokenStore
from dp_core.models.bert import encode, mlm_logits
from dp_core.models.causal import causal_logits
from dp_core.models.config import CausalConfig
from dp_core.models.parameters import AnyModel
from dp_core.nn import Layers, Tensor, Variables
from dp_core.privacy.clipping.book_keeping import layer_squared_norms
from dp_core.training.batches import row_keys
from dp_core.training.objectives import Objective, UnitBatch, objective_for

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

LOWEST = 0.2  # Min-K%: the share of a row's predictions that is averaged
_PERCENTILES = (5, 50, 95)  # features of a row's concentrations, in addition to the mean
_ROWS_AT_ONCE, _GRADIENTS_AT_ONCE = 64, 16
_LEAST_VARIANCE = 1e-12  # lower bound on the variance of a prediction's log-probabilities


@dataclass(frozen=True)
class Rows:
    """Rows of a store, and the source of their masks.

    Attributes:
        store: the store that holds the rows.
        numbers: (n,) row numbers.
        coins: public seed of the masks, which no training uses.
        masks: number of masks of each row to average over; ignored for a causal model.
    """

    store: TokenStore
    numbers: Indices
    coins: int
    masks: int

    def keys(self, rows: Indices, draw: int) -> U64:
        """Return the mask keys of rows (M,), different for each row and each draw."""
        units = np.searchsorted(self.store.unit_rows, rows, side="right") - 1
        return row_keys(self.store, units, rows[:, None], self.coins, draw)[:, 0]


@dataclass(frozen=True)
class Losses:
    """Black-box signals: (n,) each, lower for rows that the model predicts better.

    Attributes:
        mean: mean cross-entropy over a row's predictions under all masks, in nats.
        lowest: negated Min-K%++ over the same predictions.
    """

    mean: Floats
    lowest: Floats


def losses(model: AnyModel, rows: Rows) -> Losses:
    """Return the losses of each row's predictions, averaged over fresh masks."""
    predict = _token_statistics(model)
    objective = objective_for(model.config)
    draws = rows.masks if objective.masks else 1
    means, lowest = np.zeros(len(rows.numbers)), np.zeros(len(rows.numbers))
    for start, part in _parts(rows.numbers, _ROWS_AT_ONCE):
        nats, standard, weights = [], [], []
        for draw in range(draws):
            made = objective.examples(rows.store, part, rows.keys(part, draw))
            arrays = (made.input_ids, rows.store.lengths[part], made.positions, made.labels)
            found = predict(*(tf.constant(a) for a in arrays))
            nats.append(found[0].numpy().reshape(made.weights.shape))
            standard.append(found[1].numpy().reshape(made.weights.shape))
            weights.append(made.weights)
        asked = np.concatenate(weights, axis=1).astype(np.float64)  # (M, draws·K)
        end = min(start + _ROWS_AT_ONCE, len(means))
        kept = end - start
        means[start:end] = _weighted_means(np.concatenate(nats, axis=1), asked)[:kept]
        lowest[start:end] = -min_k(np.concatenate(standard, axis=1), asked)[:kept]
    return Losses(means, lowest)


def _weighted_means(values: Floats, weights: Floats) -> Floats:
    result: Floats = (values * weights).sum(1) / np.maximum(weights.sum(1), 1.0)
    return result


def min_k(values: Floats, weights: Floats, share: float = LOWEST) -> Floats:
    """Return the mean of each row's lowest values: ⌊share · predictions⌋ values, at least one.

    Args:
        values: (M, K) one value for each prediction.
        weights: (M, K), 0 for padding.
        share: share of the predictions to average over.
    """
    asked = np.where(weights > 0, values, np.inf)
    count = np.maximum(1, (weights.sum(1) * share).astype(np.int64))  # (M,)
    taken = np.arange(values.shape[1])[None, :] < count[:, None]
    taken &= weights.sum(1, keepdims=True) > 0  # no predictions, mean 0
    lowest = np.where(taken, np.sort(asked, axis=1), 0.0)
    means: Floats = lowest.sum(1) / count
    return means


def _token_statistics(model: AnyModel) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a compiled function of (ids, lengths, positions, labels): two (M·K,) statistics.

    They are the cross-entropy of each prediction, and its log-probability standardised by the mean
    and σ of log-probabilities under the model: (ln p − Σ pᵥ ln pᵥ) / σ (Zhang et al. 2024, eq. 3).
    """
    layers, config = _layers(model), model.config

    def statistics(
        ids: Tensor, lengths: Tensor, positions: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        if isinstance(config, CausalConfig):
            logits = causal_logits(layers, config, ids[:, :-1])  # (M·(S − 1), V)
        else:
            logits = mlm_logits(layers, config, ids, lengths, positions)  # (M·K, V)
        logs = tf.nn.log_softmax(logits)
        own = tf.gather(logs, tf.reshape(labels, (-1,)), batch_dims=1)  # (M·K,)
        chances = tf.exp(logs)
        mean = tf.reduce_sum(chances * logs, axis=1)
        variance = tf.reduce_sum(chances * tf.square(logs - mean[:, None]), axis=1)
        return -own, (own - mean) / tf.sqrt(tf.maximum(variance, _LEAST_VARIANCE))

    compiled: Callable[..., tuple[Tensor, Tensor]] = tf.function(statistics, autograph=False)
    return compiled


class _WatchedAttention(Layers):
    """Layers that record each block's attention concentration: (M, H, queries)."""

    def __init__(self, parameters: Variables) -> None:
        super().__init__(parameters)
        self.concentrations: list[Tensor] = []

    def attention_weights(self, name: str, scores: Tensor) -> Tensor:
        """Return the weights of `Layers`, and record C(a) = Σ aᵢ ln aᵢ of every query."""
        weights = super().attention_weights(name, scores)
        self.concentrations.append(tf.reduce_sum(tf.math.xlogy(weights, weights), axis=-1))
        return weights


def attention_features(model: AnyModel, rows: Rows) -> Floats:
    """Return the attention concentration of each row, by head: (n, layers · H · 4).

    Every token's attention has the concentration C(a) = Σ aᵢ ln aᵢ, in nats. The features are its
    mean, median, and 5th and 95th percentiles over the row's tokens (Jagannatha et al. 2021,
    equation 3). Rows are read under one fresh mask.
    """
    objective, config = objective_for(model.config), model.config

    def concentrations(ids: Tensor, lengths: Tensor) -> Tensor:
        layers = _WatchedAttention(_constants(model))
        if isinstance(config, CausalConfig):
            causal_logits(layers, config, ids, tf.zeros_like(ids[:, :1]))
        else:
            encode(layers, config, ids, lengths)
        return tf.stack(layers.concentrations, axis=1)  # (M, layers, H, S)

    compiled = tf.function(concentrations, autograph=False)
    found = []
    for _, part, made in _once(rows, objective, _ROWS_AT_ONCE):
        lengths = rows.store.lengths[part]
        values = compiled(tf.constant(made.input_ids), tf.constant(lengths)).numpy()
        found.append(over_tokens(values, lengths))
    return np.concatenate(found)[: len(rows.numbers)]


def over_tokens(values: NDArray[np.float32], lengths: NDArray[np.int32]) -> Floats:
    """Return mean and percentiles over each row's tokens: (M, ..., S) -> (M, ... · 4).

    Percentiles are interpolated linearly. Padding, which begins at `lengths` (M,), is ignored.
    """
    m, s = values.shape[0], values.shape[-1]
    flat = values.reshape(m, -1, s).astype(np.float64)
    real = np.arange(s)[None, None, :] < lengths[:, None, None]
    ordered = np.sort(np.where(real, flat, np.inf), axis=2)
    parts = [np.where(real, flat, 0.0).sum(2) / lengths[:, None]]
    for percentile in _PERCENTILES:
        place = percentile / 100 * (lengths - 1)  # (M,)
        low = np.floor(place).astype(np.int64)
        high = np.minimum(low + 1, lengths - 1)
        rest = (place - low)[:, None]
        at_low, at_high = (
            np.take_along_axis(ordered, p[:, None, None], 2)[..., 0] for p in (low, high)
        )
        parts.append(at_low + rest * (at_high - at_low))
    features: Floats = np.stack(parts, axis=2).reshape(m, -1)
    return features


def gradient_features(model: AnyModel, rows: Rows) -> Floats:
    """Return the logarithm of each row's squared gradient norm, layer by layer: (n, layers).

    The clipping engine computes the norms of many rows in one backward pass (Jagannatha et al. 2021
    process one row after another). Rows are read under one fresh mask.
    """
    objective, config = objective_for(model.config), model.config
    parameters = _constants(model)

    def norms(*batch: Tensor) -> Tensor:
        units = batch[0].shape[0]
        alone = UnitBatch(objective.row_losses, config, tuple(a[:, None] for a in batch))
        return layer_squared_norms(alone, parameters, units).squared_norms

    compiled = tf.function(norms, autograph=False)
    found = []
    for _, part, made in _once(rows, objective, _GRADIENTS_AT_ONCE):
        arrays = (
            *(made.input_ids, rows.store.lengths[part], made.positions, made.labels),
            *(made.weights, np.ones(len(part), np.float32)),
        )
        found.append(compiled(*(tf.constant(a) for a in arrays)).numpy().astype(np.float64))
    tiny = float(np.finfo(np.float32).tiny)
    features: Floats = np.log(np.maximum(np.concatenate(found)[: len(rows.numbers)], tiny))
    return features


def _once(
    rows: Rows, objective: Objective, at_once: int
) -> Iterator[tuple[int, Indices, MaskedRows]]:
    """Yield the rows in parts of one size, under one mask."""
    for start, part in _parts(rows.numbers, at_once):
        yield start, part, objective.examples(rows.store, part, rows.keys(part, 0))


def _parts(numbers: Indices, at_once: int) -> Iterator[tuple[int, Indices]]:
    """Yield (first, row numbers) in parts of one size; the last part repeats its rows."""
    for start in range(0, len(numbers), at_once):
        yield start, np.resize(numbers[start : start + at_once], at_once)


def _constants(model: AnyModel) -> dict[str, Tensor]:
    return {name: tf.constant(value) for name, value in model.parameters.items()}


def _layers(model: AnyModel) -> Layers:
    return Layers(_constants(model))
