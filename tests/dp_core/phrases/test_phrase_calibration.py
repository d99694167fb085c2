"""All rounds together are charged at most the target ε, and not much less."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dp_core.config.privacy import MechanismName
from dp_core.errors import BadInput, PlanError
from dp_core.phrases.phrase_calibration import PhrasePlan, calibrate
from dp_core.privacy.accounting.pld import epsilon_pld
from dp_core.privacy.accounting.profiles import gaussian_epsilon
from dp_core.privacy.mechanisms import (
    MechanismEvent,
    NeighboringRelation,
    NoisedWeights,
    PhraseRounds,
    PrivacyUnit,
    ThresholdedHistogram,
    compose,
    under,
)


@pytest.mark.parametrize(
    ("epsilon", "delta", "lengths", "n", "mechanism"),
    [
        (4.0, 1e-6, (3, 5), 100, "elimination"),
        (1.0, 1e-7, (2, 3, 5), 2000, "elimination"),
        (8.0, 1e-5, (2,), 40, "elimination"),
        (4.0, 1e-6, (3, 5), 100, "gaussian"),
    ],
)
def test_charged_epsilon_is_close_to_the_target_and_not_above(
    epsilon: float, delta: float, lengths: tuple[int, ...], n: int, mechanism: MechanismName
) -> None:
    plan = calibrate(
        epsilon,
        delta,
        lengths,
        n,
        unit=PrivacyUnit.PATIENT,
        declared_units=5000,
        mechanism=mechanism,
    )
    charged = epsilon_pld(plan.event(), delta)
    assert 0.99 * epsilon <= charged <= epsilon
    # equals the composition of its rounds, each a separate selection
    one = plan.each_round.event()
    assert isinstance(one, NoisedWeights | ThresholdedHistogram)
    assert charged == pytest.approx(epsilon_pld(compose(*[one] * len(lengths)), delta), rel=1e-9)
    # and is at least the ε of the Gaussian on weights of shared phrases
    assert charged >= 0.999 * gaussian_epsilon(delta, math.sqrt(len(lengths)) * one.mu)


def test_plan_that_claims_too_much_is_refused() -> None:
    plan = calibrate(2.0, 1e-6, (2, 3), 50, declared_units=5000)
    with pytest.raises(PlanError, match=r"not 1\.9"):
        replace(plan, epsilon=1.9)
    with pytest.raises(PlanError, match="not 2"):
        replace(plan, lengths=(2, 3, 4))
    with pytest.raises(PlanError, match="1/10000000"):
        calibrate(2.0, 1e-6, (2, 3), 50, declared_units=10_000_000)


def test_target_out_of_range_is_refused() -> None:
    with pytest.raises(BadInput):
        calibrate(0.0, 1e-6, (2,), 50, declared_units=5000)
    with pytest.raises(BadInput, match="not calibrated"):
        calibrate(2.0, 1e-6, (2,), 50, declared_units=5000, mechanism="paper")


def test_event_contains_all_rounds_in_order() -> None:
    plan = calibrate(4.0, 1e-6, (3, 5), 30, unit=PrivacyUnit.PATIENT, declared_units=5000)
    event = plan.event()
    assert MechanismEvent.from_json(event.to_json()) == event
    said = event.describe()
    assert "of 3 words" in said and "of 5 words" in said and "at most 30 items" in said
    assert sum(times for _, times in event.steps()) == 2
    rho, coin = event.approximate_rdp(8.0, 1e-9)
    one_rho, one_coin = event.rounds[0].approximate_rdp(8.0, 1e-9)
    assert (rho, coin) == pytest.approx((2 * one_rho, 2 * one_coin))
    zeroed = under(event, NeighboringRelation.ZERO_OUT, 1e-6)
    assert zeroed is not None and epsilon_pld(zeroed, 1e-6) == epsilon_pld(event, 1e-6)


def test_rounds_with_different_units_are_refused() -> None:
    one = ThresholdedHistogram(3, 9.0, 30, unit=PrivacyUnit.PATIENT)
    other = ThresholdedHistogram(3, 9.0, 30, unit=PrivacyUnit.DOCUMENT)
    for rounds, lengths in (((one, other), (2, 3)), ((one,), (2, 3)), ((), ()), ((one,), (1,))):
        with pytest.raises(BadInput):
            PhraseRounds(rounds, lengths, unit=PrivacyUnit.PATIENT)


def test_all_rounds_have_the_same_mechanism() -> None:
    plan = calibrate(4.0, 1e-6, (2, 3, 5), 30, declared_units=5000)
    assert plan.event().rounds == (plan.each_round.event(),) * 3
    assert plan == PhrasePlan((2, 3, 5), plan.each_round, 4.0, 1e-6)
