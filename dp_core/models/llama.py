"""The blocks of Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Touvron et al. 2023 (arXiv:2302.13971, 2307.09288); Grattafiori et al. 2024 (arXiv:2407.21783).
Shapes: M rows, S tokens, hidden size D, MLP size F, H query heads, G key and value heads, heads of
width W. No layer has a bias.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.models.config import LlamaConfig
from dp_core.nn.layers import Layers, Tensor


@dataclass(frozen=True)
class LlamaBlocks:
    """Norm, attention and MLP of the blocks in one forward pass."""

    layers: Layers
    config: LlamaConfig
    bias: Tensor  # (S, S)
    shape: tuple[Any, Any]  # M and S

    def norm(self, name: str, x: Tensor) -> Tensor:
        """(N, D) -> (N, D)."""
        return self.layers.rms_norm(name, x, self.config.layer_norm_epsilon)

    def attention(self, name: str, x: Tensor) -> Tensor:
        """(M·S, D) -> (M·S, D), where H / G query heads share one key and value head."""
        heads, key_heads = self.config.heads, self.config.key_heads
        q = self._rotated(self._by_head(f"{name}/query", x, heads))
        k = self._rotated(self._by_head(f"{name}/key", x, key_heads))
        v = self._by_head(f"{name}/value", x, key_heads)
        shared = heads // key_heads
        if shared > 1:  # the query heads of a group are adjacent
            k, v = (tf.repeat(t, shared, axis=1) for t in (k, v))
        mixed = self.layers.mixed_values(name, q, k, v, self.bias)  # (M·S, H·W)
        return self.layers.linear(f"{name}/attention_output", mixed, bias=False)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        """(M·S, D) -> (M·S, D)."""
        gate = self.layers.linear(f"{name}/gate", x, bias=False)  # (M·S, F)
        inner = tf.nn.silu(gate) * self.layers.linear(f"{name}/intermediate", x, bias=False)
        return self.layers.linear(f"{name}/output", inner, bias=False)

    def _by_head(self, name: str, x: Tensor, heads: int) -> Tensor:
        y = self.layers.linear(name, x, bias=False)
        y = tf.reshape(y, (*self.shape, heads, self.config.head_width))
        return tf.transpose(y, (0, 2, 1, 3))  # (M, heads, S, W)

    def _rotated(self, x: Tensor) -> Tensor:
        """Rotate each pair of values by the angle of its position: (M, heads, S, W) -> the same.

        Value i is paired with value i + W/2, as in Hugging Face's checkpoints, and not with its
        neighbour as in the paper.
        """
        first, second = tf.split(x, 2, axis=3)
        cosines, sines = self._waves
        return x * cosines + tf.concat([-second, first], axis=3) * sines

    @functools.cached_property
    def _waves(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of position times frequency: (S, W) each."""
        frequencies = tf.constant(rotary_frequencies(self.config), tf.float32)  # (W/2,)
        angles = tf.cast(tf.range(self.shape[1]), tf.float32)[:, None] * frequencies  # (S, W/2)
        angles = tf.concat([angles, angles], axis=1)  # (S, W)
        return tf.cos(angles), tf.sin(angles)


def rotary_frequencies(config: LlamaConfig) -> NDArray[np.float64]:
    """Return the rotary frequency θ^(−2i/W) of each pair, scaled by `RopeScaling`: (W/2,).

    Su et al. 2021 (arXiv:2104.09864).
    """
    exponents: NDArray[np.float64] = np.arange(0, config.head_width, 2) / config.head_width
    frequencies: NDArray[np.float64] = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.context * frequencies / (2 * math.pi)
    kept = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
    frequencies *= kept + (1 - kept) / scaling.factor
    return frequencies
