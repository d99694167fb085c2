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

Numba compiles it for the processor at hand: bits, noise, addition and rounding happen in its
cache, so that noise costs one pass over the sums (docs/adr/0015-noise-in-cache.md). A processor
that cannot add a product without rounding it first may differ in a normal's last place, which
moves a value by one place of the grid about once in 4000.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from dp_core.privacy.noise import keystream

Words = NDArray[np.int32]  # (3, pairs): two words for a pair's radius, one for its angle
Vector = NDArray[np.float32]
_Compiled = TypeVar("_Compiled", bound=Callable[..., Any])
_GRID = 2.0**-11  # of the power of two at or below the noise's standard deviation

# Numba would widen operations on 32 bits to 64, half as many at a time: each is narrowed again.
_f, _i = np.float32, np.int32
_LOW_31 = _i(0x7FFFFFFF)
_ROOT_HALF = _i(0x3F3504F3)  # √½ as a float's bits
_LN_2 = _f(math.log(2))
# Moshier's Cephes, single precision, from the highest power down
_LOG = tuple(
    _f(c)
    for c in (
        *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
        *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
    )
)
_SINE = tuple(_f(c) for c in (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1))
_COSINE = tuple(_f(c) for c in (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2))


def noise_words(key: NDArray[np.uint8], size: int, block: int = 0) -> Words:
    """Return the random words of `size` normals, block `block` of a key: int32 (3, ⌈size/2⌉)."""
    pairs = (size + 1) // 2
    return keystream(key, 3 * pairs, block).reshape(3, pairs)


def scaled_normals(words: Words, stddev: float) -> Vector:
    """(3, n) words from `noise_words` -> (2n,) independent draws from N(0, stddev²)."""
    noise = np.zeros(2 * words.shape[1], np.float32)
    _add_normals(words, _f(stddev), noise)
    return noise


def noised_mean(
    total: Vector, draws: Iterable[Words], stddev: float, divisor: float, out: Vector
) -> None:
    """Add noise to a sum, round to the grid, divide: in one pass over memory.

    Args:
        total: (n,), a clipped sum.
        draws: words of every draw whose sum is the noise, each (3, ⌈n/2⌉); at least one.
        stddev: of one draw, positive.
        divisor: what the noised sum is divided by.
        out: (n,), where the mean goes.
    """
    noise, words = None, iter(draws)
    last = next(words)
    for following in words:  # one at a time: there may be thousands
        if noise is None:
            noise = np.zeros(2 * last.shape[1], np.float32)
        _add_normals(last, _f(stddev), noise)
        last = following
    step = grid(stddev)
    _add_last_and_round(total, noise, last, _f(stddev), _f(1 / step), _f(step / divisor), out)


def grid(stddev: float) -> float:
    """Return the power of two that noised sums are multiples of."""
    return math.ldexp(_GRID, math.frexp(_f(stddev))[1] - 1)


def _compiled(function: _Compiled) -> _Compiled:
    """Compile for this processor, at the first call; other threads run while it is at work.

    "contract": a product may be added to something without being rounded before, where the
    processor can: no less exact, and a third faster. Nothing else is reordered.
    """
    return cast(_Compiled, numba.njit(function, nogil=True, fastmath={"contract"}))


@_compiled
def _add_normals(words: Words, stddev: np.float32, noise: Vector) -> None:
    """(3, n) words: add N(0, stddev²) to each of the (2n,) values."""
    n = words.shape[1]
    coarse, fine, turn = words[0], words[1], words[2]
    low, high = noise[:n], noise[n:]
    for i in range(n):
        x, y = _pair(coarse[i], fine[i], turn[i])
        low[i] += stddev * x
        high[i] += stddev * y


@_compiled
def _add_last_and_round(
    total: Vector,
    noise: Vector | None,
    words: Words,
    stddev: np.float32,
    places: np.float32,
    factor: np.float32,
    out: Vector,
) -> None:
    """(n,) total: set out = round((total + (noise + one more draw)) · places) · factor."""
    n = words.shape[1]
    coarse, fine, turn = words[0], words[1], words[2]
    low, high = total[:n], total[n:]
    low_out, high_out = out[:n], out[n:]
    for i in range(len(high)):
        x, y = _pair(coarse[i], fine[i], turn[i])
        x, y = stddev * x, stddev * y
        if noise is not None:
            x, y = noise[i] + x, noise[n + i] + y
        low_out[i] = np.rint((low[i] + x) * places) * factor
        high_out[i] = np.rint((high[i] + y) * places) * factor
    if len(high) < n:  # an odd number of values: the last pair's second normal is not wanted
        x, _ = _pair(coarse[n - 1], fine[n - 1], turn[n - 1])
        x = stddev * x
        if noise is not None:
            x = noise[n - 1] + x
        low_out[n - 1] = np.rint((low[n - 1] + x) * places) * factor


@_compiled
def _pair(coarse: np.int32, fine: np.int32, turn: np.int32) -> tuple[np.float32, np.float32]:
    """Three words -> two standard normals by Box and Muller (1958).

    The uniform of the radius is (a + (b + ½)·2⁻³¹)·2⁻³¹ with 31-bit a and b: never 0, and as fine
    near 0, where the tail is, as 62 bits can be. The angle is a quarter turn by two bits of its
    word and the rest of ±π/4. On these ranges short polynomials are logarithm, sine and cosine
    (6·10⁻⁸); a library's would be called value by value.
    """
    a, b = _f(_i(coarse & _LOW_31)), _f(_i(fine & _LOW_31))
    uniform = _f(a * _f(2.0**-31) + (b + _f(0.5)) * _f(2.0**-62))
    bits = _f(uniform).view(_i)
    exponent = _i(_i(bits - _ROOT_HALF) >> _i(23))
    m = _i(bits - _i(exponent << _i(23))).view(_f) - _f(1)  # uniform = 2^exponent · (1 + m)
    log = _f(exponent) * _LN_2 + (m + m * m * (m * _polynomial(m, _LOG) - _f(0.5)))
    radius = np.sqrt(_f(-2) * log)
    angle = _f(_i(turn >> _i(2))) * _f(math.pi / 4 * 2.0**-29)
    square = angle * angle
    sine = angle + angle * square * _polynomial(square, _SINE)
    cosine = _f(1) - _f(0.5) * square + square * square * _polynomial(square, _COSINE)
    if _i(turn & _i(2)) != 0:
        radius = -radius
    if _i(turn & _i(1)) != 0:
        sine, cosine = cosine, -sine
    return radius * cosine, radius * sine


@_compiled
def _polynomial(x: np.float32, coefficients: tuple[np.float32, ...]) -> np.float32:
    value = coefficients[0]
    for c in coefficients[1:]:
        value = value * x + c
    return value
