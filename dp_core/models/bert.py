"""BERT's encoder: post-norm Transformer blocks over the sum of three embeddings.

M rows, S tokens, D hidden, H heads, W = D / H. Rows never meet: no statistic runs over M, which
is what makes per-row gradients meaningful (docs/privacy.md, independence of rows).
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from dp_core.models.config import BertConfig
from dp_core.models.parameters import CLASSIFIER, MLM_BIAS, POOLER, POSITION, TAGGER, TYPE, WORD
from dp_core.nn.layers import Layers, Tensor, cross_entropy, gelu, shape_of

_FAR_BELOW = -1e9  # added to a padded key's score: its softmax weight is exactly 0 in float32


def encode(
    layers: Layers,
    config: BertConfig,
    ids: Tensor,
    lengths: Tensor,
    asked: Tensor | None = None,
    types: Tensor | None = None,
) -> Tensor:
    """Return the last hidden states.

    Args:
        layers: the layers, which hold the parameters.
        config: the shape.
        ids: (M, S) int32 piece ids.
        lengths: (M,) int32; tokens from there on are padding that nobody attends to.
        asked: (M, K) int32 places whose states are wanted; all if None. The last block computes
            nothing for the others beyond their keys and values, so that asking for few is cheap.
        types: (M, S) int32 token types; zeros if None. A DistilBERT has none.

    Returns:
        (M, S, D) float32, or (M, K, D).
    """
    m, s = shape_of(ids)
    padding = _FAR_BELOW * (1.0 - tf.sequence_mask(lengths, s, tf.float32))  # (M, S)
    bias = padding[:, None, None, :]  # (M, 1, 1, S)
    if config.distilled:
        x = layers.embed(ids, None, WORD, POSITION, None)
    else:
        kinds = tf.zeros_like(ids) if types is None else types
        x = layers.embed(ids, kinds, WORD, POSITION, TYPE)
    x = tf.reshape(x, (m * s, config.hidden))  # (M·S, D): every layer from here on is by token
    x = layers.layer_norm("embeddings/norm", x, config.layer_norm_epsilon)
    for i in range(config.layers):
        wanted = asked if i == config.layers - 1 else None
        x = _block(layers, config, f"layer_{i}", x, bias, (m, s), wanted)
    return tf.reshape(x, (m, s if asked is None else shape_of(asked)[1], config.hidden))


def _block(
    layers: Layers,
    config: BertConfig,
    name: str,
    x: Tensor,
    bias: Tensor,
    shape: tuple[Any, Any],
    asked: Tensor | None,
) -> Tensor:
    attended = _attention(layers, config, name, x, bias, shape, asked)
    if asked is not None:
        x = tf.gather(tf.reshape(x, (*shape, config.hidden)), asked, batch_dims=1)  # (M, K, D)
        x = tf.reshape(x, (shape[0] * shape_of(asked)[1], config.hidden))
    x = layers.layer_norm(f"{name}/attention_norm", x + attended, config.layer_norm_epsilon)
    inner = gelu(layers.linear(f"{name}/intermediate", x))  # (N, F)
    outer = layers.linear(f"{name}/output", inner)  # (N, D)
    return layers.layer_norm(f"{name}/output_norm", x + outer, config.layer_norm_epsilon)


def _attention(
    layers: Layers,
    config: BertConfig,
    name: str,
    x: Tensor,
    bias: Tensor,
    shape: tuple[Any, Any],
    asked: Tensor | None,
) -> Tensor:
    m, s = shape
    heads, width = config.heads, config.hidden // config.heads
    qkv = layers.linear(f"{name}/qkv", x)  # (M·S, 3D)
    qkv = tf.transpose(tf.reshape(qkv, (m, s, 3, heads, width)), (2, 0, 3, 1, 4))
    q, k, v = tf.unstack(qkv)  # each (M, H, S, W)
    queries = s
    if asked is not None:
        queries = shape_of(asked)[1]
        places = tf.tile(asked[:, None, :], (1, heads, 1))  # (M, H, K)
        q = tf.gather(q, places, batch_dims=2)  # (M, H, K, W)
    scores = layers.product(q * (1.0 / math.sqrt(width)), k, transpose_b=True) + bias
    mixed = layers.product(tf.nn.softmax(scores), v)  # (M, H, queries, W)
    mixed = tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), (m * queries, config.hidden))
    return layers.linear(f"{name}/attention_output", mixed)


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
