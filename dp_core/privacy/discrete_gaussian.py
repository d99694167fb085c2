"""Coins whose probability is exact: integers only, vectorised, from a keyed SHAKE-256 stream."""

import hashlib
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from dp_core.errors import BadInput
from dp_core.privacy.seed_store import PrivacySeed

_BLOCK_BYTES, _SHORT_BYTES = 1 << 20, 1 << 14
_WORD = 1 << 64


class WordStream:
    """Uniform 64-bit words: blocks of SHAKE-256(key ∥ block number), one after the other."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._block = 0
        self._served = 0  # bytes of the block
        self._left: NDArray[np.uint64] = np.zeros(0, np.uint64)

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next `count` words."""
        parts = [self._left]
        have = len(self._left)
        while have < count:
            message = self._key + self._block.to_bytes(8, "big")
            # A short output of SHAKE-256 is a prefix of a long one, and enough for few words.
            is_short = self._served == 0 and 8 * (count - have) <= _SHORT_BYTES
            size = _SHORT_BYTES if is_short else _BLOCK_BYTES
            part = np.frombuffer(hashlib.shake_256(message).digest(size), "<u8")
            parts.append(part[self._served // 8 :])
            have += len(parts[-1])
            self._served = size % _BLOCK_BYTES
            if not is_short:
                self._block += 1
        joined = np.concatenate(parts)
        self._left = joined[count:]
        return joined[:count]


def uniform_below(bound: int, size: int, stream: WordStream) -> NDArray[np.int64]:
    """Return `size` integers, uniform on {0, …, bound − 1} (bound at most 2⁶²), int64."""
    limit = np.uint64(_WORD - _WORD % bound - 1)  # words above it would favour small residues
    words = stream.words(size)
    while (bad := np.flatnonzero(words > limit)).size:
        words = words.copy()
        words[bad] = stream.words(len(bad))
    return (words % np.uint64(bound)).astype(np.int64)


def bernoulli(
    numerators: Sequence[int], denominator: int, index: NDArray[np.int64], stream: WordStream
) -> NDArray[np.bool_]:
    """Return one coin per element of `index`; coin i is true with p = numerators[index[i]] / d.

    Ratios of one denominator, as whole numbers: a `Fraction` of each costs ten times as much. A
    coin is the comparison of a uniform real with p, 64 bits at a time. The first word decides
    unless it equals p's own first 64 bits (once in 2⁶⁴): then p's next bits decide, and so on,
    so the probability is p itself and not its rounding.
    """
    certain = np.array([n >= denominator for n in numerators], dtype=bool)
    firsts = np.array(
        [0 if n >= denominator else n * _WORD // denominator for n in numerators], dtype=np.uint64
    )
    words = stream.words(len(index))
    thresholds = firsts[index]
    coins: NDArray[np.bool_] = (words < thresholds) | certain[index]
    for tie in np.flatnonzero((words == thresholds) & ~certain[index]):
        coins[tie] = _decide_tie(Fraction(numerators[int(index[tie])], denominator), stream)
    return coins


def _decide_tie(p: Fraction, stream: WordStream) -> bool:
    """Continue the comparison with p after its first 64 bits have come up."""
    while True:
        p = p * _WORD - (p.numerator * _WORD) // p.denominator
        if p == 0:
            return False
        word = int(stream.words(1)[0])
        first = (p.numerator * _WORD) // p.denominator
        if word != first:
            return word < first


def bernoulli_exp_minus(
    numerators: Sequence[int], denominator: int, index: NDArray[np.int64], stream: WordStream
) -> NDArray[np.bool_]:
    """Return coins that are true with probability exp(−γ), γ = numerators[index[i]] / d >= 0.

    Algorithm 1 of Canonne, Kamath and Steinke (2020): exp(−γ) as a series of rational coins,
    after ⌊γ⌋ coins of exp(−1) that must all come up.
    """
    index = np.asarray(index, dtype=np.int64).reshape(-1)
    wholes = np.array([n // denominator for n in numerators], dtype=object)
    parts = [n % denominator for n in numerators]
    alive = np.arange(len(index))
    rounds = 0
    while (pending := alive[wholes[index[alive]] > rounds]).size:
        lost = pending[~_exp_minus_fraction([1], 1, np.zeros_like(pending), stream)]
        alive = np.setdiff1d(alive, lost, assume_unique=True)
        rounds += 1
    coins = np.zeros(len(index), dtype=bool)
    coins[alive] = _exp_minus_fraction(parts, denominator, index[alive], stream)
    return coins


def _exp_minus_fraction(
    numerators: Sequence[int], denominator: int, index: NDArray[np.int64], stream: WordStream
) -> NDArray[np.bool_]:
    """Return coins of probability exp(−γ), γ in [0, 1]: toss γ/1, γ/2, … until one fails.

    The first failure is at an odd toss with probability 1 − γ + γ²/2 − … = exp(−γ).
    """
    coins = np.zeros(len(index), dtype=bool)
    active = np.arange(len(index))
    toss = 1
    while len(active):
        present, local = np.unique(index[active], return_inverse=True)
        tossed = [numerators[g] for g in present.tolist()]
        succeeded = bernoulli(tossed, denominator * toss, local, stream)
        coins[active[~succeeded]] = toss % 2 == 1
        active = active[succeeded]
        toss += 1
    return coins


LARGEST_SIGMA = 2.0**31


def discrete_gaussian(
    sigma: float, size: int, seed: PrivacySeed, context: bytes
) -> NDArray[np.int64]:
    """Return `size` exact draws from the discrete Gaussian N_Z(0, σ²), int64.

    Algorithm 3 of Canonne, Kamath and Steinke (2020, arXiv:2004.00010): rejection from a
    discrete Laplace. Every coin is decided by integers (σ as the rational number that the
    float is), so no low bit of a float can leak, and the pmf is proportional to
    exp(−x²/2σ²) exactly. Time, not output, depends on the values drawn.

    Args:
        sigma: scale σ of the mechanism, in counts.
        size: number of draws.
        seed: the secret seed of the release.
        context: identifies the release (digests of its inputs). The same seed and context give
            the same noise, so different data must have different contexts.

    Raises:
        BadInput: σ is not in (0, 2³¹], or the context is empty.
    """
    if not 0 < sigma <= LARGEST_SIGMA:
        raise BadInput(f"σ = {sigma} is not in (0, 2^31]", where="discrete Gaussian")
    if not context:
        raise BadInput(
            "the context is empty",
            where="discrete Gaussian",
            fix="Pass digests of the release's inputs.",
        )
    exact = Fraction(sigma)
    stream = WordStream(seed.derive("discrete-gaussian", context, repr(sigma), size))

    def draw(missing: int) -> NDArray[np.int64]:
        # about 3/4 (σ large) to 2/5 (σ small) of the proposals survive; the rest is made up for
        return _accepted(exact, missing + missing // 2 + 16, stream)

    return _until(size, draw)


def _until(size: int, draw: Callable[[int], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the first `size` values of repeated draws, each of which gets the missing number."""
    drawn = [np.zeros(0, np.int64)]
    while missing := size - sum(map(len, drawn)):
        drawn.append(draw(missing)[:missing])
    return np.concatenate(drawn)


_COARSE, _FACTOR, _FINE = 1024, 256, 1280


LATTICE_DEVIATION = math.sqrt(_FACTOR**2 * _COARSE**2 + _FINE**2)  # S, in places


def lattice_gaussian(size: int, seed: PrivacySeed, context: bytes) -> NDArray[np.int64]:
    """Return `size` draws of the discrete Gaussian N_ℤ(0, S²), S = `LATTICE_DEVIATION`.

    A value is 256·x + y, with x from N_ℤ(0, 1024²) and y from N_ℤ(0, 1280²), so few distinct
    values have to be decided, although the lattice is fine. Its law is N_ℤ(0, S²) within a factor
    1 ± 10⁻²⁰⁰ at every integer: summing over x leaves a Gaussian sum over ℤ whose deviation is at
    least (1/1024² + 256²/1280²)^(−1/2) > 4.99. By Poisson summation this sum differs from its
    average by at most 4·exp(−2π²·4.99²) (as in `convolution_slack`).
    """
    drawn = discrete_gaussian(float(_COARSE), size, seed, context + b" coarse")
    return _FACTOR * drawn + discrete_gaussian(float(_FINE), size, seed, context + b" level 0")


def _accepted(sigma: Fraction, proposals: int, stream: WordStream) -> NDArray[np.int64]:
    """Return the discrete Laplace draws, out of `proposals`, that Algorithm 3 accepts."""
    t = int(sigma) + 1
    y = _discrete_laplace(t, proposals, stream)
    values, index = np.unique(np.abs(y), return_inverse=True)
    p, q = (sigma * sigma).as_integer_ratio()
    # (|y| − σ²/t)² / 2σ², over one denominator
    exponents = [(value * q * t - p) ** 2 for value in values.tolist()]
    return y[bernoulli_exp_minus(exponents, 2 * p * q * t * t, index, stream)]


def _discrete_laplace(t: int, size: int, stream: WordStream) -> NDArray[np.int64]:
    """Return `size` draws with pmf proportional to exp(−|x|/t) (Algorithm 2 with s = 1)."""

    def draw(missing: int) -> NDArray[np.int64]:
        remainder = uniform_below(t, 2 * missing + 16, stream)
        values, index = np.unique(remainder, return_inverse=True)
        kept = bernoulli_exp_minus(values.tolist(), t, index, stream)
        remainder = remainder[kept]
        magnitude = remainder + t * _geometric(len(remainder), stream)
        negative = uniform_below(2, len(magnitude), stream) == 1
        valid = ~(negative & (magnitude == 0))  # zero would count twice
        return np.asarray(np.where(negative, -magnitude, magnitude)[valid])

    return _until(size, draw)


def _geometric(size: int, stream: WordStream) -> NDArray[np.int64]:
    """Return `size` counts of successes of Bernoulli(exp(−1)) trials before the first failure."""
    count = np.zeros(size, np.int64)
    alive = np.arange(size)
    while len(alive):
        again = bernoulli_exp_minus([1], 1, np.zeros(len(alive), np.int64), stream)
        alive = alive[again]
        count[alive] += 1
    return count
