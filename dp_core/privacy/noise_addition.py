"""Training noise: an exact discrete Gaussian on a lattice so fine that it is a Gaussian.

*The mechanism.* A clipped sum is rounded to a lattice, 2²⁸ steps of which are one standard
deviation S of the noise; an integer from the discrete Gaussian N_ℤ(0, S²) is added to each
value; the sum is divided. All values are integers until the division, which is post-processing, so
no low bits of floats can leak (Mironov 2012).

*Accounting.* The mechanism is accounted as a continuous Gaussian with the plan's noise multiplier.

1. *Lattice.* Let τ = 4. For whole numbers a, the law of a + N_ℤ(0, S²) is within a factor
   1 ± 10⁻¹³⁶ of this: add N(0, S² − τ²) to a, then draw from the discrete Gaussian of width τ
   around the real number that came out. (Peikert 2010, Theorem 3.1, whose smoothing error is
   2·exp(−2π²τ²), by Poisson summation, in these units; Micciancio and Regev 2007.) The second
   draw sees only the output of the continuous Gaussian mechanism: it is post-processing. So
   integers of deviation S are as private as a real Gaussian of deviation √(S² − τ²), which is
   S·(1 − 10⁻¹⁶), in any number of dimensions and under any adaptive composition.
2. *Rounding.* Neighbouring sums that differ by C in ℓ₂ norm differ, once rounded, by at most
   C·scale + 1.5·√d steps for d values (½ for each rounding, and at most ¼ for the error of the
   float64 product before it). `lattice_scale` chooses the lattice so that the noise is the plan's
   multiple of *this* difference. At a noise multiplier of 1, rounding takes 6·10⁻⁵ more noise for
   10⁸ values, and 2·10⁻⁴ for 10⁹.
3. *The draw* is exact: every probability is decided by whole numbers, or by a comparison with as
   many digits as necessary (below). Only the tail beyond 15 deviations is cut off, less than 10⁻⁵⁰
   of each draw. For 10⁹ parameters and 10⁶ updates (10¹⁵ draws), the total variation distance is
   below 10⁻³⁵ and adds (1 + e^ε)·10⁻³⁵ to δ. Up to ε = 20 this is less than the last digit of any
   δ that a plan may state, as a float64.

*Drawing a value.* A sign s and a magnitude m ≥ 0 encode m or its mirror image −1 − m.
On each side 4,096 bins of 2⁻¹⁰ deviations hold 4 deviations. In each bin a rectangle fits under
the density, its mass a whole multiple of 2⁻²⁸. One draw in 2,170 falls outside of all rectangles;
the others are settled by 12 bits that name a slot of an alias table (Walker 1977, Vose 1991), 16
that choose between its two bins, 18 that place the magnitude in its bin, and the sign. The
remainder, between rectangles and density, is drawn by rejection from a second stream of the same
key: a bin by whole-number weights, a value in it, and a comparison with the density. Where float64
cannot decide the comparison, decimals of 80 digits do. So rectangles and remainder together are
exactly the discrete Gaussian, in spite of floating-point rounding.

Bits are drawn from AES-256 (`seed_store.keystream`): under the usual assumption about AES, released
weights, which contain earlier noise, reveal nothing about later noise. Numba compiles the pass for
the processor, so that bits, noise, addition and division stay in its cache
(docs/adr/0007-training-noise-is-a-discrete-gaussian.md).
"""

from __future__ import annotations

import decimal
import functools
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numba
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.nn import Tensor
from dp_core.privacy.lattice import DEVIATION, lattice_scale
from dp_core.privacy.matrix_factorization import INDEPENDENT, ToeplitzStrategy
from dp_core.privacy.seed_store import (
    ALIGNMENT,
    Bytes,
    PrivacySeed,
    Words,
    aligned_bytes,
    keystream,
)

if TYPE_CHECKING:
    from dp_core.privacy.correlated_noise import PastNoise

Vector = NDArray[np.float32]
Integers = NDArray[np.int64]
_i = np.int32
_Compiled = TypeVar("_Compiled", bound=Callable[..., Any])

_LARGEST = 2.0**51  # steps; cutting larger sums to it does not increase neighbours' distance

_BLOCK = 1 << 18  # values of one stream of a key
_FEW = 1 << 16  # values; parameters with fewer share blocks, since a block for each costs more
_TOGETHER = "parameters of few values"
_CHUNK = 1 << 12  # values whose noise is kept in the first-level cache until it is added
_GROUP = 64  # values tested together for one that the table does not settle

_BIN = 18  # bits: magnitudes in a bin, 2⁻¹⁰ of a deviation
_COIN = 16  # bits: a slot's choice between its two bins
_SLOTS = 1 << 12  # and bins of the table: 4 deviations
_UNSETTLED = _i((_SLOTS - 1) << _BIN)  # magnitudes from here on are in the bin of the remainder

_TAIL_BLOCKS = 1 << 32  # blocks of the second stream are the first's and a multiple of this
_TAIL_BINS = 15 * (DEVIATION >> _BIN)  # bins of the remainder on each side: 15 deviations
_TAIL_FINE = 46  # bits: the remainder's weights are multiples of 2⁻⁴⁶ of the table's unit
_TAIL_COIN = 50  # bits: a slot's choice between two bins of the remainder
_TRIAL = 2  # 64-bit words: one names a bin; of the other: magnitude in it, sign, uniform number
_UNIFORM = _BIN + 1  # the bit from which on a trial's second word is a uniform number
_TRIALS = 3  # for a value; it takes 2.1
_DOUBT = 2.0**-40  # float64 is trusted to this relative error of the density; it is off by 2⁻⁴⁴


# --- an update's noise


@dataclass(frozen=True)
class UpdateNoise:
    """The noise of one update: independent Gaussian noise on every value of every parameter.

    Attributes:
        seed: of the reservation; all noise is drawn from it.
        manifest: identifies the run for which the noise is drawn.
        t: number of the update.
        noise_multiplier: σ of the whole update, in units of the clip norm.
        clip_norm: bound on what one unit adds to the sum.
        strategy: correlates the updates' noise; σ is for columns of norm 1.
        past: state of the correlated noise; if it is None, it is recomputed from the first update.
    """

    seed: PrivacySeed = field(repr=False)
    manifest: bytes = field(repr=False)
    t: int
    noise_multiplier: float
    clip_norm: float
    strategy: ToeplitzStrategy = INDEPENDENT
    past: PastNoise | None = field(default=None, repr=False, compare=False)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on each value of this update's sum: a public number.

        It is σC, or more if the noise is correlated: later updates then cancel a part of it.
        """
        growth = self.strategy.norm * float(np.linalg.norm(self.strategy.noising(self.t + 1)))
        return self.noise_multiplier * self.clip_norm * growth

    def key(self, name: str) -> Bytes:
        """Return the key (32,) of a parameter's noise. It is secret."""
        return noise_key(self.seed, self.manifest, self.t, name)


def noised_means(
    totals: Mapping[str, Tensor], noise: UpdateNoise, divisor: float
) -> dict[str, Tensor]:
    """Return (sum + noise) / divisor of every parameter.

    The CPU of the training machine computes it, so that other devices cannot draw or round
    differently.

    Args:
        totals: clipped sums by name, float32.
        noise: of this update.
        divisor: of the noised sums.
    """
    sums = {name: np.asarray(memoryview(total)) for name, total in totals.items()}  # no copies
    few = sorted(name for name, array in sums.items() if array.size < _FEW)
    vectors = {name: array.reshape(-1) for name, array in sums.items() if array.size >= _FEW}
    if few:
        vectors[_TOGETHER] = np.concatenate([sums[name].reshape(-1) for name in few])
    means = _noised_vectors(vectors, noise, divisor)
    if few:
        ends = np.cumsum([sums[name].size for name in few])
        means |= zip(few, np.split(means.pop(_TOGETHER), ends[:-1]), strict=True)
    return {name: _tensor(means[name].reshape(array.shape)) for name, array in sums.items()}


def _noised_vectors(
    sums: Mapping[str, Vector], noise: UpdateNoise, divisor: float
) -> dict[str, Vector]:
    values = sum(array.size for array in sums.values())
    scale = lattice_scale(noise.noise_multiplier, noise.clip_norm, values, noise.strategy)
    past = None
    if noise.strategy.bands > 1:
        from dp_core.privacy.correlated_noise import PastNoise

        past = noise.past or PastNoise()
    keys = {name: noise.key(name) for name in sums}
    means = {name: aligned_bytes(array.nbytes).view(np.float32) for name, array in sums.items()}
    blocks = deque((name, j) for name in sums for j in range(-(-sums[name].size // _BLOCK)))

    def work() -> None:
        while True:
            try:
                name, j = blocks.popleft()
            except IndexError:  # all are taken
                return
            block = slice(j * _BLOCK, (j + 1) * _BLOCK)
            total, mean = sums[name][block], means[name][block]
            if past is None:
                noised_mean(total, keys[name], j, scale, divisor, mean)
            else:
                past.add(noise, name, j, total, scale, divisor, mean)

    workers = max(1, min(os.cpu_count() or 1, len(blocks)))
    with ThreadPoolExecutor(workers) as threads:
        for worker in [threads.submit(work) for _ in range(workers)]:
            worker.result()
    return means


def _tensor(array: Vector) -> Tensor:
    """Return the array's own memory as a tensor where it is aligned, else a copy."""
    if array.ctypes.data % ALIGNMENT:
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def noised_mean(
    total: Vector, key: Bytes, block: int, scale: float, divisor: float, out: Vector
) -> None:
    """Round a sum to the lattice, add noise, divide: in one pass over memory.

    Args:
        total: (n,), a clipped sum.
        key: (32,), of the noise.
        block: number of this stretch of values under the key, below 2³².
        scale: lattice steps per 1 in the sum, from `lattice_scale`.
        divisor: of the noised sum.
        out: (n,), receives the mean.
    """
    _add_drawn(total, key, block, scale, 1 / (scale * divisor), out)


def lattice_noise(key: Bytes, size: int, block: int = 0) -> Integers:
    """Return `size` independent draws of the noise N_ℤ(0, `DEVIATION`²), int64."""
    drawn = np.empty(size, np.int64)
    _add_drawn(np.zeros(size, np.float32), key, block, 1.0, 1.0, drawn)
    return drawn


def _add_drawn(
    total: Vector, key: Bytes, block: int, scale: float, factor: float, out: NDArray[Any]
) -> None:
    """Set out = (round(total · scale) + noise) · factor."""
    unsettled = np.empty(total.size, _i)
    words = noise_words(key, total.size, block)
    count = _add_settled(words, _SLOT, total, scale, factor, out, unsettled)
    rest = unsettled[:count]
    added = np.empty(count, out.dtype)
    add_noise(total[rest], _draw_tail(key, block, count), scale, factor, added)
    out[rest] = added


# --- keys and words


def noise_key(seed: PrivacySeed, manifest: bytes, t: int, variable: str) -> Bytes:
    """Return the key (32,) of the noise that variable `variable` gets in update `t`.

    It is HMAC-SHA256 of (manifest, t, variable) under the seed. It does not depend on the layout,
    so a resumed run, or a run on other devices, draws the same noise.
    """
    digest = seed.derive("noise", manifest, t, variable)
    return np.frombuffer(digest[:32], dtype=np.uint8)


def noise_words(key: Bytes, size: int, block: int = 0) -> Words:
    """Return the random words of `size` values, block `block` of a key: int32 (3, ⌈size/2⌉).

    A value of the first half has a word of the first row, one of the second half of the second;
    both have half a word of the third.
    """
    pairs = (size + 1) // 2
    return keystream(key, 3 * pairs, block).reshape(3, pairs)


# --- the tables: rectangles under the density, and the remainder

_PRECISION = 80  # decimal digits
_ROOT_TAU = Decimal(  # √(2π)
    "2.50662827463100050241576528481104525300698674060993831662992357634229365460784197494659582"
)
_UNIT = _SLOTS << _COIN  # masses are multiples of 1/_UNIT
_HEIGHT = (
    _UNIT << _BIN + 1
)  # a rectangle of mass m gives each value in it the probability m/_HEIGHT


def _rectangles() -> tuple[list[int], list[int]]:
    """Return the masses of the rectangles under N_ℤ(0, S²), and the weights of the remainder.

    Bin j holds the magnitudes j·2^_BIN, …, (j + 1)·2^_BIN − 1, whose mirror images are farther
    from 0 by one. So a rectangle as high as the density at the farther edge, and a weight from the
    density at the nearer edge, are right for both signs.

    Returns:
        (_SLOTS,) masses in units of 1/_UNIT; the outermost bin has none, because its number
        denotes the remainder. And (_TAIL_BINS,) the most that each bin holds above its rectangle,
        in units of 2^−_TAIL_FINE/_UNIT.
    """
    with decimal.localcontext(prec=_PRECISION):
        step = Decimal(1 << _BIN) / DEVIATION
        # The normaliser S·√(2π) is off by a factor of 1 + 2·exp(−2π²·S²). Each edge is the one
        # before it times a ratio, which itself falls by a constant factor.
        edge, ratio = _HEIGHT / (_ROOT_TAU * DEVIATION), (-(step**2) / 2).exp()
        change, edges = ratio * ratio, []
        for _ in range(_TAIL_BINS):
            edges.append(edge)
            edge, ratio = edge * ratio, ratio * change
        inside = [int(edge) for edge in edges[1:_SLOTS]] + [0]
        below = [*inside, *([0] * (_TAIL_BINS - _SLOTS))]
        weights = [
            int((edge - mass) * (1 << _TAIL_FINE)) + 2
            for edge, mass in zip(edges, below, strict=True)
        ]
    return inside, weights


def alias_table(masses: Sequence[int], coin_bits: int) -> tuple[list[int], list[int]]:
    """Return the slots of an alias table, each of mass 2^coin_bits, with at most two items each.

    Walker 1977, built as in Vose 1991, in whole numbers: the drawn items have exactly these masses.

    Args:
        masses: of every item; they add up to 2^coin_bits times their number.
        coin_bits: of the coin that chooses within a slot.

    Returns:
        For every slot the threshold below which a coin chooses the item of the slot's number, and
        the item that it chooses otherwise.
    """
    full, mass = 1 << coin_bits, list(masses)
    threshold, other = [0] * len(mass), list(range(len(mass)))
    light = [i for i, m in enumerate(mass) if m < full]
    heavy = [i for i, m in enumerate(mass) if m > full]
    while light:
        i, j = light.pop(), heavy[-1]
        threshold[i], other[i] = mass[i], j
        mass[j] -= full - mass[i]
        if mass[j] <= full:
            heavy.pop()
            if mass[j] < full:
                light.append(j)
    return threshold, other


def _slots(masses: Sequence[int], coin_bits: int) -> list[int]:
    """Return the slots of an alias table: each its threshold and, in the low bits, its alias."""
    threshold, other = alias_table(masses, coin_bits)
    return [t * len(masses) + o for t, o in zip(threshold, other, strict=True)]


def _tail_slots(weights: Sequence[int]) -> NDArray[np.uint64]:
    """Return the slots of the remainder's bins; an item beyond them is a rejected trial."""
    spare = (1 << 64 - _TAIL_COIN) - len(weights)
    again, over = divmod((1 << 64) - sum(weights), spare)
    masses = [*weights, *([again] * (spare - 1)), again + over]
    return np.array(_slots(masses, _TAIL_COIN), np.uint64)


_INSIDE, _WEIGHTS = _rectangles()
_SLOT: Words = np.array(_slots([*_INSIDE[:-1], _UNIT - sum(_INSIDE)], _COIN), _i)
_TAIL_SLOT = _tail_slots(_WEIGHTS)
_TAIL_BIN = np.zeros((_TAIL_BINS, 2))  # of each its weight, and the rectangle below
_TAIL_BIN[:, 0] = _WEIGHTS
_TAIL_BIN[:_SLOTS, 1] = _INSIDE
_PEAK = float(_HEIGHT) / (DEVIATION * math.sqrt(2 * math.pi))


# --- the second stream


def _draw_tail(key: Bytes, block: int, count: int) -> Integers:
    """Return `count` draws from the remainder: by rejection, from the second stream."""
    drawn, done = np.empty(count, np.int64), 0
    while done < count:
        block += _TAIL_BLOCKS
        trials = _TRIALS * (count - done) + 64
        words, at, doubtful = keystream(key, 2 * _TRIAL * trials, block).view("<u8"), 0, True
        while doubtful:
            done, at, doubtful = _reject(words, at, _TAIL_SLOT, _TAIL_BIN, drawn, done)
            if doubtful:
                coin, *more = (int(word) for word in words[at - 1 : at + _TRIAL])
                done += decide(int(drawn[done]), [coin >> _UNIFORM, *more])
                at += _TRIAL
    return drawn


def decide(value: int, coin: Sequence[int]) -> bool:
    """Whether a value of the remainder is accepted, decided with more digits than float64 has.

    Args:
        value: of the trial.
        coin: digits of a uniform number: first the trial's digits, then 64 bits each.
    """
    number = max(value, -1 - value) >> _BIN
    uniform = functools.reduce(lambda high, low: high << 64 | low, coin)
    with decimal.localcontext(prec=_PRECISION):
        density = (-((Decimal(value) / DEVIATION) ** 2) / 2).exp() / (_ROOT_TAU * DEVIATION)
        height = density * _HEIGHT - int(_TAIL_BIN[number, 1])
        asked = Decimal(uniform) / (1 << 64 * len(coin) - _UNIFORM) * _WEIGHTS[number]
        return asked < height * (1 << _TAIL_FINE)


# --- compiled


def compiled(function: _Compiled) -> _Compiled:
    """Compile for this processor at the first call; the compiled function releases the GIL."""
    return cast(_Compiled, numba.njit(function, nogil=True))


@compiled
def add_noise(
    total: Vector, noise: NDArray[Any], scale: float, factor: float, out: NDArray[Any]
) -> None:
    """Set out = (round(total · scale) + noise) · factor, the noise being whole numbers."""
    for i in range(total.size):
        whole = np.rint(np.float64(total[i]) * scale)
        whole = min(max(whole, -_LARGEST), _LARGEST) + np.float64(noise[i])
        out[i] = whole * factor


@compiled
def _add_settled(
    words: Words,
    slots: Words,
    total: Vector,
    scale: float,
    factor: float,
    out: NDArray[Any],
    unsettled: Words,
) -> int:
    """Add the noise as `add_noise` does, except for the values that the table does not settle.

    Put their numbers in `unsettled` and return how many there are.
    """
    memory, pairs, count = np.empty((2, _CHUNK), _i), words.shape[1], 0
    for half in range(2):
        end = min(total.size, (half + 1) * pairs)
        for start in range(half * pairs, end, _CHUNK):
            stop = min(start + _CHUNK, end)
            noise, sums, means = memory[0, : stop - start], total[start:stop], out[start:stop]
            _fill(words, half, start, slots, memory[1], noise)
            count = _append_unsettled(noise, start, unsettled, count)
            add_noise(sums, noise, scale, factor, means)
    return count


@compiled
def _fill(words: Words, half: int, start: int, slots: Words, entries: Words, noise: Words) -> None:
    """Set the noise of the values of a half from number `start`; see `_append_unsettled`.

    Two loops, a lookup per value and then a vectorised computation, are faster than gathering. The
    compiler does not merge them, because `entries` might overlap `slots`.
    """
    first = start - half * words.shape[1]
    whole, shared = words[half, first : first + noise.size], words[2, first : first + noise.size]
    shift = _i(16 * half)
    for i in range(noise.size):
        entries[i] = slots[np.uint64(whole[i] & _i(_SLOTS - 1))]
    # Numba would widen operations on 32 bits to 64, half as many at a time: each is narrowed again.
    for i in range(noise.size):
        word, entry = whole[i], entries[i]
        coin = _i(_i(shared[i] >> shift) & _i(0xFFFF))
        chosen = word if coin < _i(entry >> _i(12)) else entry
        number, within = _i(chosen & _i(_SLOTS - 1)), _i(_i(word >> _i(12)) & _i((1 << _BIN) - 1))
        magnitude = _i(_i(number << _i(_BIN)) | within)
        noise[i] = _i(magnitude ^ _i(word >> _i(31)))  # m, or −1 − m


@compiled
def _append_unsettled(noise: Words, start: int, unsettled: Words, count: int) -> int:
    """Append the numbers of the remainder's values; return the new length of `unsettled`."""
    for early in range(0, noise.size, _GROUP):
        some = noise[early : early + _GROUP]
        largest = _i(0)
        for i in range(some.size):
            largest = max(largest, _i(some[i] ^ _i(some[i] >> _i(31))))
        if largest >= _UNSETTLED:
            for i in range(some.size):
                if _i(some[i] ^ _i(some[i] >> _i(31))) >= _UNSETTLED:
                    unsettled[count] = start + early + i
                    count += 1
    return count


@compiled
def _reject(
    words: NDArray[np.uint64],
    at: int,
    slots: NDArray[np.uint64],
    bins: NDArray[np.float64],
    drawn: Integers,
    done: int,
) -> tuple[int, int, bool]:
    """Try values until all are drawn, the words are used up, or float64 cannot decide.

    Returns:
        The number of drawn values n, the next word, and whether drawn[n] waits for `decide`.
    """
    while done < drawn.size and at + 2 * _TRIAL <= words.size:
        pick, low = words[at], words[at + 1]
        at += _TRIAL
        number = np.int64(pick >> np.uint64(_TAIL_COIN))
        slot, coin = slots[number], pick & np.uint64((1 << _TAIL_COIN) - 1)
        if coin >= slot >> np.uint64(64 - _TAIL_COIN):
            number = np.int64(slot & np.uint64((1 << 64 - _TAIL_COIN) - 1))
        if number >= len(bins):
            continue
        weight, inside = bins[number, 0], bins[number, 1]
        value = number << _BIN | np.int64(low & np.uint64((1 << _BIN) - 1))
        if low & np.uint64(1 << _BIN):
            value = -1 - value
        deviations = np.float64(value) / DEVIATION
        density = _PEAK * math.exp(-deviations * deviations / 2)
        asked = np.float64(low >> np.uint64(_UNIFORM)) * 2.0 ** (_UNIFORM - 64) * weight
        above = (density - inside) * 2.0**_TAIL_FINE - asked
        drawn[done] = value
        if abs(above) <= _DOUBT * (density * 2.0**_TAIL_FINE + weight):
            return done, at, True
        if above > 0:
            done += 1
    return done, at, False
