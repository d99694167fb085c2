"""Functions whose derivative is written out: automatic differentiation would pass over the data

twice as often, and on a CPU such passes are what a small BERT spends its time on beside products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

Tensor = Any  # tf.Tensor: TensorFlow ships no types
Backward = Callable[[Tensor], Tensor]

_SQRT_HALF = math.sqrt(0.5)
_DENSITY_AT_0 = 1.0 / math.sqrt(2.0 * math.pi)
_SLOPE, _CUBIC = math.sqrt(2.0 / math.pi), 0.044715  # of GPT-2's approximation


def _gelu(x: Tensor) -> tuple[Tensor, Backward]:
    below = 0.5 * tf.math.erf(x * _SQRT_HALF) + 0.5  # Φ(x)

    def backward(g: Tensor) -> Tensor:
        return g * (below + x * (_DENSITY_AT_0 * tf.exp(-0.5 * tf.square(x))))

    return x * below, backward


def _cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Callable[..., Any]]:
    highest = tf.reduce_max(logits, axis=1, keepdims=True)  # (N, 1)
    powers = tf.exp(logits - highest)  # (N, V)
    total = tf.reduce_sum(powers, axis=1)  # (N,)
    own = tf.gather(logits, labels, batch_dims=1)  # (N,)

    def backward(g: Tensor) -> tuple[Tensor, None]:
        rows = tf.range(tf.shape(labels)[0])
        places = tf.stack([rows, labels], axis=1)  # (N, 2)
        spread = powers * (g / total)[:, None]
        return tf.tensor_scatter_nd_sub(spread, places, g), None

    return tf.math.log(total) + highest[:, 0] - own, backward


def _gelu_new(x: Tensor) -> tuple[Tensor, Backward]:
    squared = tf.square(x)
    bent = tf.tanh(_SLOPE * x * (1.0 + _CUBIC * squared))

    def backward(g: Tensor) -> Tensor:
        steepness = _SLOPE * (1.0 + 3.0 * _CUBIC * squared)
        return g * 0.5 * (1.0 + bent + x * (1.0 - tf.square(bent)) * steepness)

    return 0.5 * x * (1.0 + bent), backward


_gelu_new_with_gradient = tf.custom_gradient(_gelu_new)
_gelu_with_gradient = tf.custom_gradient(_gelu)
_cross_entropy_with_gradient = tf.custom_gradient(_cross_entropy)


def gelu(x: Tensor) -> Tensor:
    """x·Φ(x), exactly (Hendrycks and Gimpel 2016), as Hugging Face's `gelu` computes it."""
    return _gelu_with_gradient(x)


def gelu_new(x: Tensor) -> Tensor:
    """x·Φ(x) approximately, by tanh, as GPT-2 and Hugging Face's `gelu_new` compute it."""
    return _gelu_new_with_gradient(x)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """−log softmax at the label, in nats: (N, V), (N,) -> (N,)."""
    return _cross_entropy_with_gradient(logits, labels)


def standardise(x: Tensor, epsilon: float) -> Tensor:
    """(N, D) -> (N, D) with mean 0 and variance 1 along the last axis."""

    def forward(x: Tensor) -> tuple[Tensor, Backward]:
        centred = x - tf.reduce_mean(x, axis=-1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centred), axis=-1, keepdims=True)
        scale = tf.math.rsqrt(variance + epsilon)
        y = centred * scale

        def backward(g: Tensor) -> Tensor:
            along = tf.reduce_mean(g * y, axis=-1, keepdims=True)
            return scale * (g - tf.reduce_mean(g, axis=-1, keepdims=True) - y * along)

        return y, backward

    return tf.custom_gradient(forward)(x)
