"""Causal language models: the next token's logits, and a row's loss.

GPT-2 and Llama are pre-norm Transformers with causal attention: attention and MLP read the
normalised residual stream and add to it. Shapes: M rows, S tokens, hidden size D. As in the
encoder, rows are independent. Padding is at the end of a row, where no earlier position attends
to it.
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
    """Norm, attention and MLP of an architecture's blocks."""

    def norm(self, name: str, x: Tensor) -> Tensor:
        """(N, D) -> (N, D)."""

    def attention(self, name: str, x: Tensor) -> Tensor:
        """(M·S, D) -> (M·S, D), of the block `name`."""

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """(M·S, D) -> (M·S, D), of the block `name`."""


@dataclass(frozen=True)
class Gpt2Blocks:
    """The blocks of GPT-2 (Radford et al. 2019): LayerNorm, attention and MLP as in BERT."""

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
    layers: Layers, config: CausalConfig, ids: Tensor, positions: Tensor | None = None
) -> Tensor:
    """Return the logits of the next token at each position.

    Args:
        layers: the layers, which hold the parameters.
        config: the shape.
        ids: (M, S) int32 token ids, padded at the end.
        positions: (M, K) int32, positions whose logits are returned, K static; all if None.

    Returns:
        (M·S, V) float32, or (M·K, V).
    """
    if isinstance(config, FeedForwardConfig):
        return feed_forward_logits(layers, config, ids, positions)
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
    if positions is not None:
        x = tf.gather(tf.reshape(x, (m, s, config.hidden)), positions, batch_dims=1)  # (M, K, D)
        x = tf.reshape(x, (m * shape_of(positions)[1], config.hidden))
    x = blocks.norm("final_norm", x)
    return layers.tied_projection(x, WORD, None) if tied else layers.linear(HEAD, x, bias=False)


def _next_logits(
    layers: Layers, config: CausalConfig, ids: Tensor, lengths: Tensor, positions: Tensor
) -> Tensor:
    """Return the logits of all positions but the last; padding has weight 0 in the loss."""
    return causal_logits(layers, config, ids[:, :-1])  # (M·(S − 1), V)


causal_row_losses = row_losses(_next_logits)  # labels: the next tokens
