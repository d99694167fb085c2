import math

import pytest

from dp_core.errors import BadInput
from dp_core.privacy.accounting.pld import delta_pld, epsilon_pld
from dp_core.privacy.accounting.profiles import gaussian_delta, gaussian_epsilon
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


def test_vocabulary_pretraining_and_fine_tuning_compose() -> None:
    parts = [HISTOGRAM, TRAINING, FINE_TUNING]
    deltas = [1e-7, 1e-6, 1e-6]
    alone = [epsilon_pld(event, delta) for event, delta in zip(parts, deltas, strict=True)]
    together = epsilon_pld(compose(*parts), sum(deltas))
    assert max(alone) < together < sum(alone) * 0.9  # far below the sum


def test_order_and_nesting_do_not_matter() -> None:
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
    assert delta_pld(event, 1.5) == pytest.approx(float(gaussian_delta(1.5, mu)), rel=5e-3)


def test_delta_below_the_tail_of_a_histogram_has_no_finite_epsilon() -> None:
    tail_delta = delta_pld(HISTOGRAM, 50.0)
    assert tail_delta > 0
    assert epsilon_pld(compose(HISTOGRAM, TRAINING), tail_delta * 0.9) == math.inf
    assert math.isfinite(epsilon_pld(compose(HISTOGRAM, TRAINING), tail_delta * 1.1))


def test_units_and_relations_do_not_mix() -> None:
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


def test_total_with_an_unaccounted_release_is_infinite() -> None:
    event = compose(TRAINING, Unaccounted("trained without privacy"))
    assert event.is_unaccounted
    assert epsilon_pld(event, 1e-6) == math.inf


@pytest.mark.parametrize(
    "event",
    [
        ThresholdedHistogram(300, 200.0, 1),
        NoisedWeights("weighted", 128, 1, (1000,), ((0, 0, 1000),)),
    ],
    ids=["histogram", "weights"],
)
def test_release_that_is_certain_to_show_new_items_has_no_guarantee(event: MechanismEvent) -> None:
    assert event.approximate_rdp(8, 1e-6)[1] == 1
    assert epsilon_pld(event, 1e-6) == math.inf
    assert delta_pld(compose(event, TRAINING), 1.0) == 1
    assert PrivacyProfile.of_event(event).true_positive_rate(0.01) == 1


def test_group_privacy_grows_both_parameters() -> None:
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
