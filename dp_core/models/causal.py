"""Causal language models: the next token's logits, and a row's loss.

GPT-2 and Llama are pre-norm Transformer blocks that look back only: attention and MLP read the
normalised stream and add to it. M rows, S tokens, D hidden. As in the encoder, rows never meet.
Padding stands at the end of a row, where nothing before it can see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from dp_core.models.config import CausalConfig, FeedForwardConfig, Gpt2Config, LlamaConfig
from dp_core.models.feed_forward import feed_forward_logits
from dp_core.models.llama import LlamaBlocks
from dp_core.models.parameters import HEAD, POSITION, WORD
from dp_core.nn.layers import FAR_BELOW, Layers, Tensor, gelu_new, row_losses, shape_of


class Blocks(Protocol):
    """What the blocks of an architecture are made of."""

    def norm(self, name: str, x: Tensor) -> Tensor:
        """(N, D) -> (N, D)."""

    def attention(self, name: str, x: Tensor) -> Tensor:
        """(M·S, D) -> (M·S, D), of the block `name`."""

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """(M·S, D) -> (M·S, D), of the block `name`."""


@dataclass(frozen=True)
class Gpt2Blocks:
    """GPT-2's (Radford et al. 2019): LayerNorm, and attention and MLP as a BERT's."""

    layers: Layers
    config: Gpt2Config
    bias: Tensor  # (S, S)
    shape: tuple[Any, Any]  # M and S

    def norm(self, name: str, x: Tensor) -> Tensor:
        """(N, D) -> (N, D)."""
        return self.layers.layer_norm(name, x, self.config.layer_norm_epsilon)

    def attention(self, name: str, x: Tensor) -> Tensor:
        """(M·S, D) -> (M·S, D)."""
        return self.layers.attention(name, x, self.bias, self.shape, self.config.heads)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """(M·S, D) -> (M·S, D)."""
        inner = gelu_new(self.layers.linear(f"{name}/intermediate", x))  # (M·S, F)
        return self.layers.linear(f"{name}/output", inner)


def causal_logits(
    layers: Layers, config: CausalConfig, ids: Tensor, asked: Tensor | None = None
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
    if isinstance(config, FeedForwardConfig):
        return feed_forward_logits(layers, config, ids, asked)
    m, s = shape_of(ids)
    ahead = tf.range(s)[None, :] > tf.range(s)[:, None]  # (S, S)
    bias = FAR_BELOW * tf.cast(ahead, tf.float32)
    blocks: Blocks
    if isinstance(config, LlamaConfig):
        position, tied, blocks = None, config.tied, LlamaBlocks(layers, config, bias, (m, s))
    else:
        assert isinstance(config, Gpt2Config)  # noqa: S101 - narrows the type
        position, tied, blocks = POSITION, True, Gpt2Blocks(layers, config, bias, (m, s))
    x = layers.embed(ids, None, WORD, position, None)
    x = tf.reshape(x, (m * s, config.hidden))  # (M·S, D): every layer from here on is by token
    for i in range(config.layers):
        name = f"layer_{i}"
        x = x + blocks.attention(name, blocks.norm(f"{name}/attention_norm", x))
        x = x + blocks.mlp(name, blocks.norm(f"{name}/intermediate_norm", x))
    if asked is not None:
        x = tf.gather(tf.reshape(x, (m, s, config.hidden)), asked, batch_dims=1)  # (M, K, D)
        x = tf.reshape(x, (m * shape_of(asked)[1], config.hidden))
    x = blocks.norm("final_norm", x)
    return layers.tied_projection(x, WORD, None) if tied else layers.linear(HEAD, x, bias=False)


def _next_logits(
    layers: Layers, config: CausalConfig, ids: Tensor, lengths: Tensor, positions: Tensor
) -> Tensor:
    """Ask every position but the last, whatever is asked; padding at the end weighs nothing."""
    return causal_logits(layers, config, ids[:, :-1])  # (M·(S − 1), V)


causal_row_losses = row_losses(_next_logits)  # answers are the next tokens
