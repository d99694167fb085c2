import functools
import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from dp_core.errors import BadInput
from dp_core.privacy import mechanisms
from dp_core.privacy.accounting.accountants import composed_profile, epsilon_pld, gaussian_epsilon
from dp_core.privacy.accounting.tradeoff import GaussianTradeOff, PrivacyProfile

RATES = [1e-6, 1e-4, 0.01, 0.2, 0.5, 0.8, 0.99, 1.0]
PATIENT = mechanisms.PrivacyUnit.PATIENT


profile_of = functools.cache(PrivacyProfile.of_event)


def tpr_ceiling(event: mechanisms.MechanismEvent, fpr: float) -> float:
    return profile_of(event).true_positive_rate(fpr)


@pytest.mark.parametrize("mu", [0.1, 1.0])
@pytest.mark.parametrize("fpr", [1e-3, 1e-2, 0.5])
def test_of_a_gaussian_it_is_the_likelihood_ratio_test(mu, fpr):
    """TPR = Φ(Φ⁻¹(FPR) + μ) by Dong, Roth and Su 2022, equation 6."""
    best = norm.cdf(norm.ppf(fpr) + mu)
    ceiling = tpr_ceiling(mechanisms.Gaussian(1 / mu), fpr)
    assert best <= ceiling <= best * 1.0005
    for wrong in (2 / 3, 3 / 2):
        assert abs(tpr_ceiling(mechanisms.Gaussian(wrong / mu), fpr) / best - 1) > 1e-3


@pytest.mark.parametrize("with_unit", [True, False])
def test_no_attack_on_a_sampled_sum_passes_it(with_unit):
    """Compare with the best test of one Poisson-sampled Gaussian, in each direction, on a grid."""
    rate, sigma, fpr = 0.2, 1.0, 0.01
    edges = np.linspace(-12, 13, 100_001)
    null = np.diff(norm.cdf(edges, 0, sigma))
    mixed = (1 - rate) * null + rate * np.diff(norm.cdf(edges, 1, sigma))
    p, q = (mixed, null) if with_unit else (null, mixed)
    order = np.argsort(-p / np.maximum(q, 1e-300))
    false, true = np.cumsum(q[order]), np.cumsum(p[order])
    best = float(np.interp(fpr, false, true))
    ceiling = tpr_ceiling(mechanisms.PoissonGaussian.single(rate, sigma, 1), fpr)
    assert best <= ceiling * (1 + 1e-9)
    if with_unit:
        assert ceiling <= best * 1.01


@pytest.mark.parametrize("fpr", [-0.1, 1.1, math.nan])
def test_a_rate_is_within_0_and_1(fpr):
    with pytest.raises(BadInput):
        tpr_ceiling(mechanisms.Gaussian(1.0), fpr)
    with pytest.raises(BadInput):
        PrivacyProfile.of_claim(1.0, 0.0).true_positive_rate(fpr)


def test_impossible_epsilon_delta_pairs_are_refused():
    with pytest.raises(BadInput):
        PrivacyProfile.of_claim(-1.0, 0.0).true_positive_rate(0.1)
    with pytest.raises(BadInput):
        PrivacyProfile.of_claim(1.0, 1.5).true_positive_rate(0.1)


@pytest.mark.cases
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
    for fpr in (0.001, 0.01, 0.4):  # outcomes are in order of decreasing likelihood ratio
        best = float(np.interp(fpr, np.cumsum(outside), np.cumsum(inside)))
        assert curve.true_positive_rate(fpr) == pytest.approx(best, abs=1e-12)


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
    tabulated = profile_of(mechanisms.Gaussian(sigma, unit=PATIENT))
    exact = GaussianTradeOff(1 / sigma)
    for r in RATES:
        bound, truth = tabulated.least_false_positive_rate(r), exact.least_false_positive_rate(r)
        assert bound <= truth + 1e-12
        assert bound >= 0.9 * truth - 1e-9


@pytest.mark.parametrize("curve", [PrivacyProfile.of_claim(1.3, 1e-3), GaussianTradeOff(0.9)])
def test_curves_are_convex_and_never_fall(curve):
    x = [curve.least_false_positive_rate(r) for r in np.linspace(0, 1, 200)]
    assert (np.diff(x) >= -1e-15).all()
    assert (np.diff(x, 2) >= -1e-12).all()


def test_released_words_have_a_curve_though_no_epsilon_reaches_every_delta():
    event = mechanisms.ThresholdedHistogram(64, 60.0, 380, unit=PATIENT)
    assert epsilon_pld(event, 1e-12) == math.inf
    profile = profile_of(event)
    stated = PrivacyProfile.of_claim(epsilon_pld(event, 1e-6), 1e-6)
    assert profile.true_positive_rate(0.01) < stated.true_positive_rate(0.01)
    for epsilon, delta in profile.pairs[:: len(profile.pairs) // 4]:
        assert delta >= composed_profile(event)(epsilon) * (1 - 1e-9)


def test_infinite_epsilon_excludes_no_attack():
    nothing = PrivacyProfile.of_event(mechanisms.Unaccounted("no promise", unit=PATIENT))
    assert nothing == PrivacyProfile.of_claim(math.inf, 0.0) == PrivacyProfile(())
    assert tpr_ceiling(mechanisms.Unaccounted("for comparison"), 0.001) == 1.0
    assert nothing.least_false_positive_rate(1.0) == 0.0
    assert gaussian_epsilon(1e-5, 0.9) > 3
