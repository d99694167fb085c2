import dataclasses
import math

import pytest

from dp_core.errors import BadInput
from dp_core.privacy.accounting import epsilon_pld, gaussian_epsilon
from dp_core.privacy.accounting.calibration import (
    noise_for,
    noise_multiplier_for,
    plan_for,
    steps_for,
    steps_within,
)
from dp_core.privacy.execution_plan import BatchPhase, ExecutionPlan, ShuffledSampling
from dp_core.privacy.mechanisms import (
    PoissonGaussian,
    PrivacyUnit,
    ShuffledGaussian,
    ThresholdedHistogram,
    compose,
)


@pytest.mark.parametrize(
    ("target", "delta", "rate", "steps"),
    [(2.0, 1e-6, 0.01, 300), (0.5, 1e-5, 0.3, 50), (30.0, 1e-5, 0.05, 40)],
)
def test_noise_and_back(target: float, delta: float, rate: float, steps: int) -> None:
    sigma = noise_multiplier_for(target, delta, sampling_rate=rate, steps=steps)
    reached = epsilon_pld(PoissonGaussian.single(rate, sigma, steps), delta)
    assert target * 0.999 <= reached <= target
    fitting = steps_for(target, delta, sampling_rate=rate, noise_multiplier=sigma)
    assert fitting == pytest.approx(steps, abs=max(1, steps // 200))
    more = epsilon_pld(PoissonGaussian.single(rate, sigma, fitting + 1), delta)
    assert more > target


def test_what_is_spent_alongside_is_reckoned() -> None:
    vocabulary = ThresholdedHistogram(64, 60.0, 380, unit=PrivacyUnit.PATIENT)
    alone = noise_multiplier_for(2.0, 1e-6, sampling_rate=0.05, steps=100)
    both = noise_multiplier_for(2.0, 1e-6, sampling_rate=0.05, steps=100, alongside=vocabulary)
    assert both > alone
    training = PoissonGaussian.single(0.05, both, 100, unit=PrivacyUnit.PATIENT)
    assert epsilon_pld(compose(vocabulary, training), 1e-6) <= 2.0


def test_a_plan_keeps_its_sampling_and_schedule() -> None:
    plan = ExecutionPlan.poisson(
        unit=PrivacyUnit.PATIENT,
        declared_units=1000,
        expected_batch=100,
        steps=30,
        noise_multiplier=1.0,
        clip_norm=1.0,
        delta=1e-5,
    )
    shuffled = dataclasses.replace(
        plan, sampling=ShuffledSampling(100), schedule=(BatchPhase(30, 100),)
    )
    found = plan_for(shuffled, 3.0)
    assert epsilon_pld(found.event(), found.delta) == pytest.approx(3.0, rel=1e-3)
    assert dataclasses.replace(found, noise_multiplier=1.0) == shuffled
    assert plan_for(plan, 3.0).noise_multiplier < found.noise_multiplier  # amplification helps


def test_epochs_have_the_noise_of_one_gaussian_and_whole_epochs_of_updates() -> None:
    def event(steps: int, sigma: float) -> ShuffledGaussian:
        return ShuffledGaussian(sigma, math.ceil(steps / 20))

    sigma = noise_for(lambda s: event(60, s), 3.0, 1e-5)
    # three Gaussians are one with μ = √3/σ: Balle and Wang's ε in closed form
    assert gaussian_epsilon(1e-5, math.sqrt(3) / sigma) == pytest.approx(3.0, rel=2e-3)
    assert steps_within(lambda n: event(n, sigma), 3.0, 1e-5) == 60
    assert steps_within(lambda n: event(n, 1.2 * sigma), 3.0, 1e-5) == 80


def test_targets_out_of_reach_are_refused() -> None:
    leaky = ThresholdedHistogram(64, 60.0, 100)
    with pytest.raises(BadInput, match="already spends"):
        noise_multiplier_for(1.0, 1e-6, sampling_rate=0.05, steps=10, alongside=leaky)
    with pytest.raises(BadInput, match="one update"):
        steps_for(0.01, 1e-6, sampling_rate=0.5, noise_multiplier=0.5)
    with pytest.raises(BadInput, match="epsilon"):
        noise_multiplier_for(0.0, 1e-6, sampling_rate=0.05, steps=10)
    with pytest.raises(BadInput, match="delta"):
        steps_for(1.0, 0.0, sampling_rate=0.05, noise_multiplier=1.0)
