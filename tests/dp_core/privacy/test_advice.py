import math
from dataclasses import replace

import mechanism_examples as examples
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.signal import lfilter

from dp_core.errors import BadInput
from dp_core.privacy import advice
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.accounting.calibration import noise_for, with_bands
from dp_core.privacy.accounting.profiles import gaussian_delta
from dp_core.privacy.execution_plan import AdaptiveClipping, BatchPhase
from dp_core.privacy.matrix_factorization import Workload
from dp_core.privacy.mechanisms import PoissonGaussian


def plan_of(batch: float = 50, steps: int = 40, sigma: float = 1.0, units: int = 1000, **fields):
    usual = {"expected_batch": batch, "noise_multiplier": sigma, "declared_units": units}
    return examples.plan_of(steps=steps, clip_norm=1.0, **usual | fields)


# Factor for a training of 40 updates that read one row per unit: few updates and a weak signal.
RAISED = (1 + advice.HALF_LEARNED["gradients"] / 40) / advice.signal_norm(1)


def test_the_figure_is_the_deviation_of_the_mean_update_by_simulation():
    """Simulate the mean of T noised sums divided by B, and apply the factor for few updates."""
    plan = plan_of(batch=50, steps=40, sigma=3.0)
    draws = np.random.default_rng(1).normal(0, 3.0, size=(20_000, 40)) / 50
    simulated = float(draws.mean(axis=1).std())
    assert advice.noise_to_signal(plan) == pytest.approx(simulated * RAISED, rel=0.03)


def test_the_figure_of_a_schedule_weighs_each_phase_by_its_own_batch():
    plan = replace(plan_of(), schedule=(BatchPhase(10, 20), BatchPhase(30, 50)), noise_multiplier=2)
    by_hand = math.sqrt(10 * (2 / 20) ** 2 + 30 * (2 / 50) ** 2) / 40
    assert advice.noise_to_signal(plan) == pytest.approx(by_hand * RAISED)


def test_correlated_noise_cancels_in_the_mean_update_by_simulation():
    """Independent noise of the same size in every update would double the figure."""
    plan = with_bands(plan_of(batch=50, steps=40, sigma=3.0), 4, Workload((1.0,) * 40))
    drawn = np.random.default_rng(2).normal(0, 3.0 * plan.strategy.norm, size=(40, 20_000))
    noise = lfilter([1.0], plan.strategy.values, drawn, axis=0) / 50
    simulated = float(noise.mean(axis=0).std()) * RAISED
    assert advice.noise_to_signal(plan) == pytest.approx(simulated, rel=0.03)
    assert simulated < 0.7 * advice.noise_to_signal(plan_of(batch=50, steps=40, sigma=3.0))


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_signal_norm_equals_norm_of_simulated_clipped_means(rows):
    """Each row is one direction plus isotropic noise of variance v; unit means are clipped to 1."""
    dimension, units = 1_000, 1_500
    rng = np.random.default_rng(rows)
    deviation = math.sqrt(advice.ROW_VARIANCE / rows / dimension)
    gradients = rng.normal(0, deviation, size=(units, dimension))
    gradients[:, 0] += 1
    clipped = gradients / np.linalg.norm(gradients, axis=1, keepdims=True)
    assert advice.signal_norm(rows) == pytest.approx(float(clipped[:, 0].mean()), rel=0.02)


def test_maskings_and_rows_raise_the_signal_equally():
    plain = advice.noise_to_signal(plan_of())
    rows = advice.noise_to_signal(plan_of(examples_per_step=4))
    both = advice.noise_to_signal(plan_of(examples_per_step=2, maskings_per_example=2))
    assert rows == both == pytest.approx(plain * advice.signal_norm(1) / advice.signal_norm(4))


def test_noise_by_the_limit_is_near_the_calibrated_one():
    for rate, steps, epsilon in ((0.04, 300, 3.0), (0.17, 282, 5.4)):
        plan = plan_of(batch=rate * 100_000, steps=steps, units=100_000)
        mu = brentq(lambda m, e=epsilon: float(gaussian_delta(e, m)) - 1e-6, 1e-6, 100)
        exact = noise_for(lambda s, p=plan: replace(p, noise_multiplier=s).event(), epsilon, 1e-6)
        assert 0.9 * exact < advice.noise_by_limit(plan, mu) < exact


def test_rows_come_before_maskings():
    assert advice.rows_to_try(4) == ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4))
    assert advice.rows_to_try(1) == ((1, 1),)
    assert advice.rows_to_try(3) == ((1, 1), (2, 1), (2, 2))
    assert len(advice.rows_to_try(1_000_000)) == 6 + 5
    assert max(rows for rows, _ in advice.rows_to_try(1_000_000)) == advice.MOST_ROWS


def test_a_learned_clip_norm_raises_it_as_it_raises_the_noise():
    plain = plan_of()
    adaptive = replace(plain, adaptive=AdaptiveClipping(0.5, count_noise=0.6))
    ratio = adaptive.gradient_noise_multiplier()
    assert ratio > 1.5
    assert advice.noise_to_signal(adaptive) == pytest.approx(ratio * advice.noise_to_signal(plain))


@pytest.mark.parametrize(("rate", "steps", "epsilon"), [(0.05, 40, 0.3), (0.3, 5, 8), (1, 1, 60)])
def test_rough_noise_is_the_calibrated_noise_to_three_digits(rate, steps, epsilon):
    def event_of(sigma):
        return PoissonGaussian(((rate, sigma, steps),))

    exact = noise_for(event_of, epsilon, 1e-6)
    assert advice.rough_noise(event_of, epsilon, 1e-6) == pytest.approx(exact, rel=3e-3)


def test_epsilon_that_no_noise_reaches_is_refused():
    with pytest.raises(BadInput, match="no noise reaches"):
        advice.rough_noise(lambda s: PoissonGaussian(((1.0, min(s, 1.0), 9),)), 0.5, 1e-6)


def test_batches_are_powers_of_two_and_everything_at_once():
    assert advice.batches_to_try(100, 1e9) == (8, 16, 32, 64, 100)
    assert advice.batches_to_try(100, 20) == (8, 16, 20)  # a batch of all draws
    assert advice.batches_to_try(10, 100) == (8, 10)
    assert advice.batches_to_try(64, 64) == (8, 16, 32, 64)


def test_the_outlook_falls_with_units_and_with_epsilon():
    cases = {case.name: case for case in advice.outlook(plan_of())}
    planned = cases["as planned"]
    assert planned.figure == advice.noise_to_signal(plan_of())
    assert cases["half the units"].declared_units == 500
    assert cases["twice the units"].declared_units == 2000
    assert cases["twice the units"].figure < planned.figure < cases["half the units"].figure
    assert (
        cases["twice the ε of training"].figure
        < planned.figure
        < cases["half the ε of training"].figure
    )


def test_a_case_keeps_epsilon_and_passes():
    (case,) = (c for c in advice.outlook(plan_of()) if c.name == "twice the units")
    event = PoissonGaussian(((50 / 2000, case.noise_multiplier, 80),))  # still 2 passes
    epsilon = epsilon_pld(plan_of().event(), 1e-6)
    assert epsilon_pld(event, 1e-6) == pytest.approx(epsilon, rel=0.01)
    assert case.epsilon == epsilon
    twice = plan_of(units=2000, steps=80, sigma=case.noise_multiplier)
    assert case.figure == pytest.approx(advice.noise_to_signal(twice))


def test_a_case_whose_delta_would_give_a_unit_away_is_left_out():
    plan = replace(plan_of(units=60), delta=1 / 100)
    names = [case.name for case in advice.outlook(plan)]
    assert "twice the units" not in names
    assert "half the units" in names


def test_half_the_units_draw_no_batch_beyond_them():
    plan = plan_of(batch=1000, steps=12)
    (half,) = (c for c in advice.outlook(plan) if c.name == "half the units")
    wanted = plan_of(batch=500, steps=12, units=500, sigma=half.noise_multiplier)
    assert half.figure == pytest.approx(advice.noise_to_signal(wanted))


def test_zipf_coverage_by_adding_up_every_rank():
    n, threshold, counted = 6000, 150, 128
    ranks = np.arange(1, advice.ENGLISH_WORDS + 1)

    def distinct(k):
        return float(np.minimum(1, k / ranks).sum())

    low, high = 1e-3, 1e3
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if distinct(middle) < counted else (low, middle)
    released = np.minimum(1, low / ranks) >= threshold / n
    by_hand = float((1 / ranks[released]).sum() / (1 / ranks).sum())
    assert advice.zipf_coverage(threshold, n, counted) == pytest.approx(by_hand, abs=0.05)


def test_zipf_coverage_falls_with_the_threshold_to_nothing():
    coverage = [advice.zipf_coverage(c, 1000, 64) for c in (1, 10, 100, 999, 1000, 5000)]
    assert coverage == sorted(coverage, reverse=True)
    assert coverage[0] <= 1
    assert coverage[-2:] == [0.0, 0.0]


FIGURES = (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3)


def curve_of(shares) -> advice.GainCurve:
    return advice.GainCurve("gradients", "F1", FIGURES, tuple(shares), "made up here")


def test_the_fit_finds_the_curve_that_made_the_points():
    truth = [1 / (1 + (f / 3e-4) ** 1.5) for f in FIGURES]
    curve = curve_of(truth)
    assert curve.expected(3e-4).share == pytest.approx(0.5, abs=1e-4)
    wide = curve.expected(6e-4)
    assert wide.share == pytest.approx(1 / (1 + 2**1.5), abs=1e-4)
    assert wide.high - wide.low < 1e-3


def test_interval_of_a_figure_is_a_prediction_interval():
    """With points of noise 0.1, about 95% of new points of the same noise lie in the interval."""
    rng = np.random.default_rng(5)
    hits = []
    for _ in range(300):
        noised = [1 / (1 + (f / 3e-4) ** 1.5) + rng.normal(0, 0.1) for f in FIGURES]
        interval = curve_of(noised).expected(4e-4)
        new = 1 / (1 + (4 / 3) ** 1.5) + rng.normal(0, 0.1)
        hits.append(interval.low <= new <= interval.high)
    assert 0.90 < np.mean(hits) < 0.99


def test_figure_beyond_the_measured_ones_is_marked_as_not_measured():
    curve = curve_of([0.9, 0.7, 0.4, 0.2, 0.1])
    assert curve.expected(1e-4).measured
    assert not curve.expected(9e-5).measured
    assert not curve.expected(1.7e-3).measured


def test_curve_of_too_few_points_is_refused():
    with pytest.raises(BadInput, match="too few"):
        advice.GainCurve("gradients", "F1", (1e-4, 1e-4, 2e-4, 3e-4), (0.5,) * 4, "here")
