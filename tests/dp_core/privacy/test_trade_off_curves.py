"""Trade-off curves compared with each other, and with all tests by enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dp_core.privacy.accounting import delta_pld, epsilon_pld
from dp_core.privacy.accounting.profiles import gaussian_epsilon
from dp_core.privacy.accounting.tradeoff import GaussianTradeOff, PrivacyProfile
from dp_core.privacy.mechanisms import (
    Gaussian,
    PoissonGaussian,
    PrivacyUnit,
    ThresholdedHistogram,
    Unaccounted,
)

RATES = [1e-6, 1e-4, 0.01, 0.2, 0.5, 0.8, 0.99, 1.0]
PATIENT = PrivacyUnit.PATIENT


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (1.0, 0.0), (0.7, 0.1), (2.0, 0.01)])
def test_an_epsilon_delta_curve_is_the_best_of_all_tests(epsilon, delta):
    # This mechanism dominates all (ε, δ)-DP mechanisms (Kairouz, Oh and Viswanath 2015).
    high = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    inside = np.array([delta, high, 1 - delta - high, 0.0])
    outside = inside[::-1]
    curve = PrivacyProfile.of_claim(epsilon, delta)
    for said in itertools.product((0, 1), repeat=4):
        r, x = float(inside @ said), float(outside @ said)
        assert x >= curve.least_false_positive_rate(r) - 1e-12
    for r, x in ((delta, 0.0), (delta + high, 1 - delta - high), (1.0, 1 - delta)):
        assert curve.least_false_positive_rate(r) == pytest.approx(x, abs=1e-12)


def test_a_gaussian_curve_has_the_epsilon_that_it_was_made_of():
    curve = GaussianTradeOff.of_epsilon(3.0, 1e-5)
    assert curve.epsilon(1e-5) == pytest.approx(3.0, rel=1e-4)
    assert curve.least_false_positive_rate(0.5) == pytest.approx(
        1 - 0.5 * math.erfc(-curve.mu / math.sqrt(2))
    )
    assert GaussianTradeOff.of_epsilon(0.0, 1e-5).least_false_positive_rate(0.3) == pytest.approx(
        0.3
    )


def test_a_mechanisms_curve_is_below_the_truth_and_close_to_it():
    sigma = 1.25
    tabulated = PrivacyProfile.of_event(Gaussian(sigma, unit=PATIENT))
    exact = GaussianTradeOff(1 / sigma)
    for r in RATES:
        bound, truth = tabulated.least_false_positive_rate(r), exact.least_false_positive_rate(r)
        assert bound <= truth + 1e-12
        assert bound >= 0.9 * truth - 1e-9


def test_a_mechanisms_curve_says_more_than_one_epsilon_and_delta():
    event = PoissonGaussian(((0.5, 1.9845, 10),), unit=PATIENT)
    tabulated, point = PrivacyProfile.of_event(event), PrivacyProfile.of_claim(4.0, 1e-5)
    for r in RATES[1:-1]:
        found = tabulated.least_false_positive_rate(r)
        assert found > 1.02 * point.least_false_positive_rate(r)
        assert found <= r


@pytest.mark.parametrize("curve", [PrivacyProfile.of_claim(1.3, 1e-3), GaussianTradeOff(0.9)])
def test_curves_are_convex_and_never_fall(curve):
    x = [curve.least_false_positive_rate(r) for r in np.linspace(0, 1, 200)]
    assert (np.diff(x) >= -1e-15).all()
    assert (np.diff(x, 2) >= -1e-12).all()


def test_released_words_have_a_curve_though_no_epsilon_reaches_every_delta():
    event = ThresholdedHistogram(64, 60.0, 380, unit=PATIENT)
    assert epsilon_pld(event, 1e-12) == math.inf
    profile = PrivacyProfile.of_event(event)
    stated = PrivacyProfile.of_claim(epsilon_pld(event, 1e-6), 1e-6)
    assert profile.true_positive_rate(0.01) < stated.true_positive_rate(0.01)
    for epsilon, delta in profile.pairs[:: len(profile.pairs) // 4]:
        assert delta >= delta_pld(event, epsilon) * (1 - 1e-9)


def test_infinite_epsilon_excludes_no_attack():
    nothing = PrivacyProfile.of_event(Unaccounted("no promise", unit=PATIENT))
    assert nothing == PrivacyProfile.of_claim(math.inf, 0.0) == PrivacyProfile(())
    assert nothing.least_false_positive_rate(1.0) == 0.0
    assert gaussian_epsilon(1e-5, 0.9) > 3
