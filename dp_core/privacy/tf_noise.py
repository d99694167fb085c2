"""Gaussian noise for training, in TensorFlow, from a key that is an argument and never a constant.

Float32: the ε that is accounted is that of real arithmetic (docs/adr/0006-randomness.md). Two
weaknesses of a single float32 Box-Muller draw are removed by adding up four of them:

* its uniform has 23 bits and is clipped at 10⁻⁷, so no draw lies beyond √(2 ln 10⁷) = 5.68 σ.
  A gradient one σ away makes the mechanism leave the other's support with probability
  Φ̄(4.68) = 1.4·10⁻⁶ in every update: more than a usual δ. Four draws reach 11.4 σ.
* the gaps of its image tell which sums were possible (Mironov 2012 for Laplace); a sum of four
  has far too many preimages to enumerate (Holohan and Braghin 2021, arXiv:2107.10138).
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from dp_core.privacy.noise import SUMMANDS


def gaussian(shape: Sequence[int] | tf.Tensor, key: tf.Tensor, stddev: float | tf.Tensor) -> tf.Tensor:
    """Return N(0, stddev²) noise, float32, a function of shape and key alone.

    The generator is named (Philox), not left to the device, so that CPUs, GPUs and any number
    of shards draw the same bits.

    Args:
        shape: of the variable.
        key: int64 [2] from `noise.noise_key`; pass it to a `tf.function` as a tensor, for a
            constant would be written into the graph, and with it a part of the secret.
        stddev: in units of the gradient sum: effective noise multiplier times clip norm.
    """
    key = tf.convert_to_tensor(key, tf.int64)
    total = tf.zeros(shape, tf.float32)
    for summand in range(SUMMANDS):
        own = key + tf.constant([0, summand], tf.int64)
        total += tf.random.stateless_normal(shape, own, alg="philox")
    scale = tf.cast(stddev, tf.float32) / tf.sqrt(tf.constant(float(SUMMANDS), tf.float32))
    return total * scale
