import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from dp_core.privacy.accounting import delta_pld, gaussian_delta
from dp_core.privacy.accounting.profiles import (
    DiscreteGaussianTail,
    HistogramProfile,
    convolution_slack,
    shared_deltas,
    upper_tail,
)
from dp_core.privacy.mechanisms import ThresholdedHistogram


def discrete_pmf(sigma: float, reach: int) -> np.ndarray:
    k = np.arange(-reach, reach + 1)
    weights = np.exp(-(k**2) / (2 * sigma**2))
    return weights / weights.sum()


@pytest.mark.parametrize("s", [0.7, 3.0, 100.0])
@pytest.mark.parametrize("k", [-2, 0, 1, 5])
def test_tail_is_the_sum(s: float, k: int) -> None:
    reach = math.ceil(40 * s)
    exact = math.fsum(discrete_pmf(s, reach)[reach + k :])
    lower, upper = DiscreteGaussianTail(s).bounds(k)
    assert float(lower) == pytest.approx(exact, rel=1e-12)
    assert float(upper) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("deviations", [-2.0, -0.5, 0.0, 0.7, 1.0, 1.5, 4.0, 8.0])
def test_beyond_summation_the_bounds_enclose_the_sum(deviations: float) -> None:
    s = 5000.0
    k = round(deviations * s)
    terms = np.exp(-(np.arange(-200_000, 200_001.0) ** 2) / (2 * s * s))
    exact = math.fsum(terms[200_000 + k :]) / math.fsum(terms)
    lower, upper = DiscreteGaussianTail(s).bounds(k)
    assert float(lower) <= exact * (1 + 1e-12) <= float(upper) * (1 + 2e-12)
    assert float(upper - lower) <= 1e-8 + 1e-5 * exact


@pytest.mark.parametrize(("sigma", "m"), [(0.8, 2), (0.8, 4), (1.0, 3), (1.5, 6)])
def test_sums_of_discrete_gaussians_stay_within_the_slack(sigma: float, m: int) -> None:
    reach = 40
    one = discrete_pmf(sigma, reach)
    total = one
    for _ in range(m - 1):
        total = np.convolve(total, one)
    target = discrete_pmf(sigma * math.sqrt(m), m * reach)
    # Further out the sum is cut by the arrays' ends, not by the distribution.
    near = np.abs(np.arange(-m * reach, m * reach + 1)) <= reach / 2
    worst = np.max(np.abs(np.log(total[near] / target[near])))
    slack = convolution_slack(m, sigma)
    assert worst <= slack * (1 + 1e-9) + 1e-12
    if m == 2:  # later terms add slack that need not be used
        assert slack <= 6 * worst


@pytest.mark.parametrize("epsilon", [-0.5, 0.0, 0.4, 1.0])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_shared_words_are_the_enumeration(m: int, epsilon: float) -> None:
    sigma, reach = 2.0, 30
    one = discrete_pmf(sigma, reach)
    moved = np.concatenate([[0.0], one])  # the count is one higher
    still = np.concatenate([one, [0.0]])
    p, q = moved, still
    for _ in range(m - 1):
        p, q = np.multiply.outer(p, moved).ravel(), np.multiply.outer(q, still).ravel()
    exact = float(np.sum(np.maximum(0.0, p - math.exp(epsilon) * q)))
    claimed = shared_deltas(m, sigma, epsilon)[0]
    assert exact * (1 - 1e-9) <= claimed <= exact * (1 + 1e-9) + 1e-12


def _released(shared: list[bool], lone: int, sigma: float, threshold: int) -> dict[object, float]:
    """Return the distribution of a release: shared words at count 9 (10 with the unit), `lone`

    words at count 1 with it and absent without. Absent words are never released.
    """
    reach = 14

    def word(count: int) -> dict[int, float]:
        law: dict[int, float] = {}
        for z, weight in zip(range(-reach, reach + 1), discrete_pmf(sigma, reach), strict=True):
            shown = count + z if count + z >= threshold else 0
            law[shown] = law.get(shown, 0.0) + float(weight)
        return law

    words = [word(10 if with_unit else 9) for with_unit in shared] + [word(1)] * lone
    law: dict[object, float] = {}
    for outcome in itertools.product(*(w.items() for w in words)):
        key = tuple(value for value, _ in outcome)
        law[key] = law.get(key, 0.0) + math.prod(weight for _, weight in outcome)
    return law


@pytest.mark.parametrize("epsilon", [0.3, 0.8, 2.0])
def test_the_whole_mechanism_by_enumeration(epsilon: float) -> None:
    n, sigma, threshold = 2, 1.6, 4
    adding, removing = [], []
    for lone in range(n + 1):
        shared = n - lone
        with_unit = _released([True] * shared, lone, sigma, threshold)
        rest = _released([False] * shared, 0, sigma, threshold)
        without = {(*key, *([0] * lone)): w for key, w in rest.items()}  # type: ignore[misc]
        keys = set(with_unit) | set(without)
        e = math.exp(epsilon)
        adding.append(sum(max(0.0, with_unit.get(k, 0.0) - e * without.get(k, 0.0)) for k in keys))
        removing.append(
            sum(max(0.0, without.get(k, 0.0) - e * with_unit.get(k, 0.0)) for k in keys)
        )
    claimed = HistogramProfile(n, sigma, threshold).directions([epsilon])
    for truth, bound in zip((max(adding), max(removing)), claimed, strict=True):
        # The threshold hides a little of the shared words; the bound reckons that it does not.
        assert truth <= bound[0] * (1 + 1e-9)
        assert bound[0] <= truth * 1.05 + 1e-6


def test_discrete_noise_costs_more_than_the_continuous_formula_says() -> None:
    # At (166, 1137) the continuous threshold 1136.8 would pass; what is drawn gives 1.011e-9.
    profile = HistogramProfile(256, 166.0, 1137)
    assert profile.delta(0.5178) == pytest.approx(1.011e-9, rel=1e-3)
    assert profile.tail == pytest.approx(upper_tail(1136, 166.0))


def test_the_pld_is_the_profile_and_better_than_adding_a_delta() -> None:
    event = ThresholdedHistogram(256, 166.0, 1137)
    assert delta_pld(event, 0.5178) == pytest.approx(1.011e-9, rel=1e-3)
    naive = float(gaussian_delta(0.5178, 16 / 166)) + 256 * float(norm.sf(1135.8 / 166))
    assert naive == pytest.approx(1.84e-9, rel=0.01)


def test_blocks_bound_the_exact_maximum() -> None:
    # 600 words per unit are taken in blocks of three; each ℓ by itself must lie below.
    n, sigma, threshold, epsilon = 600, 120.0, 800, 1.0
    claimed = HistogramProfile(n, sigma, threshold).delta(epsilon)
    tail = upper_tail(threshold - 1, sigma)
    exact = max(
        float(gaussian_delta(epsilon, math.sqrt(n - ell) / sigma))
        - math.expm1(ell * math.log1p(-tail))
        for ell in range(n + 1)
    )
    assert exact * 0.999 <= claimed <= exact * 1.03
