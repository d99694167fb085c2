import dataclasses
import functools
import itertools
import math
from typing import Any

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from mechanism_examples import plan_of, power_strategy
from numpy.typing import NDArray
from scipy.linalg import toeplitz

from dp_core.config.training import OptimizerConfig
from dp_core.errors import PlanError
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.accounting.calibration import least_error, with_bands, workload_error
from dp_core.privacy.batch_selection import CyclicPoissonSampling, TruncatedPoissonSampling
from dp_core.privacy.execution_plan import AdaptiveClipping, BatchPhase
from dp_core.privacy.matrix_factorization import (
    INDEPENDENT,
    ToeplitzStrategy,
    Workload,
    least_error_strategy,
)
from dp_core.privacy.mechanisms import CyclicPoissonGaussian

Matrix = NDArray[np.float64]


def dense(strategy: ToeplitzStrategy, n: int) -> Matrix:
    column = np.zeros(n)
    column[: strategy.bands] = strategy.values[:n]
    return np.asarray(toeplitz(column, np.zeros(n)))


plan = functools.partial(plan_of, declared_units=6000, steps=282, noise_multiplier=1.0)


def optimizer(updates: int, **settings: Any) -> Workload:
    """Return the workload of the shipped AdamW, with warm-up, decay and β₁ = 0.9."""
    config = OptimizerConfig(**settings)
    rates = tuple(config.learning_rate_at(t, updates) for t in range(updates))
    return Workload(rates, config.beta1)


def sums(updates: int) -> Workload:
    return Workload((1.0,) * updates)


STRATEGIES = [
    INDEPENDENT,
    power_strategy(3, 0.5),
    least_error_strategy(4, sums(9)),
    ToeplitzStrategy.of(np.array([1.0, -0.7, 0.3])),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: str(s.bands))
def test_no_participation_b_updates_apart_moves_the_sums_further_than_its_columns(strategy):
    """Brute force over all patterns and signs; one update closer, the sums move further."""
    n, b = 9, strategy.bands
    matrix = dense(strategy, n)
    worst = dict.fromkeys((b - 1, b), 0.0)
    for pattern in itertools.product((0, 1, -1), repeat=n):
        u = np.array(pattern, np.float64)
        updates = np.flatnonzero(u)
        for apart in worst:
            if len(updates) and (len(updates) == 1 or np.diff(updates).min() >= apart):
                moved = float(np.linalg.norm(matrix @ u)) / math.sqrt(len(updates))
                worst[apart] = max(worst[apart], moved)
    assert worst[b] == pytest.approx(strategy.norm, rel=1e-12)
    assert b == 1 or worst[b - 1] > strategy.norm * 1.01


def weights(workload: Workload, gradients: Matrix) -> Matrix:
    """Return the weights after every update of the optimiser, with second moments fixed at 1."""
    mean, weight, passed = np.zeros(gradients.shape[1]), np.zeros(gradients.shape[1]), []
    beta = workload.momentum
    for t, (rate, gradient) in enumerate(zip(workload.learning_rates, gradients, strict=True)):
        mean = beta * mean + (1 - beta) * gradient
        weight = weight + rate * mean / (1 - beta ** (t + 1))
        passed.append(weight)
    return np.array(passed)


WORKLOADS = [sums(40), optimizer(40), optimizer(40, beta1=0.0, decay_power=2.0), sums(5)]


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: str(s.bands))
def test_noise_and_error_equal_dense_matrix_computation(strategy, workload):
    n = workload.updates
    inverse = np.linalg.inv(dense(strategy, n))
    np.testing.assert_allclose(strategy.noising(n), inverse[:, 0], atol=1e-12)
    rows = weights(workload, np.eye(n))[[t - 1 for t in workload.iterates]] @ inverse
    error = math.sqrt((rows**2).sum() / len(rows)) * np.linalg.norm(strategy.values)
    assert workload.error(strategy) == pytest.approx(error, rel=1e-9)
    total = float(np.linalg.norm(np.ones(n) @ inverse)) * strategy.norm
    assert strategy.sum_deviation(n) == pytest.approx(total, rel=1e-12)
    alone = strategy.norm * float(np.linalg.norm(inverse[-1]))  # noise of the last update
    assert strategy.loudness(n) == pytest.approx(alone / (total / math.sqrt(n)), rel=1e-12)


@pytest.mark.parametrize(("n", "some"), [(3, (1, 2, 3)), (8, tuple(range(1, 9)))])
def test_of_short_runs_all_iterates_count_and_of_all_the_last(n, some):
    assert sums(n).iterates == some
    assert sums(1000).iterates == tuple(range(125, 1001, 125))


@pytest.mark.parametrize("strategy", [INDEPENDENT, power_strategy(8, 0.6)])
def test_error_over_selected_iterates_is_near_error_over_all(strategy):
    for workload in (sums(282), optimizer(282)):
        everything = np.linalg.inv(dense(strategy, 282))
        rows = weights(workload, everything)
        error = math.sqrt((rows**2).sum() / 282) * strategy.norm
        alone = math.sqrt((weights(workload, np.eye(282)) ** 2).sum() / 282)
        beside = workload.error(strategy) / workload.error(INDEPENDENT)
        assert beside == pytest.approx(error / alone, rel=0.01)


def test_one_band_is_dp_sgd():
    assert INDEPENDENT.sum_deviation(49) == pytest.approx(7)
    assert all(INDEPENDENT.loudness(n) == 1.0 for n in range(1, 300))
    assert least_error_strategy(1, sums(50)) is INDEPENDENT
    assert with_bands(plan(), 1, sums(282)) == plan()


@pytest.mark.parametrize("bands", [33, 64])
@pytest.mark.parametrize("workload", [sums(200), optimizer(200)], ids=["sums", "optimizer"])
def test_every_number_of_bands_that_may_be_asked_for_has_a_strategy(bands, workload):
    strategy = least_error_strategy(bands, workload)
    assert strategy.bands == bands
    assert workload.error(strategy) < 0.5 * workload.error(INDEPENDENT)


def test_epsilon_equals_dp_accountings_subsampled_gaussians():
    event = CyclicPoissonGaussian(4, ((0.3, 1.3, 50),))
    step = dpa.PoissonSampledDpEvent(0.3, dpa.GaussianDpEvent(1.3))
    library = PLDAccountant().compose(dpa.SelfComposedDpEvent(step, 13))  # ⌈50 / 4⌉
    assert epsilon_pld(event, 1e-5) == pytest.approx(library.get_epsilon(1e-5), rel=2e-3)


@pytest.mark.parametrize(
    ("changes", "of", "bands", "least"),
    [
        ({"noise_multiplier": 0.999}, optimizer, 16, 0.72),
        ({"noise_multiplier": 0.8, "steps": 400, "expected_batch": 20}, sums, 16, 0.57),
        ({"expected_batch": 4000}, optimizer, 1, 1.0),  # no part can fill a batch
        ({"steps": 1}, sums, 1, 1.0),
    ],
)
def test_the_number_of_bands_is_the_one_of_least_error_and_never_costs_more(
    changes, of, bands, least
):
    alone = plan(**changes)
    workload = of(alone.steps)
    chosen = least_error(alone, workload)
    assert chosen.strategy.bands == bands == chosen.sampling.separation
    ratio = workload_error(chosen, workload) / workload_error(alone, workload)
    assert ratio == pytest.approx(least, abs=0.02)
    spent = epsilon_pld(alone.event(), 1e-6)
    assert spent * 0.99 < epsilon_pld(chosen.event(), 1e-6) <= spent


def test_where_correlated_noise_is_not_proven_the_plan_stays_as_it_is():
    grown = dataclasses.replace(plan(), schedule=(BatchPhase(20, 64), BatchPhase(262, 256)))
    cut = dataclasses.replace(plan(), sampling=TruncatedPoissonSampling(300))
    learned = plan(adaptive=AdaptiveClipping(0.5, 5.0))
    for other in (grown, cut, learned):
        assert least_error(other, sums(282)) is other
    with pytest.raises(PlanError, match="only for Poisson samples"):
        with_bands(cut, 8, sums(282))
    eight = with_bands(plan(), 8, sums(282))
    for changes, reason in (
        ({"adaptive": AdaptiveClipping(0.5, 5.0)}, "a clip norm that stays the same"),
        ({"schedule": grown.schedule}, "batches of one expected size"),
        ({"sampling": CyclicPoissonSampling(7)}, "may take part every 7 updates"),
        ({"sampling": plan().sampling}, "may take part every 1 updates"),
        ({"strategy": ToeplitzStrategy.of(np.array([1.0, 0.99]))}, "4 times the noise of DP-SGD"),
    ):
        with pytest.raises(PlanError, match=reason):
            dataclasses.replace(eight, **changes)


@pytest.mark.parametrize("wrong", [(), (1 << 15,), (1 << 16, 0.5), (1 << 16, 64 << 16)])
def test_impossible_coefficients_are_refused(wrong):
    with pytest.raises(PlanError, match=r"plan\.strategy"):
        ToeplitzStrategy(wrong)
