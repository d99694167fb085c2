"""Tools for tests of noised updates: trainers, the gradient that reaches one, and its law."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dp_core.config.training import AdapterConfig
from dp_core.models.adapters import prepared, trained_names
from dp_core.models.parameters import fresh
from dp_core.training.devices import strategy_for
from dp_core.training.trainer import AdamW, Trainer

ALPHA = 1e-7  # probability of rejecting a right σ
ADAMW = AdamW(0.9, 0.999, 0.01)
ALL = AdapterConfig()


class Recorder(AdamW):
    """An optimizer that replaces the weights by its gradient."""

    def apply(self, name, weight, mean, square, gradient, learning_rate, step, loudness):
        weight.assign(gradient)


RECORDER = Recorder(0, 0, 0)


def trainer_of(
    shape, optimizer=ADAMW, clipper=None, *, device="cpu", adapters=ALL, precision="float32"
) -> Trainer:
    """Return a trainer of a fresh model."""
    start = prepared(fresh(shape, 0), adapters, 0)
    return Trainer(
        strategy_for(device), shape, start.parameters, optimizer, clipper,
        precision=precision, trained=trained_names(start, adapters),
    )  # fmt: skip


def flat(arrays: Mapping[str, Any]) -> NDArray[np.float64]:
    """Return all values, in order of name."""
    return np.concatenate([np.ravel(arrays[n]) for n in sorted(arrays)]).astype(np.float64)


def assert_gaussian(
    sample: NDArray[np.float64], deviation: float, wrong: Sequence[float] = (2 / 3, 3 / 2)
) -> None:
    """Accept N(0, deviation²), and reject the given multiples of the deviation."""

    def p_value(stddev: float) -> float:
        below = stats.chi2.cdf(np.square(sample / stddev).sum(), len(sample))
        return float(2 * min(below, 1 - below))  # two-sided

    assert p_value(deviation) > ALPHA
    assert stats.kstest(sample / deviation, "norm").pvalue > ALPHA
    for times in wrong:
        assert p_value(times * deviation) < ALPHA
