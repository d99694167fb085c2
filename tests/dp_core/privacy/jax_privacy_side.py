"""Figures of jax_privacy for correlated noise. Runs in `.venv/jax-privacy`, not in pytest.

    python jax_privacy_side.py QUESTIONS ANSWERS   reads and writes JSON

The script uses two packages of google-deepmind/jax_privacy: `matrix_factorization` (strategies and
their error) and `experimental` (event and calibrated plan of banded matrix factorisation).
"""

import json
import sys
from pathlib import Path

import dp_accounting
import jax
import numpy as np
from jax_privacy.batch_selection import PartitionType
from jax_privacy.experimental.accounting import amplified_bandmf_event
from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig
from jax_privacy.matrix_factorization import toeplitz

jax.config.update("jax_enable_x64", True)


def accountant():
    return dp_accounting.pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)


def least_error(updates, bands):
    """Return the root mean square error of the prefix sums with the optimised strategy."""
    best = toeplitz.optimize_banded_toeplitz(n=updates, bands=bands, max_optimizer_steps=150)
    mean = np.mean(toeplitz.per_query_error(strategy_coef=best, n=updates))
    return float(np.sqrt(mean) * np.linalg.norm(best))


def epsilon(rate, sigma, updates, bands, delta):
    """Return ε of banded matrix factorisation."""
    event = amplified_bandmf_event(
        noise_multiplier=sigma, iterations=updates, num_bands=bands, sampling_prob=rate
    )
    return accountant().compose(event).get_epsilon(delta)


def sigma(coefficients, rate, updates, epsilon, delta):
    """Return the noise multiplier of the calibrated plan, which is the deviation of z."""
    config = BandMFExecutionPlanConfig(
        strategy=np.array(coefficients),
        iterations=updates,
        epsilon=epsilon,
        delta=delta,
        sampling_prob=rate,
        accountant=accountant(),
        partition_type=PartitionType.INDEPENDENT,
    )
    return config.plan.dp_event.event.event.noise_multiplier


ASKED = {"least error": least_error, "epsilon": epsilon, "sigma": sigma}

if __name__ == "__main__":
    questions, answers = map(Path, sys.argv[1:])
    results = [ASKED[kind](**arguments) for kind, arguments in json.loads(questions.read_text())]
    answers.write_text(json.dumps(results))
