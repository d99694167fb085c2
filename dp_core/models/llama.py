"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Touvron et al. 2023 (arXiv:2302.13971, 2307.09288). M rows, S tokens, D hidden, H heads, G heads of
keys and values, W = D / H. Rows never meet, and padding stands at the end, where nothing before
it can see it. No layer has a bias.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.models.config import LlamaConfig
from dp_core.models.parameters import HEAD, WORD
from dp_core.nn.layers import FAR_BELOW, Layers, Tensor, shape_of

Waves = tuple[Tensor, Tensor]  # cosines and sines, each (S, W)


def llama_logits(
    layers: Layers, config: LlamaConfig, ids: Tensor, asked: Tensor | None = None
) -> Tensor:
    """Return at each position the logits of the token after it.

    Args:
        layers: the layers, which hold the parameters.
        config: the shape.
        ids: (M, S) int32 token ids, padded at the end.
        asked: (M, K) int32 positions whose logits are wanted, K static; all if None.

    Returns:
        (M·S, V) float32, or (M·K, V).
    """
    m, s = shape_of(ids)
    ahead = tf.range(s)[None, :] > tf.range(s)[:, None]  # (S, S)
    bias = FAR_BELOW * tf.cast(ahead, tf.float32)
    waves = rotary_waves(config, s)
    x = layers.embed(ids, None, WORD, None, None)
    x = tf.reshape(x, (m * s, config.hidden))  # (M·S, D): every layer from here on is by token
    for i in range(config.layers):
        x = _block(layers, config, f"layer_{i}", x, bias, waves, (m, s))
    if asked is not None:
        x = tf.gather(tf.reshape(x, (m, s, config.hidden)), asked, batch_dims=1)  # (M, K, D)
        x = tf.reshape(x, (m * shape_of(asked)[1], config.hidden))
    x = layers.rms_norm("final_norm", x, config.layer_norm_epsilon)
    if config.tied:
        return layers.tied_projection(x, WORD, None)
    return layers.linear(HEAD, x, bias=False)


def rotary_waves(config: LlamaConfig, s: Any) -> Waves:
    """Return cos and sin of position · θ^(−2i/W), for S positions: each (S, W).

    Su et al. 2021 (arXiv:2104.09864), in the order of Hugging Face's checkpoints: value i is
    paired with value i + W/2, and not with its neighbour.
    """
    width = config.hidden // config.heads
    exponents: NDArray[np.float64] = np.arange(0, width, 2) / width
    frequencies = tf.constant(config.rope_theta**-exponents, tf.float32)  # (W/2,)
    angles = tf.cast(tf.range(s), tf.float32)[:, None] * frequencies  # (S, W/2)
    angles = tf.concat([angles, angles], axis=1)  # (S, W)
    return tf.cos(angles), tf.sin(angles)


def _rotated(x: Tensor, waves: Waves) -> Tensor:
    """(M, heads, S, W) -> the same, each pair of values turned by its position's angle."""
    cosines, sines = waves
    first, second = tf.split(x, 2, axis=3)
    return x * cosines + tf.concat([-second, first], axis=3) * sines


def _block(
    layers: Layers,
    config: LlamaConfig,
    name: str,
    x: Tensor,
    bias: Tensor,
    waves: Waves,
    shape: tuple[Any, Any],
) -> Tensor:
    epsilon = config.layer_norm_epsilon
    normed = layers.rms_norm(f"{name}/attention_norm", x, epsilon)
    x = x + _attention(layers, config, name, normed, bias, waves, shape)
    normed = layers.rms_norm(f"{name}/intermediate_norm", x, epsilon)
    gate = layers.linear(f"{name}/gate", normed, bias=False)  # (M·S, F)
    inner = tf.nn.silu(gate) * layers.linear(f"{name}/intermediate", normed, bias=False)
    return x + layers.linear(f"{name}/output", inner, bias=False)


def _attention(
    layers: Layers,
    config: LlamaConfig,
    name: str,
    x: Tensor,
    bias: Tensor,
    waves: Waves,
    shape: tuple[Any, Any],
) -> Tensor:
    """(M·S, D) -> (M·S, D): H queries, of which H / G share a key and a value."""
    (m, s), width = shape, config.hidden // config.heads
    shared = config.heads // config.key_heads

    def by_head(part: str, heads: int) -> Tensor:
        y = layers.linear(f"{name}/{part}", x, bias=False)
        return tf.transpose(tf.reshape(y, (m, s, heads, width)), (0, 2, 1, 3))  # (M, heads, S, W)

    q = _rotated(by_head("query", config.heads), waves)
    k = _rotated(by_head("key", config.key_heads), waves)
    v = by_head("value", config.key_heads)
    if shared > 1:  # queries of one group stand next to each other
        k, v = (tf.repeat(t, shared, axis=1) for t in (k, v))
    scores = layers.product(q * (1.0 / math.sqrt(width)), k, transpose_b=True) + bias
    mixed = layers.product(tf.nn.softmax(scores), v)  # (M, H, S, W)
    mixed = tf.reshape(tf.transpose(mixed, (0, 2, 1, 3)), (m * s, config.hidden))
    return layers.linear(f"{name}/attention_output", mixed, bias=False)
