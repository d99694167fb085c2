import math

import numpy as np
import pyarrow as pa
import pytest
from scipy.optimize import brentq

from dp_core.errors import BadInput, PlanError
from dp_core.privacy.accounting.accountants import composed_profile, epsilon_pld
from dp_core.privacy.mechanisms import PrivacyUnit, ThresholdedHistogram
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.vocabulary import selection_calibration
from dp_core.vocabulary.item_sets import ItemSets
from dp_core.vocabulary.partition_selection import Counted
from dp_core.vocabulary.selection_calibration import (
    calibrate,
    continuous_delta,
    delta_of,
    paper_parameters,
    smallest_threshold,
)

EPSILON, DELTA, N = 0.5178, 1e-9, 256  # from the paper


def test_continuous_delta_equals_reference_values():
    assert continuous_delta(N, 166.0, 1136.8, EPSILON) == pytest.approx(1e-9, rel=2e-3)
    # The infimum is C ↓ 1130.9 as σ ↓ 165.14; below that σ no threshold suffices.
    assert continuous_delta(N, 165.145, 1131.0, EPSILON) <= DELTA
    assert continuous_delta(N, 165.145, 1130.7, EPSILON) > DELTA
    assert continuous_delta(N, 165.13, 1e6, EPSILON) > DELTA


def test_target_of_the_paper_gets_the_smallest_threshold():
    plan = calibrate(EPSILON, DELTA, N, unit=PrivacyUnit.EXAMPLE, declared_units=83_000_000)
    # Continuous C is 1130.9; integers and the discrete tail (half a count) make it 1132.
    assert plan.threshold == 1132
    assert plan.sigma == pytest.approx(165.15, abs=0.02)
    assert delta_of(N, plan.sigma, plan.threshold, EPSILON) <= DELTA
    for sigma in (164.5, 165.15, 166.5, 170.0):
        assert delta_of(N, sigma, 1131, EPSILON) > DELTA
    assert smallest_threshold(EPSILON, DELTA, N, 160.0) is None
    assert plan.event() == ThresholdedHistogram(N, plan.sigma, 1132, unit=PrivacyUnit.EXAMPLE)


@pytest.mark.cases
def test_plan_provides_its_target_and_nearby_sigmas_need_no_smaller_threshold(
    epsilon, delta, words
):
    plan = calibrate(epsilon, delta, words)
    earned = delta_of(words, plan.sigma, plan.threshold, epsilon)
    assert earned <= delta
    assert delta_of(words, plan.sigma, plan.threshold - 1, epsilon) > delta
    for factor in (0.97, 1.03, 1.3):
        other = smallest_threshold(epsilon, delta, words, plan.sigma * factor)
        assert other is None or other >= plan.threshold


def test_plan_that_claims_too_much_is_refused():
    Counted(N, EPSILON, DELTA, None, None, 166.0, 1138)
    with pytest.raises(PlanError, match=r"1\.01e-09"):
        Counted(N, EPSILON, DELTA, None, None, 166.0, 1137)  # the continuous formulas allow it


def test_paper_mode_states_printed_and_true_delta():
    """The other figures are rows of the paper's table (`test_paper_table.py`)."""
    paper = paper_parameters()
    assert paper.lone_word == pytest.approx(4.6e-7, rel=0.01)
    assert paper.right_delta <= 1e-9
    # No larger ε repairs the printed threshold.
    assert continuous_delta(N, 200.0, paper.threshold, 20.0) > 1.1e-4


@pytest.mark.cases
def test_targets_that_no_noise_reaches_are_refused(epsilon, delta, words):
    with pytest.raises(BadInput):
        calibrate(epsilon, delta, words)


WISHES = (0.1, 0.5178, 1.0, 2.0, 3.0, 5.0, 8.0, 10.0, 20.0)


def enumerated_epsilon(sigma: float, threshold: int, delta: float) -> float:
    """Return ε of a histogram of one word per unit from the probabilities of its outcomes."""
    z = np.arange(-math.ceil(60 * sigma) - 60, math.ceil(60 * sigma) + 61)
    mass = np.exp(-(z**2) / (2 * sigma**2))
    mass /= mass.sum()
    lone = float(mass[z >= threshold - 1].sum())  # released only if the unit is present
    still, moved = np.append(mass, 0.0), np.insert(mass, 0, 0.0)

    def excess(epsilon: float) -> float:
        e = math.exp(epsilon)
        shared = np.maximum(moved - e * still, 0.0).sum()
        hidden = max(0.0, 1 - e * (1 - lone))  # outcome without a release, then the others
        return max(float(shared), lone, lone + hidden) - delta

    return float(brentq(excess, 0.0, 60.0, xtol=1e-9)) if lone < delta else math.inf


@pytest.mark.parametrize("delta", [1e-5, 1e-7, 1e-9])
@pytest.mark.parametrize("wish", WISHES)
def test_profile_of_one_word_per_unit_equals_enumeration(wish, delta):
    plan = calibrate(wish, delta, 1)
    truth = enumerated_epsilon(plan.sigma, plan.threshold, delta)
    charged = epsilon_pld(plan.event(), delta)
    assert truth * (1 - 1e-6) <= charged <= truth * 1.005
    assert charged <= wish
    # Below σ = 2 the few values of the noise give the privacy loss only a few values.
    assert charged >= 0.995 * wish or plan.sigma < 2


@pytest.mark.cases
def test_charged_epsilon_equals_requested_epsilon(wish, words, delta):
    charged = epsilon_pld(calibrate(wish, delta, words).event(), delta)
    assert 0.995 * wish <= charged <= wish


@pytest.mark.parametrize(("sigma", "threshold", "delta"), [(5.6556, 32, 1e-5), (1.3768, 8, 1e-5)])
def test_epsilon_and_delta_are_inverse_functions(sigma, threshold, delta):
    """Includes cases with little noise, where much of δ is at the largest finite loss."""
    event = ThresholdedHistogram(128 if threshold > 8 else 1, sigma, threshold)
    epsilon = epsilon_pld(event, delta)
    assert composed_profile(event)(epsilon) == pytest.approx(delta, rel=1e-2)
    assert composed_profile(event)(0.995 * epsilon) > delta


def test_plan_charged_above_the_target_gets_more_noise(monkeypatch):
    """The accounting corrects a search that finds too little noise."""
    monkeypatch.setattr(selection_calibration, "_WITHIN", 1.01)
    sigma, threshold = selection_calibration._charged_at_most.__wrapped__(2.0, 1e-7, 32)
    charged = epsilon_pld(ThresholdedHistogram(32, sigma, threshold), 1e-7)
    assert 0.99 * 2.0 <= charged <= 2.0


SEED = PrivacySeed.fixed(7)


def plan(sigma: float, threshold: int) -> Counted:
    """A plan that claims nothing (δ = 1), because these tests are about its draws."""
    return Counted(10, 1, 1, None, None, sigma, threshold)


def release(
    counts: dict[str, int], plan: Counted, seed: PrivacySeed, context: bytes
) -> dict[str, int]:
    """Release from as many units with one word each as the counts say."""
    words = sorted(counts)
    times = np.array([counts[word] for word in words], np.int64)
    members = np.repeat(np.arange(len(words), dtype=np.int32), times)
    items = pa.array(words, pa.large_string())
    units = ItemSets(np.arange(len(members) + 1), members, items, 1)
    return plan.release([units], seed, context)


def test_threshold_is_inclusive():
    counts = {"a": 100}
    noised = release(counts, plan(1.0, 1), SEED, b"x")["a"]
    assert release(counts, plan(1.0, noised), SEED, b"x") == {"a": noised}
    assert release(counts, plan(1.0, noised + 1), SEED, b"x") == {}


@pytest.mark.statistical
def test_noise_has_the_sigma_of_the_plan():
    """Variance of the noise, at six standard errors: σ passes, 2/3 σ and 3/2 σ do not."""
    words = [f"w{i}" for i in range(4000)]
    counts = dict.fromkeys(words, 1000)
    noise = np.array(list(release(counts, plan(20.0, 1), SEED, b"x").values())) - 1000
    assert len(noise) == 4000

    def fits(sigma: float) -> bool:
        return bool(abs(noise.var() / sigma**2 - 1) < 6 * np.sqrt(2 / 4000))

    assert fits(20.0)
    assert not fits(20.0 * 2 / 3)
    assert not fits(20.0 * 3 / 2)
    assert abs(noise.mean()) < 6 * 20 / np.sqrt(4000)
