import math

import pytest

from dp_core.errors import BadInput, PlanError
from dp_core.privacy.mechanisms import PrivacyUnit, ThresholdedHistogram
from dp_core.vocabulary.partition_selection import Counted
from dp_core.vocabulary.selection_calibration import (
    calibrate,
    continuous_delta,
    delta_of,
    paper_parameters,
    smallest_threshold,
)

EPSILON, DELTA, N = 0.5178, 1e-9, 256  # from the paper


def test_continuous_delta_equals_reference_values() -> None:
    assert continuous_delta(N, 166.0, 1136.8, EPSILON) == pytest.approx(1e-9, rel=2e-3)
    # The infimum is C ↓ 1130.9 as σ ↓ 165.14; below that σ no threshold suffices.
    assert continuous_delta(N, 165.145, 1131.0, EPSILON) <= DELTA
    assert continuous_delta(N, 165.145, 1130.7, EPSILON) > DELTA
    assert continuous_delta(N, 165.13, 1e6, EPSILON) > DELTA


def test_target_of_the_paper_gets_the_smallest_threshold() -> None:
    plan = calibrate(EPSILON, DELTA, N, unit=PrivacyUnit.EXAMPLE, declared_units=83_000_000)
    # Continuous C is 1130.9; integers and the discrete tail (half a count) make it 1132.
    assert plan.threshold == 1132
    assert plan.sigma == pytest.approx(165.15, abs=0.02)
    assert delta_of(N, plan.sigma, plan.threshold, EPSILON) <= DELTA
    for sigma in (164.5, 165.15, 166.5, 170.0):
        assert delta_of(N, sigma, 1131, EPSILON) > DELTA
    assert plan.event() == ThresholdedHistogram(N, plan.sigma, 1132, unit=PrivacyUnit.EXAMPLE)


@pytest.mark.parametrize(
    ("epsilon", "delta", "words"),
    [(1.0, 1e-7, 64), (1.0, 1e-6, 1), (6.0, 1e-6, 100), (0.05, 1e-3, 3), (8.0, 1e-3, 300)],
)
def test_plan_provides_its_target_and_nearby_sigmas_need_no_smaller_threshold(
    epsilon: float, delta: float, words: int
) -> None:
    plan = calibrate(epsilon, delta, words)
    earned = delta_of(words, plan.sigma, plan.threshold, epsilon)
    assert earned <= delta
    assert delta_of(words, plan.sigma, plan.threshold - 1, epsilon) > delta
    for factor in (0.97, 1.03, 1.3):
        other = smallest_threshold(epsilon, delta, words, plan.sigma * factor)
        assert other is None or other >= plan.threshold


def test_smallest_threshold_is_smallest() -> None:
    c = smallest_threshold(EPSILON, DELTA, N, 180.0)
    assert c is not None
    assert delta_of(N, 180.0, c, EPSILON) <= DELTA < delta_of(N, 180.0, c - 1, EPSILON)
    assert smallest_threshold(EPSILON, DELTA, N, 160.0) is None


def test_more_noise_or_threshold_never_hurts_privacy() -> None:
    deltas = [delta_of(50, 30.0, c, 1.0) for c in (90, 110, 130, 150)]
    assert deltas == sorted(deltas, reverse=True)
    assert delta_of(50, 30.0, 10_000, 1.0) > delta_of(50, 40.0, 10_000, 1.0)
    assert delta_of(50, 30.0, 150, 1.0) < delta_of(60, 30.0, 150, 1.0)


def test_plan_that_claims_too_much_is_refused() -> None:
    Counted(N, EPSILON, DELTA, None, None, 166.0, 1138)
    with pytest.raises(PlanError, match=r"1\.01e-09"):
        Counted(N, EPSILON, DELTA, None, None, 166.0, 1137)  # the continuous formulas allow it


def test_paper_mode_states_printed_and_true_delta() -> None:
    paper = paper_parameters()
    assert paper.epsilon == pytest.approx(0.5178, abs=5e-5)
    assert paper.threshold == pytest.approx(982.54, abs=0.005)
    assert paper.lone_word == pytest.approx(4.6e-7, rel=0.01)
    assert paper.true_delta == pytest.approx(1.18e-4, rel=0.01)
    assert paper.right_threshold == pytest.approx(1369.39, abs=0.005)
    assert paper.right_delta <= 1e-9
    # No larger ε repairs the printed threshold.
    assert continuous_delta(N, 200.0, paper.threshold, 20.0) > 1.1e-4


def test_paper_mode_plan_claims_only_its_true_delta() -> None:
    plan = paper_parameters().plan(unit=PrivacyUnit.EXAMPLE)
    assert (plan.sigma, plan.threshold) == (200.0, 983)
    assert plan.delta == pytest.approx(1.18e-4, rel=0.01)


@pytest.mark.parametrize(
    ("epsilon", "delta", "words"),
    [(0.0, 1e-6, 10), (math.inf, 1e-6, 10), (1.0, 0.0, 10), (1.0, 1.0, 10), (1.0, 1e-6, 0)],
)
def test_impossible_targets_are_refused(epsilon: float, delta: float, words: int) -> None:
    with pytest.raises(BadInput):
        calibrate(epsilon, delta, words)
