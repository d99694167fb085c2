"""Keyed, stable coins: every draw for a unit is a function of the unit's id and a key alone.

Contribution bounding, held-out splits and planting must be drawn *for each unit independently of
all other data*. Otherwise adding one unit could change the contribution of another unit, and no
sensitivity bound would hold. A keyed hash of the unit's id has that property on every machine and
in every order of reading, because the id is a function of the unit's own content (`identity`).
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import numpy.typing as npt


def digest64(key: bytes, purpose: str, *parts: str) -> int:
    """Return 64 bits, uniform over keys, of the given parts (BLAKE2b, parts length-prefixed).

    Args:
        key: any number of bytes; a key of more than 64 bytes is hashed first.
        purpose: separates uses of one key.
        parts: the subject of the draw, for example a unit's id.
    """
    short = key if len(key) <= 64 else hashlib.sha256(key).digest()
    h = hashlib.blake2b(key=short, digest_size=8)
    for part in (purpose, *parts):
        raw = part.encode("utf-8", "surrogatepass")
        h.update(len(raw).to_bytes(8, "little"))
        h.update(raw)
    return int.from_bytes(h.digest(), "little")


def coin(key: bytes, purpose: str, *parts: str) -> float:
    """Return a number in [0, 1), uniform over keys; see `digest64` for the arguments."""
    return (digest64(key, purpose, *parts) >> 11) * 2.0**-53


def generator(key: bytes, purpose: str, *parts: str) -> random.Random:
    """Return a generator of public coins; never use it for noise or sampling."""
    return random.Random(digest64(key, purpose, *parts))  # noqa: S311


def seed_key(seed: int) -> bytes:
    """Return the key of a public seed."""
    return b"public seed " + str(seed).encode()


U64 = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)


def mix(z: U64) -> U64:
    """Return a bijective scrambling of 64-bit words, elementwise."""
    z = (z ^ (z >> np.uint64(30))) * _M1
    z = (z ^ (z >> np.uint64(27))) * _M2
    return z ^ (z >> np.uint64(31))


def bits(keys: U64, stream: int, width: int) -> U64:
    """Return uint64 `[len(keys), width]`: column j depends on (key, stream, j) alone.

    Args:
        keys: uint64 `[n]`.
        stream: separates uses of the same keys, 0 to 2^32 - 1.
        width: counters 0 to width - 1.
    """
    # Scramble the key first, because close keys would otherwise use shifted copies of one sequence.
    start = mix(keys ^ mix(np.array([stream + 1], np.uint64) * _GAMMA))
    counters = np.arange(1, width + 1, dtype=np.uint64) * _GAMMA
    return mix(start[:, None] + counters[None, :])


def fold(keys: U64, *numbers: int) -> U64:
    """Return keys bound to further numbers, for example an epoch or a step."""
    for number in numbers:
        keys = mix(keys ^ mix(np.array([number], np.uint64) + _GAMMA))
    return keys


def drawn(size: int, number: int, key: bytes, purpose: str, *parts: str) -> Places:
    """Return places drawn uniformly without replacement by public coins, in ascending order.

    Args:
        size: number of places to draw from.
        number: number of places drawn, at most `size`.
        key: as for `digest64`.
        purpose: as for `digest64`.
        parts: the subject of the draw, for example a unit's id.
    """
    coins = bits(np.array([digest64(key, purpose, *parts)], np.uint64), 0, size)[0]
    # Taking the places with the smallest coins makes every set of places equally likely.
    return np.sort(np.argsort(coins, kind="stable")[:number])


_ROUNDS = 10  # four suffice for large halves, but small halves mix slowly
Indices = npt.NDArray[np.int64]


class ShuffledRange:
    """A pseudo-random permutation of range(size).

    Args:
        size: number of items, 1 or more.
        seed: a public seed.
        epoch: every epoch has a different permutation.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = size
        self._half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))  # bits of each half
        self._keys = fold(np.arange(_ROUNDS, dtype=np.uint64), seed, epoch)

    def items(self, places: Indices) -> Indices:
        """Return the items at these places of the order.

        Args:
            places: (n,) from 0 to size - 1.
        """
        values = self._network(places.astype(np.uint64))
        while (beyond := values >= self._size).any():  # at most 3 of 4 numbers are out of range
            values[beyond] = self._network(values[beyond])
        return values.astype(np.int64)

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        mask = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = values >> self._half, values & mask
        for key in self._keys:
            left, right = right, left ^ (fold(right ^ key, 0) & mask)
        return (left << self._half) | right
