"""Coins whose probability is exact: integers only, vectorised, from a keyed SHAKE-256 stream."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

_BLOCK_BYTES = 1 << 20
_WORD = 1 << 64


class WordStream:
    """Uniform 64-bit words: blocks of SHAKE-256(key ∥ block number), one after the other."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._block = 0
        self._left: NDArray[np.uint64] = np.zeros(0, np.uint64)

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return the next `count` words."""
        parts = [self._left]
        have = len(self._left)
        while have < count:
            message = self._key + self._block.to_bytes(8, "big")
            block = hashlib.shake_256(message).digest(_BLOCK_BYTES)
            parts.append(np.frombuffer(block, dtype="<u8"))
            have += _BLOCK_BYTES // 8
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
    probabilities: Sequence[Fraction], index: NDArray[np.int64], stream: WordStream
) -> NDArray[np.bool_]:
    """Return one coin per element of `index`; coin i is true with `probabilities[index[i]]`.

    A coin is the comparison of a uniform real with p, 64 bits at a time. The first word decides
    unless it equals p's own first 64 bits (once in 2⁶⁴): then p's next bits decide, and so on,
    so the probability is p itself and not its rounding.
    """
    certain = np.array([p >= 1 for p in probabilities], dtype=bool)
    firsts = np.array(
        [0 if p >= 1 else (p.numerator * _WORD) // p.denominator for p in probabilities],
        dtype=np.uint64,
    )
    words = stream.words(len(index))
    thresholds = firsts[index]
    coins: NDArray[np.bool_] = (words < thresholds) | certain[index]
    for tie in np.flatnonzero((words == thresholds) & ~certain[index]):
        coins[tie] = _decide_tie(probabilities[int(index[tie])], stream)
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
    exponents: Sequence[Fraction], index: NDArray[np.int64], stream: WordStream
) -> NDArray[np.bool_]:
    """Return coins that are true with probability exp(−exponents[index[i]]), exponents >= 0.

    Algorithm 1 of Canonne, Kamath and Steinke (2020): exp(−γ) as a series of rational coins,
    after ⌊γ⌋ coins of exp(−1) that must all come up.
    """
    index = np.asarray(index, dtype=np.int64).reshape(-1)
    wholes = np.array([int(gamma) for gamma in exponents], dtype=object)
    parts = [gamma - int(gamma) for gamma in exponents]
    alive = np.arange(len(index))
    rounds = 0
    while (pending := alive[wholes[index[alive]] > rounds]).size:
        lost = pending[~_exp_minus_fraction([Fraction(1)], np.zeros_like(pending), stream)]
        alive = np.setdiff1d(alive, lost, assume_unique=True)
        rounds += 1
    coins = np.zeros(len(index), dtype=bool)
    coins[alive] = _exp_minus_fraction(parts, index[alive], stream)
    return coins


def _exp_minus_fraction(
    gammas: Sequence[Fraction], index: NDArray[np.int64], stream: WordStream
) -> NDArray[np.bool_]:
    """Return coins of probability exp(−γ), γ in [0, 1]: toss γ/1, γ/2, … until one fails.

    The first failure is at an odd toss with probability 1 − γ + γ²/2 − … = exp(−γ).
    """
    coins = np.zeros(len(index), dtype=bool)
    active = np.arange(len(index))
    toss = 1
    while len(active):
        present, local = np.unique(index[active], return_inverse=True)
        went_on = bernoulli([gammas[int(g)] / toss for g in present], local, stream)
        coins[active[~went_on]] = toss % 2 == 1
        active = active[went_on]
        toss += 1
    return coins
