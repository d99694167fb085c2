"""Hockey-stick divergences by brute force, with integrals and sums that share no dp_core code."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import trapezoid
from scipy.stats import norm

Floats = NDArray[np.float64]
Density = Callable[[Floats], Floats]


def hockey_stick(p: Density, q: Density, epsilon: float, reach: float) -> float:
    """Return ∫ max(0, p − e^ε q) over [−reach, reach], by the trapezoid rule."""
    x = np.linspace(-reach, reach, 60_001)
    return float(trapezoid(np.maximum(0.0, p(x) - math.exp(epsilon) * q(x)), x))


def gaussian_mixture(means: dict[float, float], sigma: float) -> Density:
    """Return the density of Σ weight · N(mean, σ²)."""
    return lambda x: np.sum([w * norm.pdf(x, m, sigma) for m, w in means.items()], axis=0)


def composed_delta(p: Floats, q: Floats, times: int, epsilon: float) -> float:
    """Return the hockey-stick divergence of p^times from q^times, both on the same points."""
    log_ratio = np.log(p) - np.log(q)
    weights, losses = p, log_ratio
    for _ in range(times - 1):
        weights = np.multiply.outer(weights, p).ravel()
        losses = np.add.outer(losses, log_ratio).ravel()
    return float(np.sum(weights * np.maximum(0.0, -np.expm1(epsilon - losses))))
