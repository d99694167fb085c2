"""Counter-based random bits in NumPy: a function of (key, counter), whatever the batch around.

SplitMix64's finaliser (Steele, Lea and Flood 2014) over a Weyl sequence started at the key. It
chooses masks, where speed and independence of layout count; it is never used for privacy noise.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

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
    # Scramble the key first: close keys would otherwise walk the same Weyl sequence, shifted.
    start = mix(keys ^ mix(np.array([stream + 1], np.uint64) * _GAMMA))
    counters = np.arange(1, width + 1, dtype=np.uint64) * _GAMMA
    return mix(start[:, None] + counters[None, :])


def fold(keys: U64, *numbers: int) -> U64:
    """Return keys bound to further numbers, for example an epoch or a step."""
    for number in numbers:
        keys = mix(keys ^ mix(np.array([number], np.uint64) + _GAMMA))
    return keys
