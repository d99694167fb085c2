"""BERT's encoder: post-norm Transformer blocks over the sum of three embeddings.

M rows, S tokens, D hidden, H heads, W = D / H. Rows never meet: no statistic runs over M, which
is what makes per-row gradients meaningful (docs/privacy.md, independence of rows).
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from dp_core.bert.config import BertConfig
from dp_core.bert.functions import gelu
from dp_core.bert.layers import Layers, Tensor, shape_of
from dp_core.bert.parameters import POSITION, TYPE, WORD

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
