"""What sits on the encoder: the masked-language-model head, classifiers of tokens and of texts.

Row losses all have the same arguments, so that one trainer serves them: what differs is what
`positions` and `labels` mean.
"""

from __future__ import annotations

import tensorflow as tf

from dp_core.bert.config import BertConfig
from dp_core.bert.encoder import encode
from dp_core.bert.functions import cross_entropy, gelu
from dp_core.bert.layers import Layers, Tensor, shape_of
from dp_core.bert.parameters import CLASSIFIER, MLM_BIAS, POOLER, TAGGER, WORD


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
    logits = mlm_logits(layers, config, ids, lengths, positions)  # (M·K, V)
    return row_means(logits, labels, weights)


def row_means(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return each row's mean cross-entropy over its own answers: (M·K, V), (M, K) twice -> (M,).

    A row without answers costs 0. Nothing is divided by anything of the batch.
    """
    m, k = shape_of(labels)
    losses = cross_entropy(logits, tf.reshape(labels, (m * k,)))
    own = tf.maximum(tf.reduce_sum(weights, axis=1), 1.0)  # (M,)
    return tf.reduce_sum(tf.reshape(losses, (m, k)) * weights, axis=1) / own


def tag_logits(layers: Layers, config: BertConfig, ids: Tensor, lengths: Tensor) -> Tensor:
    """(M, S) ids -> (M, S, tags) logits of the token classifier."""
    m, s = shape_of(ids)
    hidden = tf.reshape(encode(layers, config, ids, lengths), (m * s, config.hidden))
    logits = layers.linear(TAGGER, hidden)  # (M·S, tags)
    return tf.reshape(logits, (m, s, logits.shape[1]))


def tag_row_losses(
    layers: Layers,
    config: BertConfig,
    ids: Tensor,
    lengths: Tensor,
    positions: Tensor,
    labels: Tensor,
    weights: Tensor,
) -> Tensor:
    """Return each row's mean cross-entropy over its own tagged words, in nats.

    Args:
        layers: the layers, which hold the parameters.
        config: the shape.
        ids: (M, S) int32.
        lengths: (M,) int32.
        positions: (M, K) int32, the place of each word's first piece.
        labels: (M, K) int32, the words' tags.
        weights: (M, K) float32, 1 for a word and 0 for padding.

    Returns:
        (M,) float32; 0 for a row without words.
    """
    hidden = encode(layers, config, ids, lengths, asked=positions)  # (M, K, D)
    logits = layers.linear(TAGGER, tf.reshape(hidden, (-1, config.hidden)))  # (M·K, tags)
    return row_means(logits, labels, weights)


def class_logits(
    layers: Layers, config: BertConfig, ids: Tensor, lengths: Tensor, seconds: Tensor | None = None
) -> Tensor:
    """Return the logits of a whole row's classes, from the state of its first piece, [CLS].

    Args:
        layers: the layers, which hold the parameters.
        config: the shape.
        ids: (M, S) int32, [CLS] text [SEP], or [CLS] text [SEP] text [SEP].
        lengths: (M,) int32.
        seconds: (M,) int32, the place where the second text begins; 0 if there is none. A
            DistilBERT, which has no token types, tells them apart by [SEP] alone.

    Returns:
        (M, classes) float32.
    """
    m, s = shape_of(ids)
    types = None
    if seconds is not None and not config.distilled:
        behind = tf.range(s)[None, :] >= seconds[:, None]  # (M, S)
        types = tf.cast(tf.logical_and(behind, seconds[:, None] > 0), tf.int32)
    first = encode(layers, config, ids, lengths, asked=tf.zeros((m, 1), tf.int32), types=types)
    pooled = layers.linear(POOLER, tf.reshape(first, (m, config.hidden)))
    activation = tf.nn.relu if config.distilled else tf.tanh
    return layers.linear(CLASSIFIER, activation(pooled))


def class_row_losses(
    layers: Layers,
    config: BertConfig,
    ids: Tensor,
    lengths: Tensor,
    positions: Tensor,
    labels: Tensor,
    weights: Tensor,
) -> Tensor:
    """Return each row's cross-entropy, in nats.

    Args:
        layers: the layers, which hold the parameters.
        config: the shape.
        ids: (M, S) int32.
        lengths: (M,) int32.
        positions: (M, 1) int32, where the second text begins; 0 if there is none.
        labels: (M, 1) int32, the row's class.
        weights: (M, 1) float32, 1, or 0 for padding.

    Returns:
        (M,) float32.
    """
    logits = class_logits(layers, config, ids, lengths, positions[:, 0])
    return row_means(logits, labels, weights)
