"""All rounds together are charged at most what was asked for, and not much less."""

from __future__ import annotations

import math

import pytest

from dp_core.errors import BadInput, PlanError
from dp_core.phrases.calibration import PhrasePlan, calibrate, threshold_of
from dp_core.privacy.accounting import epsilon_pld
from dp_core.privacy.accounting.profiles import gaussian_epsilon, upper_tail
from dp_core.privacy.mechanisms import (
    MechanismEvent,
    NeighboringRelation,
    PhraseRounds,
    PrivacyUnit,
    ThresholdedHistogram,
    compose,
    under,
)


@pytest.mark.parametrize(
    ("epsilon", "delta", "lengths", "n"),
    [(4.0, 1e-6, (3, 5), 100), (1.0, 1e-7, (2, 3, 5), 64), (8.0, 1e-5, (2,), 40)],
)
def test_the_charge_is_at_most_the_wish_and_close_to_it(
    epsilon: float, delta: float, lengths: tuple[int, ...], n: int
) -> None:
    plan = calibrate(epsilon, delta, lengths, n, unit=PrivacyUnit.PATIENT)
    charged = epsilon_pld(plan.event(), delta)
    assert 0.97 * epsilon <= charged <= epsilon
    # as the composition of its rounds, each a histogram of its own
    one = ThresholdedHistogram(n, plan.sigma, plan.threshold, unit=PrivacyUnit.PATIENT)
    assert charged == pytest.approx(epsilon_pld(compose(*[one] * len(lengths)), delta), rel=1e-9)
    # and no less than the Gaussian that counts of shared phrases alone are
    mu = math.sqrt(len(lengths) * n) / plan.sigma
    assert charged >= 0.999 * gaussian_epsilon(delta, mu)


def test_the_threshold_is_the_least_that_hides_a_lone_phrase() -> None:
    for sigma, tail in ((30.0, 1e-9), (1.0, 1e-3), (5.0, 0.4)):
        threshold = threshold_of(sigma, tail)
        assert upper_tail(threshold - 1, sigma) <= tail
        assert threshold == 1 or upper_tail(threshold - 2, sigma) > tail


def test_a_plan_that_does_not_earn_what_it_claims_is_refused() -> None:
    plan = calibrate(2.0, 1e-6, (2, 3), 50)
    with pytest.raises(PlanError, match="not 2"):
        PhrasePlan(plan.lengths, 50, plan.sigma * 0.95, plan.threshold, 2.0, 1e-6)
    with pytest.raises(PlanError, match="not 2"):
        PhrasePlan((2, 3, 4), 50, plan.sigma, plan.threshold, 2.0, 1e-6)
    with pytest.raises(PlanError, match="1/10000000"):
        calibrate(2.0, 1e-6, (2, 3), 50, declared_units=10_000_000)


@pytest.mark.parametrize("lengths", [(), (1,), (3, 2), (2, 2), (17,), tuple(range(2, 11))])
def test_lengths_that_are_none_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="lengths must rise"):
        calibrate(2.0, 1e-6, lengths, 50)


def test_a_target_out_of_range_is_refused() -> None:
    with pytest.raises(BadInput):
        calibrate(0.0, 1e-6, (2,), 50)


def test_the_event_is_all_rounds_in_json_words_and_order() -> None:
    event = calibrate(4.0, 1e-6, (3, 5), 30, unit=PrivacyUnit.PATIENT).event()
    assert MechanismEvent.from_json(event.to_json()) == event
    said = event.describe()
    assert "of 3 words" in said and "of 5 words" in said and "at most 30 distinct phrases" in said
    assert sum(times for _, times in event.steps()) == 2
    rho, coin = event.approximate_rdp(8.0, 1e-9)
    one_rho, one_coin = event.rounds[0].approximate_rdp(8.0, 1e-9)
    assert (rho, coin) == pytest.approx((2 * one_rho, 2 * one_coin))
    zeroed = under(event, NeighboringRelation.ZERO_OUT, 1e-6)
    assert zeroed is not None and epsilon_pld(zeroed, 1e-6) == epsilon_pld(event, 1e-6)


def test_rounds_that_protect_unlike_things_are_refused() -> None:
    one = ThresholdedHistogram(3, 9.0, 30, unit=PrivacyUnit.PATIENT)
    other = ThresholdedHistogram(3, 9.0, 30, unit=PrivacyUnit.DOCUMENT)
    for rounds, lengths in (((one, other), (2, 3)), ((one,), (2, 3)), ((), ()), ((one,), (1,))):
        with pytest.raises(BadInput):
            PhraseRounds(rounds, lengths, unit=PrivacyUnit.PATIENT)
