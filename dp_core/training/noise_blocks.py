"""The noise of one update, for all parameters together, block by block.

The parameters, in order of name, are one vector; it is cut into blocks, and block j of update t
has the key of (seed, manifest, t, block j, draw). So the noise is a function of the model and the
update alone. A block is large enough that starting it costs little, and small enough that its bits
and its noise need little memory beside the sums.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.bert.layers import Tensor
from dp_core.privacy.noise import noise_key
from dp_core.privacy.seeds import PrivacySeed
from dp_core.privacy.tf_noise import noise_words, noised_mean, scaled_normals

Keys = NDArray[np.uint8]  # (draws, blocks, 32)
Vector = NDArray[np.float32]
_LARGEST_BLOCK = 1 << 21  # values: to start a block costs as much as 100,000 of them
_ALIGNMENT = 64  # bytes: TensorFlow takes an array as it is only if it begins at such an address


class NoiseBlocks:
    """How the parameters lie in the noise vector.

    Args:
        shapes: of the parameters, by name.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(sorted(shapes.items()))
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        self._ends = np.cumsum(sizes)
        total = int(self._ends[-1])
        self.count = -(-total // _LARGEST_BLOCK)
        self._compiled = False
        self.block_size = -(-total // (2 * self.count)) * 2

    def keys(self, seed: PrivacySeed, manifest: bytes, t: int, draws: int) -> Keys:
        """Return the keys of update t: (draws, blocks, 32). They are secret."""
        return np.stack(
            [
                [noise_key(seed, manifest, t, f"block {j}", draw) for j in range(self.count)]
                for draw in range(draws)
            ]
        )

    def noised_means(
        self, sums: Mapping[str, Tensor], keys: Keys, stddev: float, divisor: float
    ) -> dict[str, Tensor]:
        """Add the draws' noise to the sums and divide: name -> (Σ + noise) / divisor.

        The noised sums are multiples of `tf_noise.grid(stddev)`.

        Args:
            sums: of the parameters' shapes.
            keys: of this update.
            stddev: of one draw, positive.
            divisor: what the noised sums are divided by.
        """
        flat = [np.asarray(sums[name]).reshape(-1) for name in self._shapes]
        means = [_aligned(len(values)) for values in flat]
        scalars = (tf.constant(stddev, tf.float32), tf.constant(divisor, tf.float32))

        def work(block: int) -> None:
            sum_ = _aligned(self.block_size)
            places = list(self._places(block))
            for i, own, within in places:
                sum_[within] = flat[i][own]
            mean = np.asarray(_noised_block(sum_, keys[:, block], *scalars)).view(np.float32)
            for i, own, within in places:
                means[i][own] = mean[within]

        if not self._compiled:
            work(0)  # alone: threads that find nothing compiled would each do it
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(work, range(0 if self._compiled else 1, self.count)))
        self._compiled = True
        return {
            name: tf.reshape(_tensor(mean), shape)
            for (name, shape), mean in zip(self._shapes.items(), means, strict=True)
        }

    def _places(self, block: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield what lies in a block: number of the parameter, its part, the place in the block."""
        start = block * self.block_size
        end = min(start + self.block_size, int(self._ends[-1]))
        i = int(np.searchsorted(self._ends, start, side="right"))
        while start < end:
            first = int(self._ends[i - 1]) if i else 0
            stop = min(end, int(self._ends[i]))
            offset = start - block * self.block_size
            yield i, slice(start - first, stop - first), slice(offset, offset + stop - start)
            start, i = stop, i + 1


def _noised_block(sum_: Vector, keys: Keys, stddev: Tensor, divisor: Tensor) -> Tensor:
    """(2n,) sum, (draws, 32) keys -> (n,) complex64, the values in pairs."""
    with tf.device("/cpu:0"):  # where the bits are made, whatever trains
        earlier = tf.constant(0.0, tf.complex64)
        for key in keys[:-1]:
            earlier += scaled_normals(_tensor(noise_words(key, len(sum_))), stddev)
        words = _tensor(noise_words(keys[-1], len(sum_)))
        return noised_mean(_tensor(sum_.view(np.complex64)), earlier, words, stddev, divisor)


def _tensor(array: NDArray[Any]) -> Tensor:
    """Return the array's own memory as a tensor: to copy it would cost more than its noise."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _aligned(size: int) -> Vector:
    memory = np.empty(4 * size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + 4 * size].view(np.float32)
