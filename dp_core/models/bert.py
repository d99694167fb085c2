"""BERT's encoder: post-norm Transformer blocks over the sum of three embeddings.

Shapes: M rows, S tokens, hidden size D, H heads of width W = D / H. Rows are independent: no
statistic is computed over M, so that the gradient of a row is well defined (docs/privacy.md,
independence of rows). Devlin et al. 2019 (arXiv:1810.04805); DistilBERT: Sanh et al. 2019
(arXiv:1910.01108).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dp_core.models.config import BertConfig
from dp_core.models.parameters import (
    CLASSIFIER,
    MLM_BIAS,
    POOLER,
    POSITION,
    TAGGER,
    TRANSITIONS,
    TYPE,
    WORD,
)
from dp_core.nn import FAR_BELOW, Layers, Tensor, chain_losses, gelu, row_losses, shape_of


def encode(
    layers: Layers,
    config: BertConfig,
    ids: Tensor,
    lengths: Tensor,
    positions: Tensor | None = None,
    types: Tensor | None = None,
) -> Tensor:
    """Return the last hidden states.

    Args:
        layers: the layers, which hold the parameters.
        config: the shape.
        ids: (M, S) int32 token ids.
        lengths: (M,) int32; later tokens are padding and receive no attention.
        positions: (M, K) int32, whose states are returned; all if None. For other positions
            the last block computes only keys and values.
        types: (M, S) int32 token types; zeros if None. A DistilBERT has none.

    Returns:
        (M, S, D) float32, or (M, K, D).
    """
    m, s = shape_of(ids)
    padding = FAR_BELOW * (1.0 - tf.sequence_mask(lengths, s, tf.float32))  # (M, S)
    bias = padding[:, None, None, :]  # (M, 1, 1, S)
    if types is None:
        types = tf.zeros_like(ids)
    x = layers.embed(ids, types, WORD, POSITION, None if config.distilled else TYPE)
    x = tf.reshape(x, (m * s, config.hidden))  # (M·S, D): every layer from here on is by token
    x = layers.dropout(layers.layer_norm("embeddings/norm", x, config.layer_norm_epsilon))
    for i in range(config.layers):
        wanted = positions if i == config.layers - 1 else None
        x = _block(layers, config, f"layer_{i}", x, bias, (m, s), wanted)
    return tf.reshape(x, (m, s if positions is None else shape_of(positions)[1], config.hidden))


def _block(
    layers: Layers,
    config: BertConfig,
    name: str,
    x: Tensor,
    bias: Tensor,
    shape: tuple[Any, Any],
    positions: Tensor | None,
) -> Tensor:
    attended = layers.dropout(layers.attention(name, x, bias, shape, config.heads, positions))
    if positions is not None:
        x = tf.gather(tf.reshape(x, (*shape, config.hidden)), positions, batch_dims=1)  # (M, K, D)
        x = tf.reshape(x, (shape[0] * shape_of(positions)[1], config.hidden))
    x = layers.layer_norm(f"{name}/attention_norm", x + attended, config.layer_norm_epsilon)
    inner = gelu(layers.linear(f"{name}/intermediate", x))  # (N, F)
    outer = layers.dropout(layers.linear(f"{name}/output", inner))  # (N, D)
    return layers.layer_norm(f"{name}/output_norm", x + outer, config.layer_norm_epsilon)


def mlm_logits(
    layers: Layers, config: BertConfig, ids: Tensor, lengths: Tensor, positions: Tensor
) -> Tensor:
    """Return logits over the vocabulary at the given positions.

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
    hidden = encode(layers, config, ids, lengths, positions=positions)  # (M, K, D)
    x = gelu(layers.linear("mlm/transform", tf.reshape(hidden, (m * k, config.hidden))))
    x = layers.layer_norm("mlm/norm", x, config.layer_norm_epsilon)
    return layers.tied_projection(x, WORD, MLM_BIAS)


def tag_logits(
    layers: Layers,
    config: BertConfig,
    ids: Tensor,
    lengths: Tensor,
    positions: Tensor | None = None,
) -> Tensor:
    """Return the logits of the token classifier: (M·K, tags), or (M·S, tags) without positions.

    The arguments are as in `mlm_logits`.
    """
    hidden = encode(layers, config, ids, lengths, positions=positions)
    return layers.linear(TAGGER, layers.dropout(tf.reshape(hidden, (-1, config.hidden))))


def class_logits(
    layers: Layers, config: BertConfig, ids: Tensor, lengths: Tensor, positions: Tensor
) -> Tensor:
    """Return the logits of the row classifier, computed from the state of [CLS].

    Args:
        layers: the layers, which hold the parameters.
        config: the shape.
        ids: (M, S) int32, [CLS] text [SEP], or [CLS] text [SEP] text [SEP].
        lengths: (M,) int32.
        positions: (M, 1) int32, where the second text begins; 0 without one. DistilBERT and
            RoBERTa have no second token type and separate the texts by [SEP] only.

    Returns:
        (M, classes) float32.
    """
    m, s = shape_of(ids)
    behind = tf.range(s)[None, :] >= positions  # (M, S)
    second = tf.logical_and(behind, positions > 0)
    types = tf.cast(second, tf.int32) if config.type_vocab > 1 else None
    first = encode(layers, config, ids, lengths, positions=tf.zeros((m, 1), tf.int32), types=types)
    pooled = layers.linear(POOLER, tf.reshape(first, (m, config.hidden)))
    activation = tf.nn.relu if config.distilled else tf.tanh
    return layers.linear(CLASSIFIER, layers.dropout(activation(pooled)))


mlm_row_losses = row_losses(mlm_logits)  # labels: the original tokens of masked positions
tag_row_losses = row_losses(tag_logits)  # labels: a tag at the first token of each word
class_row_losses = row_losses(class_logits)  # labels: a class; K is 1


def crf_row_losses(layers: Layers, config: BertConfig, *row: Tensor) -> Tensor:
    """Return the negative log-likelihood of each row's tags under a CRF, per word: (M,).

    The arguments are as in `tag_row_losses`; positions of words come before padding.
    """
    *inputs, labels, weights = row
    m, k = shape_of(labels)
    logits = tag_logits(layers, config, *inputs)  # (M·K, L)
    emissions = tf.reshape(logits, (m, k, logits.shape[1]))
    losses = chain_losses(emissions, layers.for_each_row(TRANSITIONS, m), labels, weights)
    return losses / tf.maximum(tf.reduce_sum(weights, axis=1), 1.0)
