"""The Gaussian mechanism in closed form (Balle and Wang 2018, arXiv:1805.06530, Theorem 8)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import log_ndtr


def gaussian_delta(epsilon: ArrayLike, mu: ArrayLike) -> NDArray[np.float64]:
    """Return δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), exact in both directions.

    Args:
        epsilon: any real numbers.
        mu: sensitivity over standard deviation, ≥ 0; broadcast against `epsilon`.
    """
    eps, m = np.asarray(epsilon, dtype=np.float64), np.asarray(mu, dtype=np.float64)
    safe = np.where(m > 0, m, 1.0)
    upper = log_ndtr(safe / 2 - eps / safe)
    lower = eps + log_ndtr(-safe / 2 - eps / safe)
    delta = np.exp(upper) * -np.expm1(np.minimum(lower - upper, 0.0))
    return np.where(m > 0, delta, np.maximum(0.0, -np.expm1(np.minimum(eps, 0.0))))


def gaussian_epsilon(delta: float, mu: float) -> float:
    """Return the smallest ε ≥ 0 at which the Gaussian mechanism with μ is (ε, δ)-DP."""
    if gaussian_delta(0.0, mu) <= delta:
        return 0.0
    high = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1e-9
    # Each call is monotone in ε; `high` is the zCDP bound, so the root lies between.
    return float(brentq(lambda e: float(gaussian_delta(e, mu)) - delta, 0.0, high, xtol=1e-12))
