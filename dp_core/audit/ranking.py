"""Ranks of canaries' secrets by a language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from dp_core.audit.exposure import Floats, Ints, Ranker
from dp_core.models.bert import mlm_logits
from dp_core.models.causal import causal_logits
from dp_core.models.config import CausalConfig
from dp_core.models.parameters import AnyModel
from dp_core.nn import Layers, Tensor


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
        A function of the arrays of `MaskedContexts`. Its ranks [B] are between 1, the model's first
        choice, and |candidates|; ties are averaged. A rank is NaN if a logit of its row is not
        finite. No position may be 0 for a causal model.
    """
    logits_at = _logits_at(model)
    among = tf.range(model.config.vocab_size) if candidates is None else tf.constant(candidates)

    def ranks(ids: Tensor, lengths: Tensor, positions: Tensor, secrets: Tensor) -> Tensor:
        logits = logits_at(ids, lengths, positions)  # (B, V)
        secret = tf.gather(logits, secrets, batch_dims=1)[:, None]  # (B, 1)
        rivals = tf.gather(logits, among, axis=1)  # (B, candidates), with the secret
        above = tf.reduce_sum(tf.cast(rivals > secret, tf.float32), axis=1)
        equal = tf.reduce_sum(tf.cast(rivals == secret, tf.float32), axis=1)
        rank = 1.0 + above + 0.5 * (equal - 1.0)  # exact in float32 up to 2^24
        sound = tf.reduce_all(tf.math.is_finite(logits), axis=1)
        return tf.where(sound, rank, float("nan"))

    compiled = tf.function(ranks, autograph=False)

    def answer(input_ids: Ints, lengths: Ints, positions: Ints, secrets: Ints) -> Floats:
        arrays = (input_ids, lengths, positions, secrets)
        out: Floats = compiled(*(tf.constant(a, tf.int32) for a in arrays)).numpy()
        return out.astype(np.float64)

    return answer


def _logits_at(model: AnyModel) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function of ids (B, S), lengths (B,), positions (B,): the secrets' logits (B, V)."""
    layers, config = Layers({n: tf.constant(v) for n, v in model.parameters.items()}), model.config
    if isinstance(config, CausalConfig):
        causal = config
        return lambda ids, _, positions: causal_logits(layers, causal, ids, positions[:, None] - 1)
    masked = config
    return lambda ids, lengths, positions: mlm_logits(
        layers, masked, ids, lengths, positions[:, None]
    )
