"""GPT-2's decoder: pre-norm Transformer blocks that look back only, and the next token's logits.

M rows, S tokens, D hidden, H heads, W = D / H. As in the encoder, rows never meet. Padding stands
at the end of a row, where nothing before it can see it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dp_core.models.config import Gpt2Config
from dp_core.models.parameters import POSITION, WORD
from dp_core.nn.layers import FAR_BELOW, Layers, Tensor, gelu_new, shape_of


def gpt2_logits(
    layers: Layers, config: Gpt2Config, ids: Tensor, asked: Tensor | None = None
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
    x = layers.embed(ids, None, WORD, POSITION, None)
    x = tf.reshape(x, (m * s, config.hidden))  # (M·S, D): every layer from here on is by token
    for i in range(config.layers):
        x = _block(layers, config, f"layer_{i}", x, bias, (m, s))
    if asked is not None:
        x = tf.gather(tf.reshape(x, (m, s, config.hidden)), asked, batch_dims=1)  # (M, K, D)
        x = tf.reshape(x, (m * shape_of(asked)[1], config.hidden))
    x = layers.layer_norm("final_norm", x, config.layer_norm_epsilon)
    return layers.tied_projection(x, WORD, None)


def _block(
    layers: Layers, config: Gpt2Config, name: str, x: Tensor, bias: Tensor, shape: tuple[Any, Any]
) -> Tensor:
    epsilon = config.layer_norm_epsilon
    normed = layers.layer_norm(f"{name}/attention_norm", x, epsilon)
    x = x + layers.attention(name, normed, bias, shape, config.heads)
    normed = layers.layer_norm(f"{name}/intermediate_norm", x, epsilon)
    inner = gelu_new(layers.linear(f"{name}/intermediate", normed))  # (M·S, F)
    return x + layers.linear(f"{name}/output", inner)
