from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.models.bert import mlm_row_losses
from dp_core.models.config import BertConfig
from dp_core.models.parameters import fresh
from dp_core.training.objectives import UnitBatch


@dataclass(frozen=True)
class Problem:
    config: BertConfig
    parameters: dict[str, tf.Variable]
    ids: NDArray[np.int32]  # (U, R, S)
    lengths: NDArray[np.int32]  # (U, R)
    positions: NDArray[np.int32]  # (U, R, K)
    labels: NDArray[np.int32]
    weights: NDArray[np.float32]
    shares: NDArray[np.float32]  # (U, R)

    @property
    def units(self) -> int:
        return self.ids.shape[0]

    @property
    def losses(self) -> UnitBatch:
        arrays = (self.ids, self.lengths, self.positions, self.labels, self.weights, self.shares)
        return UnitBatch(mlm_row_losses, self.config, tuple(map(tf.constant, arrays)))

    def without(self, unit: int) -> Problem:
        """Return the problem with one unit turned into padding."""
        shares, weights = self.shares.copy(), self.weights.copy()
        shares[unit], weights[unit] = 0, 0
        return replace(self, shares=shares, weights=weights)


def make_problem(
    seed: int, units: int, rows: int, length: int, predictions: int, layers: int, words: int
) -> Problem:
    rng = np.random.default_rng(seed)
    config = BertConfig(
        vocab_size=words,
        hidden=8,
        layers=layers,
        heads=2,
        intermediate=12,
        max_positions=length + 2,
    )
    parameters = {  # random offsets, so that no gradient vanishes by symmetry
        name: tf.Variable(a + 0.2 * rng.standard_normal(a.shape).astype(np.float32))
        for name, a in fresh(config, seed).parameters.items()
    }
    lengths = rng.integers(1, length + 1, (units, rows))
    real = rng.random((units, rows)) < 0.8
    return Problem(
        config,
        parameters,
        rng.integers(0, words, (units, rows, length)).astype(np.int32),
        lengths.astype(np.int32),
        rng.integers(0, lengths[:, :, None], (units, rows, predictions)).astype(np.int32),
        rng.integers(0, words, (units, rows, predictions)).astype(np.int32),
        (rng.random((units, rows, predictions)) < 0.7).astype(np.float32),
        (real / np.maximum(real.sum(1, keepdims=True), 1)).astype(np.float32),
    )


@pytest.fixture()
def problem_of() -> Callable[..., Problem]:
    return make_problem


@pytest.fixture()
def problem() -> Problem:
    return make_problem(3, units=4, rows=2, length=7, predictions=3, layers=2, words=11)
