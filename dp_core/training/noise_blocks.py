"""The noise of one update, for all parameters together, drawn block by block beside other work.

The parameters, in order of name, are one vector; it is cut into blocks, and block j of update t
has the key of (seed, manifest, t, block j, draw). So the noise is a function of the model and the
update alone. A block is large enough that starting it costs little, and small enough that its bits
need little memory beside the noise.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.bert.layers import Tensor
from dp_core.privacy.noise import aligned_bytes, noise_key
from dp_core.privacy.seeds import PrivacySeed
from dp_core.privacy.tf_noise import noise_words, scaled_normals

Keys = NDArray[np.uint8]  # (draws, blocks, 32)
Vector = NDArray[np.float32]
_LARGEST_BLOCK = 1 << 21  # values: to start a block costs as much as 100,000 of them
_LOWEST_PRIORITY = 19


@dataclass(frozen=True)
class Noise:
    """The noise of one update; other threads may still be at it.

    Attributes:
        stddev: of one draw.
    """

    stddev: float
    _values: Mapping[str, Vector] = field(repr=False)  # secret
    _work: Callable[[int], None] = field(repr=False)
    _blocks: Sequence[Future[None]] = field(repr=False)

    def tensors(self) -> dict[str, Tensor]:
        """Draw what no other thread has begun, wait for the rest; name -> the parameter's noise."""
        for i in reversed(range(len(self._blocks))):  # the others come from the front
            if self._blocks[i].cancel():
                self._work(i)
        for block in self._blocks:
            if not block.cancelled():
                block.result()
        return {name: _tensor(values) for name, values in self._values.items()}


class NoiseBlocks:
    """How the parameters lie in the noise vector, and the threads that draw it.

    Args:
        shapes: of the parameters, by name.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(sorted(shapes.items()))
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        self._ends = np.cumsum(sizes)
        total = int(self._ends[-1])
        self.count = -(-total // _LARGEST_BLOCK)
        self.block_size = -(-total // (2 * self.count)) * 2
        self._threads = ThreadPoolExecutor(
            max(1, (os.cpu_count() or 1) // 2), "noise", initializer=_step_back
        )
        self._compiled = False

    def keys(self, seed: PrivacySeed, manifest: bytes, t: int, draws: int) -> Keys:
        """Return the keys of update t: (draws, blocks, 32). They are secret."""
        return np.stack(
            [
                [noise_key(seed, manifest, t, f"block {j}", draw) for j in range(self.count)]
                for draw in range(draws)
            ]
        )

    def draw(self, keys: Keys, stddev: float) -> Noise:
        """Begin to draw the noise of an update: the sum of its draws, each N(0, stddev²).

        It depends on no data, so it is drawn beside other work: on a CPU in the moments when the
        gradients leave a core idle, on an accelerator's host while the accelerator is at them.

        Args:
            keys: of this update.
            stddev: of one draw, positive.
        """
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        flat = [aligned_bytes(4 * size).view(np.float32) for size in sizes]
        scale = tf.constant(stddev, tf.float32)

        def work(block: int) -> None:
            noise = _drawn_block(self.block_size, keys[:, block], scale)
            for i, own, within in self._places(block):
                flat[i][own] = noise[within]

        if not self._compiled:
            _drawn_block(self.block_size, keys[:1, 0], scale)  # else each thread would compile it
            self._compiled = True
        blocks = [self._threads.submit(work, block) for block in range(self.count)]
        arrays = {n: v.reshape(s) for (n, s), v in zip(self._shapes.items(), flat, strict=True)}
        return Noise(stddev, arrays, work, blocks)

    def close(self) -> None:
        """Draw no more: what was begun and is not wanted would hold up the end of the process."""
        self._threads.shutdown(wait=False, cancel_futures=True)

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


def _drawn_block(size: int, keys: Keys, stddev: Tensor) -> Vector:
    """(draws, 32) keys -> (size,): the sum of the draws."""
    with tf.device("/cpu:0"):  # where the bits are made, whatever trains
        noise = scaled_normals(_tensor(noise_words(keys[0], size)), stddev)
        for key in keys[1:]:
            noise += scaled_normals(_tensor(noise_words(key, size)), stddev)
        return np.asarray(noise).view(np.float32)


def _step_back() -> None:
    """Let this thread run when others would not; whoever waits for the noise draws it too."""
    if sys.platform == "linux":  # elsewhere it would concern the whole process
        with suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def _tensor(array: NDArray[Any]) -> Tensor:
    """Return the array's own memory as a tensor: to copy it would cost more than its noise."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
