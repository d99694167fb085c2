"""The noise of one update, for all parameters together, in a few large blocks.

The parameters, in order of name, are one vector; it is cut into blocks, and block j of update t
has the key of (seed, manifest, t, block j, draw). So the noise is a function of the model and the
update alone, and a graph of a few operations draws it however many parameters there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.bert.layers import Tensor
from dp_core.privacy.noise import noise_key
from dp_core.privacy.seeds import PrivacySeed
from dp_core.privacy.tf_noise import gaussian

Keys = NDArray[np.int64]  # (draws, blocks, 2)
_LARGEST_BLOCK = 1 << 20  # values: bounds memory, and a block stays near the processor


class NoiseBlocks:
    """How the parameters lie in the noise vector.

    Args:
        shapes: of the parameters, by name.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(sorted(shapes.items()))
        self._sizes = [math.prod(shape) for shape in self._shapes.values()]
        self.count = -(-sum(self._sizes) // _LARGEST_BLOCK)
        self.block_size = -(-sum(self._sizes) // self.count)

    def keys(self, seed: PrivacySeed, manifest: bytes, t: int, draws: int) -> Keys:
        """Return the keys of update t: (draws, blocks, 2). They are secret."""
        return np.stack(
            [
                [noise_key(seed, manifest, t, f"block {j}", draw) for j in range(self.count)]
                for draw in range(draws)
            ]
        )

    def draw(self, keys: Tensor, stddev: float) -> dict[str, Tensor]:
        """Return the sum of the draws, each N(0, stddev²) in every value: name -> noise.

        Args:
            keys: (draws, blocks, 2) int64; draws and blocks are static.
            stddev: of one draw.
        """
        total = self._one_draw(keys[0], stddev)  # (blocks, block size)
        if keys.shape[0] > 1:
            total = tf.foldl(lambda sum_, k: sum_ + self._one_draw(k, stddev), keys[1:], total)
        flat = tf.reshape(total, (-1,))[: sum(self._sizes)]
        parts = tf.split(flat, self._sizes)
        return {
            name: tf.reshape(part, shape)
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }

    def _one_draw(self, keys: Tensor, stddev: float) -> Tensor:
        shape = (self.block_size,)
        if self.count == 1:
            return gaussian(shape, keys[0], stddev)[None, :]
        blocks = tf.TensorSpec(shape, tf.float32)
        return tf.map_fn(
            lambda key: gaussian(shape, key, stddev),
            keys,
            fn_output_signature=blocks,
            parallel_iterations=1,
        )
