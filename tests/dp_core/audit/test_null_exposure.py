"""The null against brute force, simulation and closed forms."""

import itertools
import math

import numpy as np
import pytest

from dp_core.audit.exposure import null_exposure, null_p_value, null_rank_exposure


@pytest.mark.parametrize(("candidates", "canaries"), [(7, 1), (7, 2), (5, 4)])
def test_small_cases_equal_enumeration(candidates: int, canaries: int) -> None:
    ranks = itertools.product(range(1, candidates + 1), repeat=canaries)
    means = np.array([sum(r) / canaries for r in ranks])
    expected = float((math.log2(candidates) - np.log2(means)).mean())
    assert null_exposure(candidates, canaries).expected == pytest.approx(expected, abs=1e-9)
    for mean in np.unique(means):
        exact = float((means <= mean + 1e-9).mean())
        assert null_p_value(float(mean), candidates, canaries) == pytest.approx(exact, abs=1e-9)


def test_the_largest_of_several_groups_equals_enumeration() -> None:
    candidates, groups = 6, 3
    smallest = [min(r) for r in itertools.product(range(1, candidates + 1), repeat=groups)]
    expected = float(np.mean([math.log2(candidates) - math.log2(r) for r in smallest]))
    found = null_exposure(candidates, 1, groups)
    assert found.expected == pytest.approx(expected, abs=1e-9)
    assert found.expected > null_exposure(candidates, 1).expected


@pytest.mark.parametrize("canaries", [1, 4, 24])
def test_the_band_holds_95_percent_of_simulated_models(canaries: int) -> None:
    candidates, trials = 4000, 40_000
    coins = np.random.default_rng(canaries)
    ranks = coins.integers(1, candidates + 1, (trials, canaries)).mean(axis=1)
    bits = math.log2(candidates) - np.log2(ranks)
    null = null_exposure(candidates, canaries)
    assert bits.mean() == pytest.approx(null.expected, abs=0.03)
    # Five standard errors of a share of 2.5% in 40,000 trials are 0.4 points.
    assert (bits < null.low).mean() == pytest.approx(0.025, abs=0.004)
    assert (bits > null.high).mean() == pytest.approx(0.025, abs=0.004)


def test_one_canary_expects_log2_e_and_many_expect_one_bit() -> None:
    assert null_exposure(100_000, 1).expected == pytest.approx(math.log2(math.e), abs=1e-3)
    many = null_exposure(30_000, 1000)
    assert many.expected == pytest.approx(1.0, abs=2e-3)
    # Central limit: the mean of n uniforms has standard deviation 1/√(12n).
    edge = 0.5 - 1.959964 / math.sqrt(12 * 1000)
    assert many.high == pytest.approx(-math.log2(edge), abs=2e-3)


def test_p_values_bottom_out_where_floating_point_does() -> None:
    assert null_p_value(1.0, 4000, 2) == pytest.approx(1 / 4000**2, rel=1e-3)
    assert null_p_value(1.0, 4000, 8) == 1e-12
    assert null_p_value(0.5, 4000, 8) == 1e-12
    assert null_p_value(4000.0, 4000, 8) == pytest.approx(1.0)


def test_rank_exposure_without_memory() -> None:
    assert null_rank_exposure(0) == 0.0
    assert null_rank_exposure(1) == pytest.approx(0.5)  # first (1 bit) or second (0 bits) of two
    assert null_rank_exposure(100_000) == pytest.approx(math.log2(math.e), abs=1e-3)


def test_nothing_to_average_is_an_error() -> None:
    with pytest.raises(ValueError, match="canaries=0"):
        null_exposure(100, 0)
