"""A shuffled order that is computed and not stored: place -> item, in constant memory.

A Feistel network (Luby and Rackoff 1988) permutes the numbers of an even number of bits; numbers
beyond the range are permuted again until they fall into it ("cycle walking", Black and Rogaway
2002). It orders epochs of ordinary training; no privacy rests on it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dp_core.corpus.counter_random import fold

_ROUNDS = 10  # four would do for large halves; small ones mix slowly
Indices = npt.NDArray[np.int64]


class ShuffledRange:
    """A pseudo-random permutation of range(size).

    Args:
        size: number of items, 1 or more.
        seed: public.
        epoch: another one is another permutation.
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
        while (beyond := values >= self._size).any():  # at most 3 of 4 numbers are
            values[beyond] = self._network(values[beyond])
        return values.astype(np.int64)

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        mask = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = values >> self._half, values & mask
        for key in self._keys:
            left, right = right, left ^ (fold(right ^ key, 0) & mask)
        return (left << self._half) | right
