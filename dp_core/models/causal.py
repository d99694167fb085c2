"""Causal language models: the next token's logits, a row's loss, and generated text.

GPT-2 and Llama are pre-norm Transformers with causal attention: attention and MLP read the
normalised residual stream and add to it. The feed-forward model predicts a token from a window of
earlier tokens. As in the encoder, rows are independent. Padding is at the end of a row, where no
earlier position attends to it.

Shapes: M rows, S tokens, hidden size D, MLP size F, V tokens of the vocabulary; in Llama H query
heads, G key and value heads, heads of width W.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput
from dp_core.models.config import CausalConfig, FeedForwardConfig, Gpt2Config, LlamaConfig
from dp_core.models.parameters import HEAD, POSITION, WORD, AnyModel
from dp_core.nn import (
    FAR_BELOW,
    Layers,
    Tensor,
    Waves,
    frequencies_of,
    gelu_new,
    rotary_waves,
    rotated,
    row_losses,
    shape_of,
)


@dataclass(frozen=True)
class Gpt2Blocks:
    """The blocks of GPT-2 (Radford et al. 2019): attention and MLP as in BERT."""

    layers: Layers
    config: Gpt2Config
    bias: Tensor  # (S, S)
    shape: tuple[Any, Any]  # M and S

    def attention(self, name: str, x: Tensor) -> Tensor:
        """(M·S, D) -> (M·S, D)."""
        return self.layers.attention(name, x, self.bias, self.shape, self.config.heads)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """(M·S, D) -> (M·S, D)."""
        inner = gelu_new(self.layers.linear(f"{name}/intermediate", x))  # (M·S, F)
        return self.layers.linear(f"{name}/output", inner)


@dataclass(frozen=True)
class LlamaBlocks:
    """The blocks of Llama: rotary positions, grouped-query attention, SwiGLU; no bias.

    Touvron et al. 2023 (arXiv:2302.13971, 2307.09288); Grattafiori et al. 2024 (arXiv:2407.21783).
    """

    layers: Layers
    config: LlamaConfig
    bias: Tensor  # (S, S)
    shape: tuple[Any, Any]  # M and S

    def attention(self, name: str, x: Tensor) -> Tensor:
        """(M·S, D) -> (M·S, D), where H / G query heads share one key and value head."""
        heads, key_heads = self.config.heads, self.config.key_heads
        q = rotated(self._by_head(f"{name}/query", x, heads), self._waves)
        k = rotated(self._by_head(f"{name}/key", x, key_heads), self._waves)
        v = self._by_head(f"{name}/value", x, key_heads)
        shared = heads // key_heads
        if shared > 1:  # the query heads of a group are adjacent
            k, v = (tf.repeat(t, shared, axis=1) for t in (k, v))
        mixed = self.layers.mixed_values(name, q, k, v, self.bias)  # (M·S, H·W)
        return self.layers.linear(f"{name}/attention_output", mixed)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """(M·S, D) -> (M·S, D)."""
        gate = self.layers.linear(f"{name}/gate", x)  # (M·S, F)
        inner = tf.nn.silu(gate) * self.layers.linear(f"{name}/intermediate", x)
        return self.layers.linear(f"{name}/output", inner)

    def _by_head(self, name: str, x: Tensor, heads: int) -> Tensor:
        y = self.layers.linear(name, x)
        y = tf.reshape(y, (*self.shape, heads, self.config.head_width))
        return tf.transpose(y, (0, 2, 1, 3))  # (M, heads, S, W)

    @functools.cached_property
    def _waves(self) -> Waves:
        return rotary_waves(rotary_frequencies(self.config), self.shape[1])


def rotary_frequencies(config: LlamaConfig) -> NDArray[np.float64]:
    """Return the rotary frequency of each pair, scaled by `RopeScaling`: (W/2,)."""
    frequencies = frequencies_of(config.rope_theta, config.head_width)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    frequencies *= kept + (1 - kept) / scaling.factor
    return frequencies


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
        return _feed_forward_logits(layers, config, ids, positions)
    m, s = shape_of(ids)
    ahead = tf.range(s)[None, :] > tf.range(s)[:, None]  # (S, S)
    bias = FAR_BELOW * tf.cast(ahead, tf.float32)
    blocks: Gpt2Blocks | LlamaBlocks
    if isinstance(config, LlamaConfig):
        blocks, norm = LlamaBlocks(layers, config, bias, (m, s)), layers.rms_norm
        position, tied = None, config.tied
    else:
        assert isinstance(config, Gpt2Config)  # noqa: S101 - narrows the type
        blocks, norm = Gpt2Blocks(layers, config, bias, (m, s)), layers.layer_norm
        position, tied = POSITION, True
    x = layers.embed(ids, None, WORD, position, None)
    x = tf.reshape(x, (m * s, config.hidden))  # (M·S, D): every layer from here on is by token
    x = layers.dropout(x)
    epsilon = config.layer_norm_epsilon
    for i in range(config.layers):
        name = f"layer_{i}"
        attended = blocks.attention(name, norm(f"{name}/attention_norm", x, epsilon))
        x = x + layers.dropout(attended)
        x = x + layers.dropout(blocks.mlp(name, norm(f"{name}/intermediate_norm", x, epsilon)))
    if positions is not None:
        x = tf.gather(tf.reshape(x, (m, s, config.hidden)), positions, batch_dims=1)  # (M, K, D)
        x = tf.reshape(x, (m * shape_of(positions)[1], config.hidden))
    x = norm("final_norm", x, epsilon)
    return layers.tied_projection(x, WORD, None) if tied else layers.linear(HEAD, x)


def _feed_forward_logits(
    layers: Layers, config: FeedForwardConfig, ids: Tensor, positions: Tensor | None = None
) -> Tensor:
    """Return the logits of the next token; arguments and result are as in `causal_logits`.

    Bengio et al. 2003 (JMLR 3:1137-1155), with ReLU instead of tanh and without direct
    connections, as in Kerrigan et al. 2020 (arXiv:2009.05886).
    """
    m, s = shape_of(ids)
    before = tf.fill((m, config.window - 1), config.begin)  # left padding of the first windows
    every = layers.embed(tf.concat([before, ids], axis=1), None, WORD, None, None)
    if positions is None:  # (M, S + W − 1, D): the window of position i begins at i
        windows = tf.concat([every[:, i : i + s] for i in range(config.window)], axis=2)
    else:
        windows = tf.gather(every, positions[:, :, None] + tf.range(config.window), batch_dims=1)
    x = tf.reshape(windows, (-1, config.window * config.hidden))
    for i in range(config.layers):
        x = layers.dropout(tf.nn.relu(layers.linear(f"layer_{i}/intermediate", x)))
    return layers.linear(HEAD, x)


def _next_logits(
    layers: Layers, config: CausalConfig, ids: Tensor, lengths: Tensor, positions: Tensor
) -> Tensor:
    """Return the logits of all positions but the last; padding has weight 0 in the loss."""
    return causal_logits(layers, config, ids[:, :-1])  # (M·(S − 1), V)


causal_row_losses = row_losses(_next_logits)  # labels: the next tokens


TOP_K = 40  # as in Radford et al. 2019


def continuations(
    model: AnyModel, beginning: Sequence[int], *, texts: int, tokens: int, seed: int
) -> list[list[int]]:
    """Return independent samples of texts that continue a prompt.

    Each token is sampled from the `TOP_K` most likely tokens in proportion to their probabilities
    (Fan et al. 2018, arXiv:1805.04833). A text ends with the model's end token. Other special
    tokens are never sampled.

    Args:
        model: a causal model.
        beginning: the prompt as ids, without the begin token.
        texts: n.
        tokens: the largest T; a row of the model may have room for fewer.
        seed: public.

    Returns:
        The ids of each continuation, without the prompt. The text of a released model is
        post-processing of its weights and has no privacy cost.

    Raises:
        BadInput: the model is not causal, its logits are not finite, or a row has no room for a
            token.
    """
    config = model.config
    if not isinstance(config, CausalConfig):
        raise BadInput("a masked model generates no text", where="model")
    shown = [config.begin, *beginning]
    width = min(len(shown) + tokens, config.max_positions)
    if len(shown) >= width:
        raise BadInput(
            f"a beginning of {len(beginning)} tokens leaves no room in rows of "
            f"{config.max_positions}",
            where="sample_prompt",
            fix="Give a shorter one.",
        )
    layers = Layers({name: tf.constant(value) for name, value in model.parameters.items()})

    def logits_at(ids: Tensor, place: Tensor) -> Tensor:
        return causal_logits(layers, config, ids, tf.fill((texts, 1), place))  # (n, V)

    compiled = tf.function(logits_at, autograph=False)
    coins = np.random.default_rng(seed)
    ids = np.full((texts, width), config.end, np.int32)
    ids[:, : len(shown)] = shown
    for place in range(len(shown), width):
        logits = compiled(tf.constant(ids), tf.constant(place - 1)).numpy().astype(np.float64)
        if not np.isfinite(logits).all():
            raise BadInput("the model's logits are not finite", where="model")
        ids[:, place] = _drawn(logits, config.end, coins)
    made = ids[:, len(shown) :].tolist()
    return [row[: row.index(config.end)] if config.end in row else row for row in made]


def _drawn(logits: NDArray[np.float64], end: int, coins: np.random.Generator) -> NDArray[np.int64]:
    """Sample one of the `TOP_K` most likely tokens of each row: (n, V) -> (n,)."""
    markers = [marker for marker in SpecialIds().as_tuple() if marker != end]
    logits[:, markers] = -np.inf
    kept = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K]  # (n, k)
    values = np.take_along_axis(logits, kept, axis=1)
    chances = np.exp(values - values[:, :1])
    reached = np.cumsum(chances, axis=1) / chances.sum(axis=1, keepdims=True)
    places = (reached < coins.random((len(logits), 1))).sum(axis=1)
    return np.take_along_axis(kept, places[:, None], axis=1)[:, 0]
