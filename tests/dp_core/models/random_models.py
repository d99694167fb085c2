"""Models with random values in every parameter, so that tests notice each of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from dp_core.models.parameters import AnyModel, fresh


def random_model(config: Any, seed: int = 0) -> AnyModel:
    """Return a fresh model with noise on every parameter."""
    rng, start = np.random.default_rng(seed), fresh(config, 0)
    for value in start.parameters.values():
        value += 0.3 * rng.standard_normal(value.shape).astype("f")
    return start
