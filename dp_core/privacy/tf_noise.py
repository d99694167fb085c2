"""Gaussian noise for training, in TensorFlow, from a key that is an argument and never a constant.

Float32: the ε that is accounted is that of real arithmetic (docs/adr/0006-randomness.md). It is
made here from Philox bits and not by `tf.random.stateless_normal`, for three reasons:

* **Layout.** XLA (and so every TPU) turns the same key into other normals than the CPU kernel
  does, while the bits agree everywhere; so a resumed run draws the same noise on any device.
* **Tail.** The kernel's uniform has 23 bits and is clipped at 10⁻⁷: no draw lies beyond
  √(2 ln 10⁷) = 5.68 σ. A gradient one σ away then makes the mechanism leave the other's support
  with probability Φ̄(4.68) = 1.4·10⁻⁶ in every update, more than a usual δ. Here the uniform
  has 32 bits, and four draws are added up: they reach 2·√(2 ln 2³³) = 13.5 σ.
* **Gaps.** Which float sums are possible tells what was added (Mironov 2012). A sum of four
  draws has too many preimages to enumerate (Holohan and Braghin 2021, arXiv:2107.10138).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from dp_core.privacy.noise import SUMMANDS

RNG_VERSION = "philox4x32-10/box-muller-32/sum-4"  # belongs in the manifest of a run


def gaussian(shape: Sequence[int], key: tf.Tensor, stddev: float | tf.Tensor) -> tf.Tensor:
    """Return N(0, stddev²) noise, float32, a function of shape and key alone.

    Args:
        shape: of the variable; static.
        key: int64 [2] from `noise.noise_key`; pass it to a `tf.function` as a tensor, for a
            constant would be written into the graph, and with it a part of the secret.
        stddev: in units of the gradient sum: effective noise multiplier times clip norm.
    """
    key = tf.convert_to_tensor(key, tf.int64)
    size = math.prod(shape)
    total = tf.zeros([size], tf.float32)
    for summand in range(SUMMANDS):
        total += _standard_normal(size, key + tf.constant([0, summand], tf.int64))
    scale = tf.cast(stddev, tf.float32) / math.sqrt(SUMMANDS)
    return tf.reshape(total * scale, shape)


def _standard_normal(size: int, key: tf.Tensor) -> tf.Tensor:
    """Return [size] normals by Box and Muller: a pair of uniforms gives a pair of normals."""
    pairs = (size + 1) // 2
    bits = tf.random.stateless_uniform(
        [2, pairs], key, minval=None, maxval=None, dtype=tf.uint32, alg="philox"
    )
    uniform = (tf.cast(bits, tf.float32) + 0.5) * 2.0**-32  # in (0, 1]: its logarithm is finite
    radius = tf.sqrt(-2.0 * tf.math.log(uniform[0]))
    angle = (2.0 * math.pi) * uniform[1]
    both = tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], axis=0)
    return both[:size]
