"""Training noise: an exact discrete Gaussian on a lattice so fine that it is a Gaussian.

*The mechanism.* A clipped sum is rounded to whole places of a lattice, 2²⁸ of which are one
standard deviation S of the noise; an integer from the discrete Gaussian N_ℤ(0, S²) is added to
each; the whole number that comes out is divided. Everything is integers until the division, which
is post-processing: no low bits of floats are left to look at (Mironov 2012).

*What is accounted, and why it holds.* A continuous Gaussian with the plan's noise multiplier.

1. *Lattice.* Let τ = 4. For whole numbers a, the law of a + N_ℤ(0, S²) is within a factor
   1 ± 10⁻¹³⁶ of this: add N(0, S² − τ²) to a, then draw from the discrete Gaussian of width τ
   around the real number that came out. (Peikert 2010, Theorem 3.1, whose smoothing error is
   2·exp(−2π²τ²), by Poisson summation, in these units; Micciancio and Regev 2007.) The second
   draw sees only what the continuous Gaussian mechanism released: it is post-processing. So
   integers of deviation S are as private as a real Gaussian of deviation √(S² − τ²), which is
   S·(1 − 10⁻¹⁶), in any number of dimensions and under any adaptive composition.
2. *Rounding.* Neighbouring sums that differ by C in ℓ₂ norm differ, once rounded, by at most
   C·places + 1.5·√d for d values (½ for each rounding, and ¼ for what the float64 product before
   it is off at most). `lattice_places` chooses the lattice so that the noise is the plan's
   multiple of *that*: rounding is paid for by noise, not presumed away. At a noise multiplier of
   1 it takes 6·10⁻⁵ more noise for 10⁸ values, 2·10⁻⁴ for 10⁹.
3. *The draw* is exact: every probability is decided by whole numbers, or by a comparison that is
   made with as many digits as it takes (below). What is cut off lies beyond 15 deviations: less
   than 10⁻⁵⁰ of each draw. For 10⁹ parameters and 10⁶ updates, 10¹⁵ draws, all of this together is
   a total variation distance below 10⁻³⁵, and adds (1 + e^ε)·10⁻³⁵ to δ: less than the last digit
   of any δ that a plan may state, as a float64, up to ε = 20.

*How a value is drawn.* 4,096 bins of 2⁻⁹ deviations hold ±4 deviations. In each bin a rectangle
fits under the density, its mass a whole multiple of 2⁻²⁸. One draw in 1,176 falls outside of all
rectangles; the others are settled by 12 bits that name a slot of an alias table (Walker 1977,
Vose 1991), 16 that choose between its two bins, and 19 that place the value in its bin. The
rest, what lies between rectangles and density, is drawn by rejection from a second stream of
the same key: a bin by whole-number weights, a place in it, and a comparison with the density;
where float64 cannot decide the comparison it is made with decimals of 80 digits. So rectangles and
rest together are the discrete Gaussian, whatever floats do.

Bits are AES-256's (`noise.keystream`): released weights, which are sums of earlier noises, tell
nothing about the next, on the usual assumption about AES. Numba compiles the pass for the
processor at hand: bits, noise, addition and division happen in its cache
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
from typing import Any, TypeVar, cast

import numba
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.errors import PlanError
from dp_core.nn.layers import Tensor
from dp_core.privacy.discrete_gaussian import aligned_bytes, keystream, noise_key
from dp_core.privacy.seed_store import PrivacySeed

Words = NDArray[np.int32]
Vector = NDArray[np.float32]
Places = NDArray[np.int64]
_i = np.int32
_Compiled = TypeVar("_Compiled", bound=Callable[..., Any])

DEVIATION = 1 << 28  # places in a standard deviation, S
_SMOOTHING = 4.0  # τ of the module's docstring, in places
_ROUNDING = 1.5  # places by which neighbours' rounded values may differ more than the sums did
_LARGEST = 2.0**51  # places: a sum beyond is cut to it, which brings neighbours no further apart

_BIN = 19  # bits: places in a bin, 2⁻⁹ of a deviation
_COIN = 16  # bits: a slot's choice between its two bins
_SLOTS = 1 << 12  # and bins of the table: ±4 deviations
_SIDE = _SLOTS // 2
_FARTHEST = 15 * (DEVIATION >> _BIN)  # bins on each side of the rest: ±15 deviations
_FINE = 45  # bits: the rest's weights are multiples of 2⁻⁴⁵ of the table's unit
_REST_COIN = 50  # bits: a slot's choice between two bins of the rest
_DOUBT = 2.0**-40  # float64 is trusted to this relative error of the density; it is off by 2⁻⁴⁴
_CHUNK = 1 << 12  # values whose noise waits, in the first cache, to be added
_LOOK = 64  # values looked at together for one that the table does not settle

_TRIAL = 2  # 64-bit words: one names a bin, the other a place in it and a uniform number
_TRIALS = 3  # for a value; it takes 2.5
_REST = 1 << 32  # blocks of the second stream are those of the first and a multiple of this
_SETTLED = _i((1 - _SIDE) << _BIN)  # below lies the bin that stands for the rest


def lattice_places(noise_multiplier: float, sensitivity: float, values: int) -> float:
    """Return how many places a unit of the sum has, so that `DEVIATION` is the noise it takes.

    Args:
        noise_multiplier: σ, of the continuous Gaussian that is accounted.
        sensitivity: the most by which neighbouring sums differ, in ℓ₂ norm.
        values: how many values d the sum has, over all parameters.

    Raises:
        PlanError: rounding d values to any lattice would take more noise than σ.
    """
    real = math.sqrt(DEVIATION**2 - _SMOOTHING**2)
    places = (real / noise_multiplier - _ROUNDING * math.sqrt(values)) / sensitivity
    if not (0 < places < math.inf):
        raise PlanError(
            f"a noise multiplier of {noise_multiplier:g} on {values} values is beyond what noise "
            "is drawn for",
            where="plan.noise_multiplier",
            fix="Choose one between 0.001 and 1000.",
        )
    return places


def noised_mean(
    total: Vector, key: NDArray[np.uint8], block: int, places: float, divisor: float, out: Vector
) -> None:
    """Round a sum to the lattice, add noise, divide: in one pass over memory.

    Args:
        total: (n,), a clipped sum.
        key: (32,), of the noise.
        block: number of this stretch of values under the key, below 2³².
        places: of the lattice in a unit of the sum, from `lattice_places`.
        divisor: what the noised sum is divided by.
        out: (n,), where the mean goes.
    """
    words, factor = noise_words(key, total.size, block), 1 / (places * divisor)
    which = np.empty(total.size, _i)
    count = _add_settled(words, _SLOT, total, places, factor, out, which)
    if count:
        _add_rest(total, which[:count], _rest(key, block, count), places, factor, out)


def noise_places(key: NDArray[np.uint8], size: int, block: int = 0) -> Places:
    """Return the noise by itself: `size` independent draws from N_ℤ(0, `DEVIATION`²), int64."""
    drawn, which = np.empty(size, np.int64), np.empty(size, _i)
    count = _draw_settled(noise_words(key, size, block), _SLOT, drawn, which)
    drawn[which[:count]] = _rest(key, block, count)
    return drawn


def noise_words(key: NDArray[np.uint8], size: int, block: int = 0) -> Words:
    """Return the random words of `size` values, block `block` of a key: int32 (3, ⌈size/2⌉).

    A value of the first half has a word of the first row, one of the second half of the second;
    both have half a word of the third.
    """
    pairs = (size + 1) // 2
    return keystream(key, 3 * pairs, block).reshape(3, pairs)


# --- the table: rectangles under the density, and what is left


@dataclass(frozen=True)
class Table:
    """Rectangles under a discrete Gaussian N_ℤ(0, deviation²), and weights over what they leave.

    Bin j ≥ 0 holds the places j·2^bin_bits, …, (j + 1)·2^bin_bits − 1, bin −1 − j their mirror
    images, each off by one place; a rectangle as high as the farther edge and a weight for the
    nearer one are right for both. Masses are whole numbers; a unit is 1/(slots·2^coin_bits).

    Attributes:
        inside: (slots,), mass of the rectangle of each bin from −slots/2 on. The outermost bins
            have none: they are the rest's, and the first one's number stands for it.
        weights: of the rest in every bin from −farthest on, in units of 2^−fine_bits: what a bin
            holds above its rectangle, at most.
    """

    deviation: int
    bin_bits: int
    coin_bits: int
    inside: tuple[int, ...]
    weights: tuple[int, ...]

    @classmethod
    def of(
        cls,
        deviation: int,
        *,
        bin_bits: int,
        coin_bits: int,
        slots: int,
        farthest: int,
        fine_bits: int,
    ) -> Table:
        """Return the table; see the class."""
        with decimal.localcontext(prec=_PRECISION):
            unit = Decimal(1 << bin_bits) * (slots << coin_bits)
            edges = [unit * d for d in _densities(deviation, 1 << bin_bits, farthest + 1)]
            half = [int(edge) for edge in edges[1 : slots // 2]] + [0]
            outward = [
                int((edge - (half[j] if j < len(half) else 0)) * (1 << fine_bits)) + 2
                for j, edge in enumerate(edges[:-1])
            ]
        return cls(
            deviation,
            bin_bits,
            coin_bits,
            inside=(*reversed(half), *half),
            weights=(*reversed(outward), *outward),
        )


_PRECISION = 80  # decimal digits
_ROOT_TAU = Decimal(  # √(2π)
    "2.50662827463100050241576528481104525300698674060993831662992357634229365460784197494659582"
)


def _densities(deviation: int, step: int, count: int) -> list[Decimal]:
    """Return the probabilities that N_ℤ(0, deviation²) gives the places 0, step, 2·step, …

    Its normaliser is deviation·√(2π), but for a factor of 1 + 2·exp(−2π²·deviation²).
    """
    at, ratio = 1 / (_ROOT_TAU * deviation), (-((Decimal(step) / deviation) ** 2) / 2).exp()
    change, found = ratio * ratio, []
    for _ in range(count):
        found.append(at)
        at, ratio = at * ratio, ratio * change
    return found


def alias_table(masses: Sequence[int], coin_bits: int) -> tuple[list[int], list[int]]:
    """Return the slots of an alias table, each of mass 2^coin_bits, with at most two items each.

    Walker 1977, as Vose 1991 makes it, in whole numbers: what is drawn has exactly these masses.

    Args:
        masses: of every item, which add up to 2^coin_bits times their number.
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


def _first_stream(table: Table) -> Words:
    """Return (slots,) the threshold of each slot, and in the lowest bits the other item."""
    slots = len(table.inside)
    rest = (slots << table.coin_bits) - sum(table.inside)
    threshold, other = alias_table([rest, *table.inside[1:]], table.coin_bits)
    return np.array([t * slots + o for t, o in zip(threshold, other, strict=True)], _i)


def _second_stream(table: Table) -> NDArray[np.uint64]:
    """Return the slots for bins of the rest, as `_first_stream`; items beyond mean: try again."""
    items = 1 << 64 - _REST_COIN
    spare = items - len(table.weights)
    again, over = divmod((1 << 64) - sum(table.weights), spare)
    masses = [*table.weights, *([again] * (spare - 1)), again + over]
    threshold, other = alias_table(masses, _REST_COIN)
    return np.array([t * items + o for t, o in zip(threshold, other, strict=True)], np.uint64)


_TABLE = Table.of(
    DEVIATION,
    bin_bits=_BIN,
    coin_bits=_COIN,
    slots=_SLOTS,
    farthest=_FARTHEST,
    fine_bits=_FINE,
)
_SLOT = _first_stream(_TABLE)
_REST_SLOT = _second_stream(_TABLE)
_REST_BIN = np.zeros((len(_TABLE.weights), 2))  # of each its weight, and the rectangle below
_REST_BIN[:, 0] = _TABLE.weights
_REST_BIN[_FARTHEST - _SIDE : _FARTHEST + _SIDE, 1] = _TABLE.inside
_PEAK = float(_SLOTS << _COIN + _BIN) / (DEVIATION * math.sqrt(2 * math.pi))


# --- the second stream


def _rest(key: NDArray[np.uint8], block: int, count: int) -> Places:
    """Return `count` draws from what the rectangles leave: by rejection, from the second stream."""
    drawn, done = np.empty(count, np.int64), 0
    while done < count:
        block += _REST
        trials = _TRIALS * (count - done) + 64
        words, at, doubtful = keystream(key, 2 * _TRIAL * trials, block).view("<u8"), 0, True
        while doubtful:
            done, at, doubtful = _reject(words, at, _REST_SLOT, _REST_BIN, drawn, done)
            if doubtful:
                coin, *more = (int(word) for word in words[at - 1 : at + _TRIAL])
                done += decide(int(drawn[done]), [coin >> _BIN, *more])
                at += _TRIAL
    return drawn


def decide(place: int, coin: Sequence[int]) -> bool:
    """Whether a place of the rest is taken, to the digits that float64 has not got.

    Args:
        place: that was tried.
        coin: digits of a uniform number: those of the trial itself, then 64 bits each.
    """
    number = (place >> _BIN) + _FARTHEST
    uniform = functools.reduce(lambda high, low: high << 64 | low, coin)
    with decimal.localcontext(prec=_PRECISION):
        density = (-((Decimal(place) / DEVIATION) ** 2) / 2).exp() / (_ROOT_TAU * DEVIATION)
        height = density * (_SLOTS << _COIN + _BIN) - int(_REST_BIN[number, 1])
        asked = Decimal(uniform) / (1 << 64 * len(coin) - _BIN) * _TABLE.weights[number]
        return asked < height * (1 << _FINE)


# --- compiled


def _compiled(function: _Compiled) -> _Compiled:
    """Compile for this processor, at the first call; other threads run while it is at work."""
    return cast(_Compiled, numba.njit(function, nogil=True))


@_compiled
def _add_settled(
    words: Words,
    table: Words,
    total: Vector,
    places: float,
    factor: float,
    out: Vector,
    which: Words,
) -> int:
    """Set out = (round(total · places) + noise) · factor; return how many await the rest.

    Args:
        words: from `noise_words`.
        table: the slots.
        total: (n,).
        out: (n,).
        which: (n,), filled with the numbers of the values that await it.
    """
    memory, pairs, count = np.empty((2, _CHUNK), _i), words.shape[1], 0
    for half in range(2):
        end = min(total.size, (half + 1) * pairs)
        for start in range(half * pairs, end, _CHUNK):
            stop = min(start + _CHUNK, end)
            noise, sums, means = memory[0, : stop - start], total[start:stop], out[start:stop]
            _fill(words, half, start, table, memory[1], noise)
            count = _unsettled(noise, start, which, count)
            for i in range(sums.size):
                place = np.rint(np.float64(sums[i]) * places)
                place = min(max(place, -_LARGEST), _LARGEST) + np.float64(noise[i])
                means[i] = np.float32(place * factor)
    return count


@_compiled
def _draw_settled(words: Words, table: Words, drawn: Places, which: Words) -> int:
    """Set drawn = noise; return how many await the rest, and fill `which` with their numbers."""
    memory, pairs, count = np.empty((2, _CHUNK), _i), words.shape[1], 0
    for half in range(2):
        end = min(drawn.size, (half + 1) * pairs)
        for start in range(half * pairs, end, _CHUNK):
            stop = min(start + _CHUNK, end)
            noise = memory[0, : stop - start]
            _fill(words, half, start, table, memory[1], noise)
            count = _unsettled(noise, start, which, count)
            drawn[start:stop] = noise
    return count


@_compiled
def _add_rest(
    total: Vector, which: Words, rest: Places, places: float, factor: float, out: Vector
) -> None:
    """Set out for the values `which`, with the noise `rest`."""
    for i in range(which.size):
        place = np.rint(np.float64(total[which[i]]) * places)
        place = min(max(place, -_LARGEST), _LARGEST) + np.float64(rest[i])
        out[which[i]] = np.float32(place * factor)


@_compiled
def _fill(words: Words, half: int, start: int, table: Words, entries: Words, noise: Words) -> None:
    """Set noise to that of the values of a half from number `start`; see `_unsettled`.

    Two loops: looked up value by value and then computed many at a time is faster than gathering.
    It stays two loops because the compiler cannot know that `entries` is no part of `table`.
    """
    first = start - half * words.shape[1]
    own, shared = words[half, first : first + noise.size], words[2, first : first + noise.size]
    shift = _i(16 * half)
    for i in range(noise.size):
        entries[i] = table[np.uint64(own[i] & _i(_SLOTS - 1))]
    # Numba would widen operations on 32 bits to 64, half as many at a time: each is narrowed again.
    for i in range(noise.size):
        word, entry = own[i], entries[i]
        coin = _i(_i(word >> _i(12)) & _i(0xFFFF))
        here, there = _i(word & _i(_SLOTS - 1)), _i(entry & _i(_SLOTS - 1))
        number = here if coin < _i(entry >> _i(12)) else there
        upper, lower = _i(_i(word >> _i(12)) & _i(0x70000)), _i(_i(shared[i] >> shift) & _i(0xFFFF))
        noise[i] = _i(_i(_i(number - _i(_SIDE)) << _i(_BIN)) + _i(upper | lower))


@_compiled
def _unsettled(noise: Words, start: int, which: Words, count: int) -> int:
    """Append the numbers of values that await the rest to `which`; return how many it has now."""
    for early in range(0, noise.size, _LOOK):
        some = noise[early : early + _LOOK]
        least = _SETTLED
        for i in range(some.size):
            least = min(least, some[i])
        if least < _SETTLED:
            for i in range(some.size):
                if some[i] < _SETTLED:
                    which[count] = start + early + i
                    count += 1
    return count


@_compiled
def _reject(
    words: NDArray[np.uint64],
    at: int,
    slots: NDArray[np.uint64],
    bins: NDArray[np.float64],
    drawn: Places,
    done: int,
) -> tuple[int, int, bool]:
    """Try places until all are drawn, the words are used up, or float64 cannot decide.

    Returns:
        How many are drawn, the next word, and whether drawn[that many] waits for `decide`.
    """
    while done < drawn.size and at + 2 * _TRIAL <= words.size:
        pick, low = words[at], words[at + 1]
        at += _TRIAL
        number = np.int64(pick >> np.uint64(_REST_COIN))
        slot, coin = slots[number], pick & np.uint64((1 << _REST_COIN) - 1)
        if coin >= slot >> np.uint64(64 - _REST_COIN):
            number = np.int64(slot & np.uint64((1 << 64 - _REST_COIN) - 1))
        if number >= len(bins):
            continue
        weight, inside = bins[number, 0], bins[number, 1]
        place = ((number - _FARTHEST) << _BIN) + np.int64(low & np.uint64((1 << _BIN) - 1))
        deviations = np.float64(place) / DEVIATION
        density = _PEAK * math.exp(-deviations * deviations / 2)
        asked = np.float64(low >> np.uint64(_BIN)) * 2.0 ** (_BIN - 64) * weight
        above = (density - inside) * 2.0**_FINE - asked
        drawn[done] = place
        if abs(above) <= _DOUBT * (density * 2.0**_FINE + weight):
            return done, at, True
        if above > 0:
            done += 1
    return done, at, False


_BLOCK = 1 << 18  # values
_FEW = 1 << 16  # values: to draw fewer costs less than to start a block of their own
_TOGETHER = "parameters of few values"


@dataclass(frozen=True)
class UpdateNoise:
    """The noise of one update: independent Gaussian noise on every value of every parameter.

    Where the plan adds noise per shard and micro-batch (the paper's way), what is drawn is their
    sum: only that is ever seen, and a sum of P·T Gaussians of σ/√(P·T) is one of σ.

    Attributes:
        seed: of the reservation; all noise is drawn from it.
        manifest: what the noise is drawn for.
        t: number of the update.
        noise_multiplier: σ of the whole update, in units of the clip norm.
        clip_norm: bound on what one unit adds to the sum.
    """

    seed: PrivacySeed = field(repr=False)
    manifest: bytes = field(repr=False)
    t: int
    noise_multiplier: float
    clip_norm: float

    def key(self, name: str) -> NDArray[np.uint8]:
        """Return the key (32,) of a parameter's noise. It is secret."""
        return noise_key(self.seed, self.manifest, self.t, name)


def noised_means(
    totals: Mapping[str, Tensor], noise: UpdateNoise, divisor: float
) -> dict[str, Tensor]:
    """Return (sum + noise) / divisor of every parameter, noised as whole places of a lattice.

    It is done by the processor of the machine that trains, whatever the devices, so that they
    cannot differ in how they draw or round.

    Args:
        totals: clipped sums by name, float32.
        noise: of this update.
        divisor: what the noised sums are divided by.
    """
    sums = {name: np.asarray(memoryview(total)) for name, total in totals.items()}  # no copies
    few = sorted(name for name, own in sums.items() if own.size < _FEW)
    vectors = {name: own.reshape(-1) for name, own in sums.items() if own.size >= _FEW}
    if few:
        vectors[_TOGETHER] = np.concatenate([sums[name].reshape(-1) for name in few])
    means = _drawn(vectors, noise, divisor)
    if few:
        ends = np.cumsum([sums[name].size for name in few])
        means |= zip(few, np.split(means.pop(_TOGETHER), ends[:-1]), strict=True)
    return {name: _tensor(means[name].reshape(own.shape)) for name, own in sums.items()}


def _drawn(sums: Mapping[str, Vector], noise: UpdateNoise, divisor: float) -> dict[str, Vector]:
    values = sum(own.size for own in sums.values())
    places = lattice_places(noise.noise_multiplier, noise.clip_norm, values)
    keys = {name: noise.key(name) for name in sums}
    means = {name: aligned_bytes(own.nbytes).view(np.float32) for name, own in sums.items()}
    blocks = deque((name, j) for name, own in sums.items() for j in range(-(-own.size // _BLOCK)))

    def work() -> None:
        while True:
            try:
                name, j = blocks.popleft()
            except IndexError:  # all are taken
                return
            own = slice(j * _BLOCK, (j + 1) * _BLOCK)
            noised_mean(sums[name][own], keys[name], j, places, divisor, means[name][own])

    workers = max(1, min(os.cpu_count() or 1, len(blocks)))
    with ThreadPoolExecutor(workers) as threads:
        for worker in [threads.submit(work) for _ in range(workers)]:
            worker.result()
    return means


def _tensor(array: Vector) -> Tensor:
    """Return the array's own memory as a tensor where it lies well, else a copy."""
    if array.ctypes.data % 64:
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
