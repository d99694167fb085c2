"""Observations of a model by its audits: losses, attention, gradients, ranks, and odds of suffixes.

The signals of membership attacks follow Jagannatha et al. 2021, section 4.1, and Min-K%++ (Zhang et
al. 2024, arXiv:2404.02936). Shapes: n rows, M rows at a time, S tokens, K predictions, H heads, V
tokens of the vocabulary. In a row of T tokens, the last L are its suffix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.audit.canaries import UNIT_TOKENS, Floats, MaskedContexts, Ranker
from dp_core.audit.extraction import Ids, Odds, OddsOf
from dp_core.audit.membership import Losses
from dp_core.data.hashing import U64
from dp_core.data.masking import MaskedRows
from dp_core.data.token_store import TokenStore
from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput
from dp_core.models.bert import encode, mlm_logits
from dp_core.models.causal import causal_logits
from dp_core.models.config import CausalConfig, FeedForwardConfig
from dp_core.models.parameters import AnyModel
from dp_core.nn import FAR_BELOW, Layers, Tensor, Variables
from dp_core.privacy.clipping.book_keeping import layer_squared_norms
from dp_core.training.batches import row_keys
from dp_core.training.objectives import UnitBatch, causal_examples, objective_for

_CANARIES_AT_ONCE = _CONTEXTS_AT_ONCE = 256

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


def losses_of(model: AnyModel, sides: Sequence[Rows]) -> Losses:
    """Return the losses of each row's predictions, averaged over fresh masks.

    Args:
        model: the attacked model, or a reference.
        sides: rows of several stores, whose losses are returned in this order.

    Raises:
        BadInput: a loss is not finite.
    """
    predict, objective = _token_statistics(model), objective_for(model.config)

    def compute(rows: Rows, part: Indices) -> tuple[Floats, Floats]:
        nats, standard, weights = [], [], []
        for draw in range(rows.masks if objective.masks else 1):
            made = objective.examples(rows.store, part, rows.keys(part, draw))
            arrays = (made.input_ids, rows.store.lengths[part], made.positions, made.labels)
            outputs = predict(*map(tf.constant, arrays))
            nats.append(outputs[0].numpy().reshape(made.weights.shape))
            standard.append(outputs[1].numpy().reshape(made.weights.shape))
            weights.append(made.weights)
        asked = np.concatenate(weights, axis=1).astype(np.float64)  # (M, draws·K)
        sums = (np.concatenate(nats, axis=1) * asked).sum(1)
        lowest = -min_k(np.concatenate(standard, axis=1), asked)
        return sums / np.maximum(asked.sum(1), 1.0), lowest

    return Losses(*_of_sides(sides, _ROWS_AT_ONCE, compute))


def features_of(model: AnyModel, sides: Sequence[Rows]) -> dict[str, Floats]:
    """Return the features of the rows of several stores, by attack.

    Raises:
        BadInput: a feature is not finite.
    """
    gradients = {"gradients": gradient_features(model, sides)}
    if isinstance(model.config, FeedForwardConfig):  # it has no attention
        return gradients
    return {"attention": attention_features(model, sides)} | gradients


def _of_sides(
    sides: Sequence[Rows], at_once: int, compute: Callable[[Rows, Indices], tuple[Floats, ...]]
) -> list[Floats]:
    """Return the results for the rows of several stores, in this order.

    Raises:
        BadInput: a result is not finite.
    """
    by_side = [_in_parts(side.numbers, at_once, partial(compute, side)) for side in sides]
    results = [np.concatenate(parts) for parts in zip(*by_side, strict=True)]
    if not all(np.isfinite(values).all() for values in results):
        raise BadInput("the model's losses or gradients are not finite", where="model")
    return results


def _in_parts(
    numbers: Indices, at_once: int, compute: Callable[[Indices], tuple[NDArray[Any], ...]]
) -> list[NDArray[Any]]:
    """Compute rows in parts of one size; the last part repeats its rows."""
    parts = [
        compute(np.resize(numbers[start : start + at_once], at_once))
        for start in range(0, len(numbers), at_once)
    ]
    return [np.concatenate(values)[: len(numbers)] for values in zip(*parts, strict=True)]


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
        of_labels = tf.gather(logs, tf.reshape(labels, (-1,)), batch_dims=1)  # (M·K,)
        chances = tf.exp(logs)
        mean = tf.reduce_sum(chances * logs, axis=1)
        variance = tf.reduce_sum(chances * tf.square(logs - mean[:, None]), axis=1)
        return -of_labels, (of_labels - mean) / tf.sqrt(tf.maximum(variance, _LEAST_VARIANCE))

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


def attention_features(model: AnyModel, sides: Sequence[Rows]) -> Floats:
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

    def compute(rows: Rows, part: Indices) -> tuple[Floats]:
        made, lengths = objective.examples(rows.store, part, rows.keys(part, 0)), rows.store.lengths
        values = compiled(tf.constant(made.input_ids), tf.constant(lengths[part])).numpy()
        return (over_tokens(values, lengths[part]),)

    (features,) = _of_sides(sides, _ROWS_AT_ONCE, compute)
    return features


def over_tokens(values: NDArray[np.float32], lengths: NDArray[np.int32]) -> Floats:
    """Return mean and percentiles over each row's tokens: (M, ..., S) -> (M, ... · 4).

    Percentiles are interpolated linearly. Padding, which begins at `lengths` (M,), is ignored.
    """
    features = []
    for row, length in zip(values.astype(np.float64), lengths.tolist(), strict=True):
        real = row[..., :length]
        statistics = [real.mean(-1), *np.percentile(real, _PERCENTILES, axis=-1)]
        features.append(np.stack(statistics, axis=-1).ravel())
    return np.array(features)


def gradient_features(model: AnyModel, sides: Sequence[Rows]) -> Floats:
    """Return the logarithm of each row's squared gradient norm, layer by layer: (n, layers).

    The clipping engine computes the norms of many rows in one backward pass (Jagannatha et al. 2021
    process one row after another). Rows are read under one fresh mask.
    """
    objective, config = objective_for(model.config), model.config
    parameters = _constants(model)

    def norms(*batch: Tensor) -> Tensor:
        units = batch[0].shape[0]
        alone = UnitBatch(objective.row_losses, config, tuple(a[:, None] for a in batch))
        return layer_squared_norms(alone, parameters, units)

    compiled = tf.function(norms, autograph=False)

    def compute(rows: Rows, part: Indices) -> tuple[Floats]:
        made = objective.examples(rows.store, part, rows.keys(part, 0))
        arrays = (
            *(made.input_ids, rows.store.lengths[part], made.positions, made.labels),
            *(made.weights, np.ones(len(part), np.float32)),
        )
        norms_of_rows = compiled(*map(tf.constant, arrays)).numpy().astype(np.float64)
        return (np.log(np.maximum(norms_of_rows, np.finfo(np.float32).tiny)),)

    (features,) = _of_sides(sides, _GRADIENTS_AT_ONCE, compute)
    return features


def _constants(model: AnyModel) -> dict[str, Tensor]:
    return {name: tf.constant(value) for name, value in model.parameters.items()}


def _layers(model: AnyModel) -> Layers:
    return Layers(_constants(model))


def ranker(model: AnyModel, candidates: Sequence[int] | None = None) -> Ranker:
    """Return a compiled function that ranks each row's secret among the candidates.

    A masked model predicts the secret from the tokens on both sides. A causal model predicts it as
    the next token from the tokens before it, and never sees the mask. If the secret ends the
    canary, this rank is the rank by log-perplexity of Carlini et al. 2019. Hints after the secret
    would need a forward pass for every candidate, and are not used.

    Args:
        model: a masked model with its MLM head, or a causal model.
        candidates: ids of the tokens to rank among, the secrets included; all tokens if None.

    Returns:
        A function of contexts. Its ranks [B] are between 1, the model's first choice, and
        |candidates|; ties are averaged. A rank is NaN if a logit of its row is not finite. No
        position may be 0 for a causal model.
    """
    layers, config = _layers(model), model.config
    among = tf.range(model.config.vocab_size) if candidates is None else tf.constant(candidates)

    def ranks(ids: Tensor, lengths: Tensor, positions: Tensor, secrets: Tensor) -> Tensor:
        if isinstance(config, CausalConfig):  # (B, V)
            logits = causal_logits(layers, config, ids, positions[:, None] - 1)
        else:
            logits = mlm_logits(layers, config, ids, lengths, positions[:, None])
        secret = tf.gather(logits, secrets, batch_dims=1)[:, None]  # (B, 1)
        rivals = tf.gather(logits, among, axis=1)  # (B, candidates), with the secret
        above = tf.reduce_sum(tf.cast(rivals > secret, tf.float32), axis=1)
        equal = tf.reduce_sum(tf.cast(rivals == secret, tf.float32), axis=1)
        rank = 1.0 + above + 0.5 * (equal - 1.0)  # exact in float32 up to 2^24
        sound = tf.reduce_all(tf.math.is_finite(logits), axis=1)
        return tf.where(sound, rank, float("nan"))

    compiled = tf.function(ranks, autograph=False)

    def answer(shown: MaskedContexts) -> Floats:
        arrays = (shown.input_ids, shown.lengths, shown.positions, shown.secrets)

        def compute(part: Indices) -> tuple[Floats]:
            return (compiled(*(tf.constant(a[part], tf.int32) for a in arrays)).numpy(),)

        (answers,) = _in_parts(np.arange(len(shown.secrets)), _CONTEXTS_AT_ONCE, compute)
        return answers.astype(np.float64)

    return answer


_PREDICTIONS_AT_ONCE = 1024


def suffix_odds(model: AnyModel) -> OddsOf:
    """Return a function that computes a causal model's odds of row suffixes.

    Raises:
        BadInput: raised by the function if a probability is not finite.
    """
    layers, config = _layers(model), model.config
    assert isinstance(config, CausalConfig)  # noqa: S101 - narrows the type

    def odds_of(prompts: Ids, suffix: int, top_k: int, among: Sequence[int] | None) -> Odds:
        allowed = np.arange(config.vocab_size) if among is None else np.unique(among)
        barred = np.full(config.vocab_size, FAR_BELOW, np.float32)
        barred[allowed] = 0.0
        k = min(top_k, len(allowed))

        def odds(ids: Tensor) -> tuple[Tensor, ...]:
            m, t = ids.shape
            # the place before each suffix token
            asked = tf.tile(tf.range(t - 1 - suffix, t - 1)[None], (m, 1))
            logits = causal_logits(layers, config, ids[:, :-1], asked)  # (M·L, V)
            sound = tf.reduce_all(tf.math.is_finite(logits))
            values, tokens = tf.math.top_k(logits + barred, k)  # (M·L, k); lower ids win ties
            hit = tokens == tf.reshape(ids[:, -suffix:], (-1, 1))
            # Sampling normalises over the k tokens. Logarithms prevent underflow of the product.
            logs = tf.where(hit, tf.nn.log_softmax(values), 0.0)
            return (
                sound,
                tf.reshape(hit[:, 0], (m, suffix)),
                tf.reshape(tf.reduce_any(hit, axis=1), (m, suffix)),
                tf.reshape(tf.reduce_sum(logs, axis=1), (m, suffix)),
            )

        compiled = tf.function(odds, autograph=False)

        def compute(part: Indices) -> tuple[NDArray[Any], ...]:
            sound, *numbers = compiled(tf.constant(prompts[part]))
            if not bool(sound):
                raise BadInput("the model's probabilities are not finite", where="model")
            return tuple(values.numpy() for values in numbers)

        numbers = np.arange(len(prompts))
        first, within, logs = _in_parts(numbers, max(1, _PREDICTIONS_AT_ONCE // suffix), compute)
        inside = np.asarray(within.all(axis=1))
        chance = np.where(inside, np.exp(logs.astype(np.float64).sum(axis=1)), 0.0)
        return Odds(np.asarray(first.all(axis=1)), inside, chance)

    return odds_of


def canary_scores(start: AnyModel, trained: AnyModel, canaries: TokenStore) -> Floats:
    """Return the decrease of each canary's loss due to the training, in nats, (m,).

    To first order this is the inner product of the change of the weights with the canary's
    gradient, which a white-box audit reads from the noised sums (Nasr et al. 2023,
    arXiv:2302.07956).

    Args:
        start: the model before the first update.
        trained: the audited model.
        canaries: all canaries, included or not, one row each.

    Raises:
        BadInput: a model's losses are not finite.
    """
    scores = _summed_losses(start, canaries) - _summed_losses(trained, canaries)
    if not np.isfinite(scores).all():
        raise BadInput("a model's losses are not finite", where="audit")
    return scores


def _summed_losses(model: AnyModel, canaries: TokenStore) -> Floats:
    """Return the summed loss of each canary, (m,), with one token masked or predicted at a time."""
    layers, losses = _layers(model), objective_for(model.config).row_losses

    def row_losses(*arrays: Tensor) -> Tensor:
        return losses(layers, model.config, *arrays)

    compiled = tf.function(row_losses, autograph=False)

    def compute(numbers: Indices) -> tuple[Floats]:
        total = np.zeros(len(numbers))
        for made in _asked(model, canaries, numbers):
            arrays = (made.input_ids, canaries.lengths[numbers], made.positions, made.labels)
            means = compiled(*map(tf.constant, (*arrays, made.weights))).numpy()
            total += means.astype(np.float64) * made.weights.sum(1)
        return (total,)

    (totals,) = _in_parts(np.arange(canaries.n_rows), _CANARIES_AT_ONCE, compute)
    return totals


def _asked(model: AnyModel, canaries: TokenStore, numbers: NDArray[np.int64]) -> list[MaskedRows]:
    """Return the predictions to make for each canary, one pass for each masked token."""
    if isinstance(model.config, CausalConfig):
        return [causal_examples(canaries, numbers, np.zeros(len(numbers), np.uint64))]
    ids, mask = canaries.tokens[numbers].astype(np.int32), SpecialIds().mask
    passes = []
    for place in range(1, 1 + UNIT_TOKENS):
        hidden = ids.copy()
        hidden[:, place] = mask
        positions = np.full((len(ids), 1), place, np.int32)
        weights = np.ones((len(ids), 1), np.float32)
        passes.append(MaskedRows(hidden, positions, ids[:, place : place + 1], weights))
    return passes
