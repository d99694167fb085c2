import math

import numpy as np
import pytest
from mechanism_examples import discrete_pmf, histogram_truth
from privacy_oracles import gaussian_mixture, hockey_stick
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import binom, norm

from dp_core.privacy import mechanisms
from dp_core.privacy.accounting import profiles
from dp_core.privacy.accounting.accountants import composed_plds, composed_profile, gaussian_epsilon


@pytest.mark.parametrize("mu", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("epsilon", [-1.0, 0.0, 0.5, 3.0])
def test_delta_is_the_integral(mu, epsilon):
    p, q = gaussian_mixture({mu: 1.0}, 1.0), gaussian_mixture({0.0: 1.0}, 1.0)
    expected = hockey_stick(p, q, epsilon, 16.0)
    assert float(profiles.gaussian_delta(epsilon, mu)) == pytest.approx(
        expected, rel=1e-6, abs=1e-14
    )


def test_a_published_value() -> None:
    # σ of the analytic Gaussian mechanism for (1, 1e-5) and sensitivity 1 (Balle and Wang's code).
    assert float(profiles.gaussian_delta(1.0, 1 / 3.730632)) == pytest.approx(1e-5, rel=1e-4)


@pytest.mark.parametrize("mu", [0.01, 0.3, 2.0, 30.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-9, 1e-15])
def test_epsilon_inverts_delta(mu, delta):
    epsilon = gaussian_epsilon(delta, mu)
    if epsilon == 0:
        assert float(profiles.gaussian_delta(0.0, mu)) <= delta
    else:
        assert float(profiles.gaussian_delta(epsilon, mu)) == pytest.approx(delta, rel=1e-4)


def test_gaussian_without_sensitivity_has_no_privacy_loss():
    assert np.allclose(profiles.gaussian_delta([0.0, 1.0], 0.0), 0.0)
    assert float(profiles.gaussian_delta(-1.0, 0.0)) == pytest.approx(1 - math.exp(-1))


RATE, SIGMA = 0.3, 1.2


def without(x: float) -> float:
    return float(norm.pdf(x, 0, SIGMA))


def with_unit(x: float) -> float:
    return (1 - RATE) * without(x) + RATE * float(norm.pdf(x, 1, SIGMA))


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.25])
def test_adding_and_removing_a_unit_each_have_their_own_loss(epsilon):
    adding, removing = composed_plds(
        mechanisms.PoissonGaussian.single(RATE, SIGMA, 1).steps(), 1e-4
    )
    for side, p, q in ((adding, with_unit, without), (removing, without, with_unit)):
        excess = quad(
            lambda x, p=p, q=q: max(0.0, p(x) - math.exp(epsilon) * q(x)), -15, 15, limit=400
        )[0]
        assert excess * (1 - 1e-3) <= side.delta(epsilon) <= excess * 1.01 + 1e-7


@pytest.mark.parametrize("epsilon", [0.0, 0.2, 0.4])
def test_that_a_lone_word_was_not_released_speaks_against_its_unit(epsilon):
    """A word of only this unit is absent without it, and hidden with probability 1 − τ with it."""
    profile = profiles.HistogramProfile(1, 5.0, 2)
    with_unit, without_unit = (float(side[0]) for side in profile.directions([epsilon]))
    assert with_unit == pytest.approx(profile.tail)
    assert without_unit == pytest.approx(1 - math.exp(epsilon) * (1 - profile.tail))


def cut_profile(
    others: int, cap: int, rate: float, mu: float, eps: profiles.Floats
) -> list[profiles.Floats]:
    """Return the profile of truncated batches for a known number of other units.

    It is a mixture over whether the batch is truncated.
    """
    drawn = np.arange(others + 1)
    law = binom.pmf(drawn, others, rate)
    full = drawn >= cap
    cut = law[full].sum()
    plain = profiles.SubsampledGaussian(rate, mu).directions(eps)
    if not cut:
        return list(plain)
    replacing = float((law * rate * cap / (drawn + 1))[full].sum() / cut)
    replaced = profiles.SubsampledGaussian(replacing, 2 * mu).directions(eps)
    return [(1 - cut) * a + cut * b for a, b in zip(plain, replaced, strict=True)]


@pytest.mark.parametrize(
    ("units", "cap", "rate"),
    [(3, 1, RATE), (40, 6, 0.1), (60, 10, 0.3), (100, 10, 0.5), (400, 20, 0.05), (5, 9, 0.5)],
)
def test_profile_of_cut_batches_covers_every_true_number_of_units(units, cap, rate):
    eps = np.linspace(0, 6, 60)
    bounds = profiles.TruncatedSubsampledGaussian(units, cap, rate, 1 / SIGMA).directions(eps)
    of_all = [cut_profile(m, cap, rate, 1 / SIGMA, eps) for m in range(units)]
    for side, bound in enumerate(bounds):
        worst = np.max([profile[side] for profile in of_all], axis=0)
        assert (bound >= worst * (1 - 1e-9)).all()
        if cap >= units * rate:  # tight except at tiny δ
            np.testing.assert_allclose(bound, worst, rtol=1e-9, atol=1e-7)


def test_epochs_of_shuffled_batches_add_up_at_each_order():
    """Each epoch is one Gaussian mechanism, of Rényi divergence α/2σ²."""
    curve = mechanisms.ShuffledGaussian(SIGMA, 5).rdp([2, 8])
    np.testing.assert_allclose(curve, [5 * 2 / (2 * SIGMA**2), 5 * 8 / (2 * SIGMA**2)])


def test_a_part_without_a_renyi_bound_leaves_none_for_the_whole():
    histogram, training = mechanisms.ThresholdedHistogram(4, 8.0, 40), mechanisms.Gaussian(2.0)
    assert training.rdp([2]) is not None
    assert mechanisms.compose(histogram, training).rdp([2]) is None


@pytest.mark.parametrize("s", [0.7, 3.0, 100.0])
@pytest.mark.parametrize("k", [-2, 0, 1, 5])
def test_tail_is_the_sum(s, k):
    reach = math.ceil(40 * s)
    exact = math.fsum(discrete_pmf(s, reach)[reach + k :])
    tail = profiles.DiscreteGaussianTail(s)
    lower, upper = tail.lower(k), tail.upper(k)
    assert float(lower) == pytest.approx(exact, rel=1e-12)
    assert float(upper) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("deviations", [-2.0, -0.5, 0.0, 0.7, 1.0, 1.5, 4.0, 8.0])
def test_beyond_summation_the_bounds_enclose_the_sum(deviations):
    s = 5000.0
    k = round(deviations * s)
    terms = np.exp(-(np.arange(-200_000, 200_001.0) ** 2) / (2 * s * s))
    exact = math.fsum(terms[200_000 + k :]) / math.fsum(terms)
    tail = profiles.DiscreteGaussianTail(s)
    lower, upper = tail.lower(k), tail.upper(k)
    assert float(lower) <= exact * (1 + 1e-12) <= float(upper) * (1 + 2e-12)
    assert float(upper - lower) <= 1e-8 + 1e-5 * exact


@pytest.mark.cases
def test_the_worst_number_of_lone_words_is_found(n, sigma, threshold):
    """The search by halving finds the same bounds as an evaluation of every ℓ."""
    profile = profiles.HistogramProfile(n, sigma, threshold)
    stay = math.log1p(-profile.tail)
    epsilons = np.linspace(0, profile.reach(), 9)
    claimed = np.stack(profile.directions(epsilons))
    for epsilon, (with_unit, without) in zip(epsilons, claimed.T, strict=True):
        every = range(n + 1)
        released = [-math.expm1(lone * stay) for lone in every]
        hidden = [profiles.shared_deltas(n, sigma, epsilon - lone * stay)[lone] for lone in every]
        each = [r + (1 - r) * h for r, h in zip(released, hidden, strict=True)]
        assert with_unit == pytest.approx(max(each), rel=1e-14)
        gone = [profiles.shared_deltas(n, sigma, epsilon + lone * stay)[lone] for lone in every]
        assert without == pytest.approx(max(gone), rel=1e-14)


@pytest.mark.parametrize(("sigma", "m"), [(0.8, 2), (0.8, 4), (1.0, 3), (1.5, 6)])
def test_sums_of_discrete_gaussians_stay_within_the_slack(sigma, m):
    reach = 40
    pmf = discrete_pmf(sigma, reach)
    total = pmf
    for _ in range(m - 1):
        total = np.convolve(total, pmf)
    target = discrete_pmf(sigma * math.sqrt(m), m * reach)
    # Further out, the ends of the arrays truncate the sum.
    near = np.abs(np.arange(-m * reach, m * reach + 1)) <= reach / 2
    worst = np.max(np.abs(np.log(total[near] / target[near])))
    slack = profiles.convolution_slack(m, sigma)
    assert worst <= slack * (1 + 1e-9) + 1e-12
    if m == 2:  # later terms are looser
        assert slack <= 6 * worst


@pytest.mark.parametrize("epsilon", [-0.5, 0.0, 0.4, 1.0])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_shared_words_are_the_enumeration(m, epsilon):
    sigma, reach = 2.0, 30
    pmf = discrete_pmf(sigma, reach)
    moved = np.concatenate([[0.0], pmf])  # the count is larger by one
    still = np.concatenate([pmf, [0.0]])
    p, q = moved, still
    for _ in range(m - 1):
        p, q = np.multiply.outer(p, moved).ravel(), np.multiply.outer(q, still).ravel()
    exact = float(np.sum(np.maximum(0.0, p - math.exp(epsilon) * q)))
    claimed = profiles.shared_deltas(m, sigma, epsilon)[0]
    assert exact * (1 - 1e-9) <= claimed <= exact * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("epsilon", [0.3, 0.8, 2.0])
def test_the_whole_mechanism_by_enumeration(epsilon):
    n, sigma, threshold = 2, 1.6, 4
    claimed = profiles.HistogramProfile(n, sigma, threshold).directions([epsilon])
    for truth, bound in zip(histogram_truth(n, sigma, threshold, epsilon), claimed, strict=True):
        # The threshold also hides shared words occasionally, which the bound ignores.
        assert truth <= bound[0] * (1 + 1e-9)
        assert bound[0] <= truth * 1.05 + 1e-6


def test_the_pld_is_the_profile_and_better_than_adding_a_delta():
    """The continuous formula accepts thresholds from 1136.8; discrete noise has more at 1137."""
    event = mechanisms.ThresholdedHistogram(256, 166.0, 1137)
    assert event.profile.delta_at(0.5178) == pytest.approx(1.011e-9, rel=1e-3)
    assert composed_profile(event)(0.5178) == pytest.approx(1.011e-9, rel=1e-3)
    naive = float(profiles.gaussian_delta(0.5178, 16 / 166)) + 256 * float(norm.sf(1135.8 / 166))
    assert naive == pytest.approx(1.84e-9, rel=0.01)


@pytest.mark.parametrize(("n", "sigma", "threshold"), [(5, 0.9, 8), (3, 0.6, 12), (16, 0.8, 9)])
def test_epsilon_of_little_noise_is_the_exact_convolution_on_every_grid(n, sigma, threshold):
    """If all words are shared, the exact ε follows by convolution of n discrete Gaussians."""
    noise = np.exp(-(np.arange(-60, 61) ** 2) / (2 * sigma**2))
    total = np.ones(1)
    for _ in range(n):
        total = np.convolve(total, noise / noise.sum())
    tails, middle = np.cumsum(total[::-1])[::-1], 60 * n

    def truth(epsilon: float) -> float:
        k = math.floor(epsilon * sigma**2 + n / 2) + 1
        return float(tails[k - n + middle] - math.exp(epsilon) * tails[k + middle])

    exact = float(brentq(lambda epsilon: truth(epsilon) - 1e-4, 0.0, 40.0))
    steps = mechanisms.ThresholdedHistogram(n, sigma, threshold).steps()
    for interval in (1e-2, 1e-3, 1e-4):
        claimed = max(pld.epsilon(1e-4) for pld in composed_plds(steps, interval))
        assert exact <= claimed <= exact * 1.01


def test_blocks_bound_the_exact_maximum() -> None:
    # 600 words per unit are bounded in blocks of three; each single ℓ must lie below.
    n, sigma, threshold, epsilon = 600, 120.0, 800, 1.0
    claimed = profiles.HistogramProfile(n, sigma, threshold).delta_at(epsilon)
    tail = profiles.upper_tail(threshold - 1, sigma)
    exact = max(
        float(profiles.gaussian_delta(epsilon, math.sqrt(n - ell) / sigma))
        - math.expm1(ell * math.log1p(-tail))
        for ell in range(n + 1)
    )
    assert exact * 0.999 <= claimed <= exact * 1.03
