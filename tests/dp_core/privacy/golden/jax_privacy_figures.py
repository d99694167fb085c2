"""Prints figures of google-deepmind/jax_privacy, in an environment of its own.

    python3.11 -m venv /tmp/jax && /tmp/jax/bin/pip install jax==0.10.2 jax-privacy==2.0.0
    /tmp/jax/bin/python tests/dp_core/privacy/golden/jax_privacy_figures.py

What it printed stands in tests/dp_core/privacy/test_matrix_factorization.py.
"""

import dp_accounting
import jax
import numpy as np
from jax_privacy.experimental.accounting import amplified_bandmf_event
from jax_privacy.matrix_factorization import toeplitz

jax.config.update("jax_enable_x64", True)
DELTA = 1e-6


def figures(coefficients: np.ndarray, updates: int) -> tuple[float, float]:
    """Return the error of the prefix sums for columns of norm 1, and the whole sensitivity."""
    c, bands = np.asarray(coefficients), len(coefficients)
    error = np.mean(toeplitz.per_query_error(strategy_coef=c, n=updates)) * np.sum(c**2)
    squared = toeplitz.minsep_sensitivity_squared(c, min_sep=bands, n=updates)
    return float(np.sqrt(error)), float(np.sqrt(squared))


if __name__ == "__main__":
    for updates, bands in ((282, 4), (2000, 8)):
        root = np.asarray(toeplitz.optimal_max_error_strategy_coefs(bands))
        best = toeplitz.optimize_banded_toeplitz(n=updates, bands=bands, max_optimizer_steps=150)
        print((updates, bands), figures(root, updates), figures(best, updates))
    for rate, sigma, updates, bands in (
        (0.08, 2.1743, 2000, 8),
        (0.1707, 1.6038, 282, 4),
        (0.3, 1.2, 101, 3),
    ):
        event = amplified_bandmf_event(
            noise_multiplier=sigma, iterations=updates, num_bands=bands, sampling_prob=rate
        )
        neighbours = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        accountant = dp_accounting.pld.PLDAccountant(neighbours).compose(event)
        print((rate, sigma, updates, bands), accountant.get_epsilon(DELTA))
