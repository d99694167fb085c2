"""What a language model knows: accuracy, perplexity, and how it ranks a piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.bert.causal import causal_row_losses
from dp_core.bert.gpt2_config import Gpt2Config
from dp_core.bert.heads import mlm_logits
from dp_core.bert.layers import Layers, Tensor
from dp_core.bert.parameters import AnyModel, Bert, Gpt2, Model
from dp_core.corpus.token_store import TokenStore
from dp_core.errors import BadInput
from dp_core.training.objective import causal_examples
from dp_core.training.rows import masked_examples, micro_batch, row_keys

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Ranker = Callable[[Ints, Ints, Ints, Ints], Floats]

_ROWS_AT_ONCE = 64


def mlm_accuracy(model: AnyModel, store: TokenStore, *, seed: int, max_rows: int = 1024) -> float:
    """Return the share of masked pieces whose first guess is right.

    Rows and masks are a function of the store and the public seed, so that models are compared on
    the very same predictions. On private rows the result is an `operator` number.

    Args:
        model: with its MLM head.
        store: rows that did not train the model.
        seed: public; chooses at most `max_rows` rows, and the masks.
        max_rows: bounds the work.

    Raises:
        BadInput: a causal model, which fills in no masks.
    """
    if isinstance(model.config, Gpt2Config):
        raise BadInput("a causal model has no MLM accuracy", fix="Ask for its perplexity.")
    unit_of = np.repeat(np.arange(store.n_units), np.diff(store.unit_rows))
    rows = _chosen(store, seed, max_rows)
    first_guess_is_right = _first_guesses(Model(model.config, model.parameters))
    right = asked = 0.0
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[start : start + _ROWS_AT_ONCE]
        keys = row_keys(store, unit_of[part], part[:, None], seed, 0)
        real = np.ones((len(part), 1), np.bool_)
        batch = micro_batch(store, part[:, None], real, keys, _ROWS_AT_ONCE, masked_examples)
        weights = batch.weights[:, 0]
        arrays = (batch.ids, batch.lengths, batch.positions, batch.labels)
        hits = first_guess_is_right(*(tf.constant(a[:, 0]) for a in arrays)).numpy()
        right += float((hits.reshape(weights.shape) * weights).sum())
        asked += float(weights.sum())
    return right / asked if asked else 0.0


def perplexity(
    model: AnyModel,
    store: TokenStore,
    *,
    seed: int,
    max_rows: int = 1024,
    continuation: NDArray[np.bool_] | None = None,
) -> float:
    """Return exp(mean cross-entropy) of the next piece, over the ordinary pieces of held-out rows.

    Markers and unknown pieces are not predicted (`objective.causal_examples`), so say beside it how
    many pieces are unknown. It depends on the vocabulary: short pieces are easily told. By words
    (with `continuation`) vocabularies can be compared: the same sum, divided by the words begun.
    On private rows the result is an `operator` number.

    Args:
        model: a causal one.
        store: rows that did not train the model.
        seed: public; chooses at most `max_rows` rows.
        max_rows: bounds the work.
        continuation: (V,) true for pieces that go on with a word; None counts pieces.

    Returns:
        1 or more, perhaps infinite; NaN if nothing is asked, or an answer is not a number.

    Raises:
        BadInput: a model that is not causal.
    """
    if not isinstance(model.config, Gpt2Config):
        raise BadInput("a masked model has no perplexity", fix="Ask for its MLM accuracy.")
    rows = _chosen(store, seed, max_rows)
    mean_losses = _row_losses(Model(model.config, model.parameters))
    total = asked = 0.0
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        part = np.resize(rows[start : start + _ROWS_AT_ONCE], _ROWS_AT_ONCE)  # one shape
        real = np.arange(_ROWS_AT_ONCE) < len(rows) - start
        made = causal_examples(store, part, np.zeros(len(part), np.uint64))
        weights = made.weights * real[:, None]
        arrays = (made.input_ids, store.lengths[part], made.positions, made.labels, weights)
        means = mean_losses(*(tf.constant(a) for a in arrays)).numpy().astype(np.float64)
        total += float((means * weights.sum(1)).sum())
        counted = weights if continuation is None else weights * ~continuation[made.labels]
        asked += float(counted.sum())
    return float(np.exp(np.float64(total) / asked)) if asked else float("nan")


def _chosen(store: TokenStore, seed: int, max_rows: int) -> NDArray[np.int64]:
    return np.sort(np.random.default_rng(seed).permutation(store.n_rows)[:max_rows])


def secret_ranks(
    model: Bert,
    input_ids: Ints,
    lengths: Ints,
    positions: Ints,
    secrets: Ints,
    candidates: Sequence[int] | None = None,
) -> Floats:
    """Rank each row's secret piece among the candidates at its masked position.

    Args:
        model: with its MLM head.
        input_ids: [B, S], the secret's place masked.
        lengths: [B], pieces of each row that are not padding.
        positions: [B], where the secret is masked.
        secrets: [B], the piece that is hidden there; one of the candidates.
        candidates: ids that compete; all pieces by default.

    Returns:
        [B] ranks from 1, the model's first choice, to |candidates|; ties are averaged. NaN where
        the model's answer is not a number.
    """
    return ranker(model, candidates)(input_ids, lengths, positions, secrets)


def ranker(model: Bert, candidates: Sequence[int] | None = None) -> Ranker:
    """Return `secret_ranks` of one model, compiled once for all batches of a shape.

    Args:
        model: with its MLM head.
        candidates: ids of the pieces to rank among, the secrets included; all pieces if None.
    """
    parameters = {name: tf.constant(value) for name, value in model.parameters.items()}
    among = tf.range(model.config.vocab_size) if candidates is None else tf.constant(candidates)

    def ranks(ids: Tensor, lengths: Tensor, positions: Tensor, secrets: Tensor) -> Tensor:
        logits = mlm_logits(Layers(parameters), model.config, ids, lengths, positions[:, None])
        own = tf.gather(logits, secrets, batch_dims=1)[:, None]  # (B, 1)
        rivals = tf.gather(logits, among, axis=1)  # (B, candidates), the secret one of them
        above = tf.reduce_sum(tf.cast(rivals > own, tf.float32), axis=1)
        equal = tf.reduce_sum(tf.cast(rivals == own, tf.float32), axis=1)
        rank = 1.0 + above + 0.5 * (equal - 1.0)  # float32 counts exactly to 2^24
        sound = tf.reduce_all(tf.math.is_finite(logits), axis=1)
        return tf.where(sound, rank, float("nan"))

    compiled = tf.function(ranks, autograph=False)

    def answer(input_ids: Ints, lengths: Ints, positions: Ints, secrets: Ints) -> Floats:
        arrays = (input_ids, lengths, positions, secrets)
        out: Floats = compiled(*(tf.constant(a, tf.int32) for a in arrays)).numpy()
        return out.astype(np.float64)

    return answer


def _row_losses(model: Gpt2) -> Callable[..., Tensor]:
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
