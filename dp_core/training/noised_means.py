"""Noise on all parameters' sums: block by block, on every core.

A parameter's noise has a key of (seed, manifest, update, name), and block j of its values has
the key's stream j; parameters of few values are one, in order of name. So the noise is a function
of the model and the update alone: neither the number of threads nor which of them draws a block can
change it. A block is small enough that its bits are still in cache when they are used, and large
enough that to start it costs little.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.bert.layers import Tensor
from dp_core.privacy.gaussian_noise import lattice_places, noised_mean
from dp_core.privacy.noise import aligned_bytes, noise_key
from dp_core.privacy.seeds import PrivacySeed

Vector = NDArray[np.float32]
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
