"""The ceiling on membership attacks, compared with the best attack where that is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from dp_core.errors import BadInput
from dp_core.privacy.accounting import PrivacyProfile, delta_pld, epsilon_pld, tpr_ceiling
from dp_core.privacy.mechanisms import (
    ConvertedRelation,
    Gaussian,
    NeighboringRelation,
    PoissonGaussian,
    Unaccounted,
)


@pytest.mark.parametrize("mu", [0.1, 1.0])
@pytest.mark.parametrize("fpr", [1e-3, 1e-2, 0.5])
def test_of_a_gaussian_it_is_the_likelihood_ratio_test(mu: float, fpr: float) -> None:
    """TPR = Φ(Φ⁻¹(FPR) + μ) by Dong, Roth and Su 2022, equation 6."""
    best = norm.cdf(norm.ppf(fpr) + mu)
    found = tpr_ceiling(Gaussian(1 / mu), fpr)
    assert best <= found <= best * 1.0005
    for wrong in (2 / 3, 3 / 2):
        assert abs(tpr_ceiling(Gaussian(wrong / mu), fpr) / best - 1) > 1e-3


@pytest.mark.parametrize("with_unit", [True, False])
def test_no_attack_on_a_sampled_sum_passes_it(with_unit: bool) -> None:
    """Compare with the best test of one Poisson-sampled Gaussian, in each direction, on a grid."""
    rate, sigma, fpr = 0.2, 1.0, 0.01
    edges = np.linspace(-12, 13, 100_001)
    null = np.diff(norm.cdf(edges, 0, sigma))
    mixed = (1 - rate) * null + rate * np.diff(norm.cdf(edges, 1, sigma))
    p, q = (mixed, null) if with_unit else (null, mixed)
    order = np.argsort(-p / np.maximum(q, 1e-300))
    false, true = np.cumsum(q[order]), np.cumsum(p[order])
    best = float(np.interp(fpr, false, true))
    found = tpr_ceiling(PoissonGaussian.single(rate, sigma, 1), fpr)
    assert best <= found * (1 + 1e-9)
    if with_unit:
        assert found <= best * 1.01


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-3), (2.0, 1e-5)])
def test_of_one_guarantee_it_is_randomised_response(epsilon: float, delta: float) -> None:
    """The dominating pair attains the ceiling, with outcomes in order of likelihood ratio."""
    yes = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    no = (1 - delta) / (1 + math.exp(epsilon))
    for fpr in (0.001, 0.01, 0.4):
        # Outcomes by decreasing likelihood ratio: (P, Q) = (δ, 0), (yes, no), (no, yes), (0, δ).
        false, true = np.cumsum([0, 0, no, yes, delta]), np.cumsum([0, delta, yes, no, 0])
        best = float(np.interp(fpr, false[1:], true[1:]))
        found = PrivacyProfile.of_claim(epsilon, delta).true_positive_rate(fpr)
        assert found == pytest.approx(best, abs=1e-12)


def test_tpr_ceiling_is_at_most_the_ceiling_of_every_epsilon_delta_pair() -> None:
    event = PoissonGaussian.single(0.1, 1.0, 10)
    found = tpr_ceiling(event, 0.01)
    epsilon = epsilon_pld(event, 1e-6)
    assert found <= PrivacyProfile.of_claim(epsilon, 1e-6).true_positive_rate(0.01)
    for at in (0.5, 1.5):
        pair = PrivacyProfile.of_claim(at, delta_pld(event, at))
        assert found <= pair.true_positive_rate(0.01) * (1 + 1e-4)


def test_without_a_guarantee_everything_can_be_found() -> None:
    assert tpr_ceiling(Unaccounted("for comparison"), 0.001) == 1.0


def test_a_converted_guarantee_counts_as_the_pair_that_it_is() -> None:
    event = ConvertedRelation(Gaussian(5.0), NeighboringRelation.REPLACE, 1e-6)
    delta = event.stated_delta(1e-6)
    expected = PrivacyProfile.of_claim(epsilon_pld(event, delta), delta).true_positive_rate(0.01)
    assert tpr_ceiling(event, 0.01) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("fpr", [-0.1, 1.1, math.nan])
def test_a_rate_is_within_0_and_1(fpr: float) -> None:
    with pytest.raises(BadInput):
        tpr_ceiling(Gaussian(1.0), fpr)
    with pytest.raises(BadInput):
        PrivacyProfile.of_claim(1.0, 0.0).true_positive_rate(fpr)


def test_impossible_epsilon_delta_pairs_are_refused() -> None:
    with pytest.raises(BadInput):
        PrivacyProfile.of_claim(-1.0, 0.0).true_positive_rate(0.1)
    with pytest.raises(BadInput):
        PrivacyProfile.of_claim(1.0, 1.5).true_positive_rate(0.1)
