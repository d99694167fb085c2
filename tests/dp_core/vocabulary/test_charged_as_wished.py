"""A plan for (ε, δ) is charged at most ε, so a budget equal to the target suffices."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq

from dp_core.errors import BadInput
from dp_core.privacy.accounting.calibration import noise_for
from dp_core.privacy.accounting.pld import delta_pld, epsilon_pld
from dp_core.privacy.ledger import Entry, Ledger
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit, ThresholdedHistogram, compose
from dp_core.vocabulary import selection_calibration
from dp_core.vocabulary.selection_calibration import calibrate

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
def test_profile_of_one_word_per_unit_equals_enumeration(wish: float, delta: float) -> None:
    plan = calibrate(wish, delta, 1)
    truth = enumerated_epsilon(plan.sigma, plan.threshold, delta)
    charged = epsilon_pld(plan.event(), delta)
    assert truth * (1 - 1e-6) <= charged <= truth * 1.005
    assert charged <= wish
    # Below σ = 2 the few values of the noise give the privacy loss only a few values.
    assert charged >= 0.995 * wish or plan.sigma < 2


@pytest.mark.parametrize(
    ("wish", "words", "delta"),
    [
        *((wish, 32, 1e-9) for wish in WISHES),
        *((wish, 128, 1e-5) for wish in (0.1, 3.0, 10.0)),
        (8.0, 256, 1e-9),
        (10.0, 5000, 1e-5),
    ],
)
def test_charged_epsilon_equals_requested_epsilon(wish: float, words: int, delta: float) -> None:
    charged = epsilon_pld(calibrate(wish, delta, words).event(), delta)
    assert 0.995 * wish <= charged <= wish


@pytest.mark.parametrize(("sigma", "threshold", "delta"), [(5.6556, 32, 1e-5), (1.3768, 8, 1e-5)])
def test_epsilon_and_delta_are_inverse_functions(
    sigma: float, threshold: int, delta: float
) -> None:
    """Includes cases with little noise, where much of δ is at the largest finite loss."""
    event = ThresholdedHistogram(128 if threshold > 8 else 1, sigma, threshold)
    epsilon = epsilon_pld(event, delta)
    assert delta_pld(event, epsilon) == pytest.approx(delta, rel=1e-2)
    assert delta_pld(event, 0.995 * epsilon) > delta


def test_histogram_composed_with_a_training_is_charged_exactly() -> None:
    """The training uses the budget that the vocabulary leaves, and the total is the target."""
    vocabulary = calibrate(5.0, 1e-7, 128).event()

    def training(sigma: float) -> PoissonGaussian:
        return PoissonGaussian.single(0.02, sigma, 200)

    sigma = noise_for(training, 10.0, 1.1e-6, vocabulary)
    assert 9.95 <= epsilon_pld(compose(vocabulary, training(sigma)), 1.1e-6) <= 10.0


def test_budget_equal_to_the_target_suffices(tmp_path: Path) -> None:
    wish = 10.0
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.db")
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, wish, 1e-7, order=math.inf)
    plan = calibrate(wish, 1e-7, 32, unit=PrivacyUnit.PATIENT)
    ledger.reserve(
        Entry(
            dataset="notes", unit=PrivacyUnit.PATIENT, event=plan.event(), delta=1e-7,
            spec_hash="a", plan_key="p", run="r",
        )
    )  # fmt: skip


def test_plan_charged_above_the_target_gets_more_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accounting corrects a search that finds too little noise."""
    monkeypatch.setattr(selection_calibration, "_WITHIN", 1.01)
    sigma, threshold = selection_calibration._charged_at_most.__wrapped__(2.0, 1e-7, 32)
    charged = epsilon_pld(ThresholdedHistogram(32, sigma, threshold), 1e-7)
    assert 0.99 * 2.0 <= charged <= 2.0


@pytest.mark.parametrize("wish", [1e-300, 1e-9, 1e3, 1e300])
def test_target_that_no_noise_reaches_is_refused(wish: float) -> None:
    with pytest.raises(BadInput, match=r"no noise of the histogram|not above 0"):
        calibrate(wish, 1e-9, 256)
