import math
from collections.abc import Callable

import numpy as np
import pytest

from dp_core.errors import BadInput
from dp_core.privacy.accounting.accountants import (
    composed_profile,
    epsilon_pld,
    epsilon_rdp,
    gaussian_epsilon,
)
from dp_core.privacy.accounting.profiles import EpsilonDelta, gaussian_delta
from dp_core.privacy.accounting.tradeoff import PrivacyProfile, group_privacy
from dp_core.privacy.mechanisms import (
    Composed,
    FixedSizeGaussian,
    Gaussian,
    MechanismEvent,
    NoisedWeights,
    PoissonGaussian,
    PrivacyUnit,
    ShuffledGaussian,
    ThresholdedHistogram,
    Unaccounted,
    compose,
)

HISTOGRAM = ThresholdedHistogram(128, 60.0, 370)
TRAINING = PoissonGaussian.single(0.05, 1.5, 200)
FINE_TUNING = PoissonGaussian.single(0.1, 3.0, 50)


def test_order_and_nesting_do_not_matter():
    flat = compose(HISTOGRAM, TRAINING, FINE_TUNING)
    nested = compose(FINE_TUNING, compose(TRAINING, HISTOGRAM))
    assert isinstance(nested, Composed)
    assert len(nested.events) == 3
    assert epsilon_pld(nested, 1e-6) == pytest.approx(epsilon_pld(flat, 1e-6), rel=1e-6)


def test_a_histogram_composed_with_a_gaussian_is_the_integral() -> None:
    # No lone word reaches this threshold, so only δ_m remains, nearly a Gaussian's for 100 words.
    sparse = ThresholdedHistogram(100, 50.0, 1000)
    event = compose(sparse, Gaussian(2.0))
    mu = math.sqrt(100 / 50**2 + 1 / 4)
    assert composed_profile(event)(1.5) == pytest.approx(float(gaussian_delta(1.5, mu)), rel=5e-3)


def test_delta_below_the_tail_of_a_histogram_has_no_finite_epsilon():
    tail_delta = composed_profile(HISTOGRAM)(50.0)
    assert tail_delta > 0
    assert epsilon_pld(compose(HISTOGRAM, TRAINING), tail_delta * 0.9) == math.inf
    assert math.isfinite(epsilon_pld(compose(HISTOGRAM, TRAINING), tail_delta * 1.1))


def test_units_and_relations_do_not_mix():
    patient = PoissonGaussian.single(0.05, 1.5, 200, unit=PrivacyUnit.PATIENT)
    document = ThresholdedHistogram(128, 60.0, 370, unit=PrivacyUnit.DOCUMENT)
    with pytest.raises(BadInput, match=r"patient.*document"):
        compose(patient, document)
    with pytest.raises(BadInput, match="unstated unit"):
        compose(patient, TRAINING)
    for other in (ShuffledGaussian(1.0, 1), FixedSizeGaussian(10, ((1, 1.0, 1),))):
        with pytest.raises(BadInput, match=r"add-or-remove-one.*one"):
            compose(TRAINING, other)
    with pytest.raises(BadInput, match="nothing"):
        compose()


def test_total_with_an_unaccounted_release_is_infinite():
    event = compose(TRAINING, Unaccounted("trained without privacy"))
    assert event.is_unaccounted
    assert epsilon_pld(event, 1e-6) == math.inf


@pytest.mark.parametrize(
    "event",
    [ThresholdedHistogram(300, 200.0, 1), NoisedWeights(128, (1000,), ((0, 0, 1000),))],
    ids=["histogram", "weights"],
)
def test_release_that_is_certain_to_show_new_items_has_no_guarantee(event):
    assert event.approximate_rdp(8, 1e-6)[1] == 1
    assert epsilon_pld(event, 1e-6) == math.inf
    assert composed_profile(compose(event, TRAINING))(1.0) == 1
    assert PrivacyProfile.of_event(event).true_positive_rate(0.01) == 1


def test_group_privacy_grows_both_parameters():
    group = group_privacy(0.5, 1e-6, 4)
    assert group.epsilon == 2.0
    by_hand = 1e-6 * sum(math.exp(0.5 * i) for i in range(4))  # triangle inequality, k times
    assert group.delta == pytest.approx(by_hand, rel=1e-12)
    assert group_privacy(0.5, 1e-6, 1) == (1, 0.5, pytest.approx(1e-6))
    assert group_privacy(0.0, 1e-6, 3).delta == pytest.approx(3e-6)
    assert group_privacy(100.0, 1e-6, 50).delta == 1.0
    with pytest.raises(BadInput):
        group_privacy(1.0, 1e-6, 0)


def test_group_privacy_holds_for_the_gaussian() -> None:
    # k units move the sum by k, so the mechanism's exact δ is known.
    epsilon = gaussian_epsilon(1e-6, 0.2)
    group = group_privacy(epsilon, 1e-6, 3)
    assert float(gaussian_delta(group.epsilon, 0.6)) <= group.delta


def test_epsilon_delta_profile_equals_profile_of_leaky_randomised_response():
    epsilon, delta = 0.8, 0.01
    p = np.array(
        [delta, 0, *(1 - delta) * np.array([1, math.exp(-epsilon)]) / (1 + math.exp(-epsilon))]
    )
    q = np.array([0, delta, p[3], p[2]])
    for x in (0.0, 0.2, 0.79, 0.8, 1.5):
        direct = float(np.maximum(0.0, p - math.exp(x) * q).sum())
        there, back = EpsilonDelta(epsilon, delta).directions(np.array([x]))
        assert there[0] == back[0] == pytest.approx(direct, rel=1e-12)


# --- conformance of accountants: valid and monotone bounds, and ∞ without a guarantee


Accountant = Callable[[MechanismEvent, float], float | None]


def epsilon_of(accountant: Accountant, event: MechanismEvent, delta: float) -> float:
    epsilon = accountant(event, delta)
    return math.inf if epsilon is None else epsilon


@pytest.mark.parametrize("accountant", [epsilon_pld, epsilon_rdp])
class TestAccountant:
    """Conformance tests of one accountant, on Gaussians, whose δ is known exactly."""

    @pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
    @pytest.mark.parametrize(("sigma", "count"), [(0.5, 1), (2.0, 3), (100.0, 10_000)])
    def test_it_is_at_least_the_truth(self, accountant, sigma, count, delta):
        def exact(epsilon: float) -> float:  # Balle and Wang 2018, in terms of erfc
            mu = math.sqrt(count) / sigma
            high = math.erfc((epsilon / mu - mu / 2) / math.sqrt(2)) / 2
            return high - math.exp(epsilon) * math.erfc((epsilon / mu + mu / 2) / math.sqrt(2)) / 2

        epsilon = epsilon_of(accountant, Gaussian(sigma, count), delta)
        assert exact(epsilon) <= delta * (1 + 1e-6)
        assert exact(0.8 * epsilon) > delta  # the bound is nearly tight

    def test_less_noise_more_steps_or_a_smaller_delta_cost_more(self, accountant):
        def epsilon(sigma: float, steps: int, delta: float) -> float:
            event = compose(PoissonGaussian.single(0.1, sigma, steps), Gaussian(5.0))
            return epsilon_of(accountant, event, delta)

        least = epsilon(2.0, 50, 1e-5)
        assert least < min(epsilon(1.5, 50, 1e-5), epsilon(2.0, 150, 1e-5), epsilon(2.0, 50, 1e-7))

    def test_it_knows_no_bound_without_a_guarantee(self, accountant):
        for event in (Unaccounted("public"), compose(Gaussian(2.0), Unaccounted("public"))):
            assert epsilon_of(accountant, event, 1e-6) == math.inf
