"""What sits on the encoder: the masked-language-model head and the token classifier."""

from __future__ import annotations

import tensorflow as tf

from dp_core.bert.config import BertConfig
from dp_core.bert.encoder import encode
from dp_core.bert.functions import cross_entropy, gelu
from dp_core.bert.layers import Layers, Tensor, shape_of
from dp_core.bert.parameters import MLM_BIAS, TAGGER, WORD


def mlm_logits(
    layers: Layers, config: BertConfig, ids: Tensor, lengths: Tensor, positions: Tensor
) -> Tensor:
    """Return logits over the vocabulary at the asked positions only.

    Args:
        layers: the layers, which hold the parameters.
        config: the shape.
        ids: (M, S) int32.
        lengths: (M,) int32.
        positions: (M, K) int32, places in the row; K is static.

    Returns:
        (M·K, V) float32.
    """
    m, k = shape_of(positions)
    hidden = encode(layers, config, ids, lengths, asked=positions)  # (M, K, D)
    x = gelu(layers.linear("mlm/transform", tf.reshape(hidden, (m * k, config.hidden))))
    x = layers.layer_norm("mlm/norm", x, config.layer_norm_epsilon)
    return layers.tied_projection(x, WORD, MLM_BIAS)


def mlm_row_losses(
    layers: Layers,
    config: BertConfig,
    ids: Tensor,
    lengths: Tensor,
    positions: Tensor,
    labels: Tensor,
    weights: Tensor,
) -> Tensor:
    """Return each row's mean cross-entropy over its own predictions, in nats.

    Args:
        layers: the layers, which hold the parameters.
        config: the shape.
        ids: (M, S) int32.
        lengths: (M,) int32.
        positions: (M, K) int32.
        labels: (M, K) int32, the true pieces.
        weights: (M, K) float32, 1 for a prediction and 0 for padding.

    Returns:
        (M,) float32; 0 for a row without predictions. Never divided by anything of the batch.
    """
    m, k = shape_of(labels)
    logits = mlm_logits(layers, config, ids, lengths, positions)  # (M·K, V)
    losses = cross_entropy(logits, tf.reshape(labels, (m * k,)))
    own = tf.maximum(tf.reduce_sum(weights, axis=1), 1.0)  # (M,)
    return tf.reduce_sum(tf.reshape(losses, (m, k)) * weights, axis=1) / own


def tag_logits(layers: Layers, config: BertConfig, ids: Tensor, lengths: Tensor) -> Tensor:
    """(M, S) ids -> (M, S, tags) logits of the token classifier."""
    m, s = shape_of(ids)
    hidden = tf.reshape(encode(layers, config, ids, lengths), (m * s, config.hidden))
    logits = layers.linear(TAGGER, hidden)  # (M·S, tags)
    return tf.reshape(logits, (m, s, logits.shape[1]))
