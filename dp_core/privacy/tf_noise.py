"""Gaussian noise for training, from keyed bits, and its addition to a sum.

Float32: the ε that is accounted is that of real arithmetic. What is done so that floats give less
away than they might (docs/adr/0007-noise-at-no-cost.md):

* **Bits** come from AES-256 in counter mode, so that released weights, which are sums of earlier
  noises, tell nothing about the next, on the usual assumption about AES.
* **Tail.** TensorFlow's own normals stop at 5.68 σ: a gradient one σ away makes the mechanism leave
  the other's support with probability Φ̄(4.68) = 1.4·10⁻⁶ in every update, more than a usual δ.
  Here the radius comes from a uniform on multiples of 2⁻⁶²: it reaches √(2 ln 2⁶³) = 9.35 σ, and
  Φ̄(8.35) = 3.4·10⁻¹⁷.
* **Gaps.** Which floats are possible as sums tells what was added (Mironov 2012). So the noised sum
  is rounded to multiples of a power of two that the noise's scale alone decides, 2⁻¹² to 2⁻¹¹ of
  it. Float addition is the real sum, rounded to a float: both roundings are fixed functions of the
  real sum of gradient and noise, post-processing, whatever its size. A place on the grid near 0
  has over 2⁸⁰ of the 2⁹⁴ possible words of a pair behind it, at 8 σ still over 2³⁴.

XLA compiles it for the CPU. Another compiler may round a logarithm
differently in the last place, which moves a value by one place of the grid about once in 4000.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.privacy.noise import keystream

Tensor = Any  # tf.Tensor: TensorFlow ships no types
_Compiled = TypeVar("_Compiled", bound=Callable[..., Any])
_GRID = 2.0**-11  # of the power of two at or below the noise's standard deviation
_EXPONENT = 0x7F800000  # of a float32: what is left of a positive one is a power of two


def noise_words(key: NDArray[np.uint8], size: int) -> NDArray[np.int32]:
    """Return the random words of `size` normals: int32 (3, ⌈size/2⌉)."""
    pairs = (size + 1) // 2
    return keystream(key, 3 * pairs).reshape(3, pairs)


def _compiled(function: _Compiled) -> _Compiled:
    return cast(_Compiled, tf.function(function, jit_compile=True, autograph=False))


@_compiled
def scaled_normals(words: Tensor, stddev: Tensor) -> Tensor:
    """(3, n) words from `noise_words` -> (n,) complex64, both parts N(0, stddev²).

    As complex numbers, one pass makes both normals of a pair where it writes them; as two results,
    or one after the other, they would take half as long again.
    """
    real, imaginary = _pairs(words)
    return tf.complex(real * stddev, imaginary * stddev)


@_compiled
def noised_mean(sum_: Tensor, noise: Tensor, stddev: Tensor, divisor: Tensor) -> Tensor:
    """Add noise to a sum, round to the grid, divide: in one pass over memory.

    Args:
        sum_: float32, a clipped sum.
        noise: of its shape, the sum of the draws.
        stddev: scalar float32 > 0, of one draw.
        divisor: scalar float32.
    """
    step = grid(stddev)
    return tf.round((sum_ + noise) * (1.0 / step)) * (step / divisor)  # 1/step is exact


def grid(stddev: Tensor) -> Tensor:
    """Return the power of two that noised sums are multiples of: scalar -> scalar, float32."""
    bits = tf.bitwise.bitwise_and(tf.bitcast(stddev, tf.int32), _EXPONENT)
    return tf.bitcast(bits, tf.float32) * _GRID


def _pairs(words: Tensor) -> tuple[Tensor, Tensor]:
    """(3, n) int32 -> twice (n,) standard normals by Box and Muller (1958).

    The uniform of the radius is (a + (b + ½)·2⁻³¹)·2⁻³¹ with 31-bit a and b: never 0, and as fine
    near 0, where the tail is, as 62 bits can be. The angle is a quarter turn by two bits of its
    word and the rest of ±π/4, on which two short polynomials are sine and cosine (Moshier's
    Cephes, single precision: 6·10⁻⁸); library sines would cost five times the rest.
    """
    coarse, fine = (
        tf.cast(tf.bitwise.bitwise_and(words[i], 0x7FFFFFFF), tf.float32) for i in (0, 1)
    )
    uniform = coarse * 2.0**-31 + (fine + 0.5) * 2.0**-62
    radius = tf.sqrt(-2.0 * tf.math.log(uniform))
    turns = tf.bitwise.bitwise_and(words[2], 3)
    angle = tf.cast(tf.bitwise.right_shift(words[2], 2), tf.float32) * (math.pi / 4 * 2.0**-29)
    square = angle * angle
    sine = angle + angle * square * (
        -1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4)
    )
    cosine = (
        1.0
        - 0.5 * square
        + square
        * square
        * (4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5))
    )
    turned = tf.equal(tf.bitwise.bitwise_and(turns, 1), 1)
    signed = tf.where(tf.equal(tf.bitwise.bitwise_and(turns, 2), 0), radius, -radius)
    return signed * tf.where(turned, -sine, cosine), signed * tf.where(turned, cosine, sine)
