import math
from collections.abc import Callable
from typing import Any

import pytest

from dp_core.errors import BadInput
from dp_core.privacy.accounting.accountants import epsilon_pld, gaussian_epsilon
from dp_core.privacy.accounting.calibration import noise_for, steps_within
from dp_core.privacy.execution_plan import LEAST_NOISE
from dp_core.privacy.mechanisms import (
    Gaussian,
    PoissonGaussian,
    PrivacyUnit,
    ShuffledGaussian,
    ThresholdedHistogram,
    compose,
)


def sampled(rate: float, steps: int, **more: Any) -> Callable[[float], PoissonGaussian]:
    """Return a function from a noise multiplier to the event of Poisson-sampled updates."""
    return lambda sigma: PoissonGaussian.single(rate, sigma, steps, **more)


@pytest.mark.parametrize(
    ("target", "delta", "rate", "steps"),
    [
        (2.0, 1e-6, 0.01, 300),
        (0.5, 1e-5, 0.3, 50),
        (30.0, 1e-5, 0.05, 40),
        *((wish, 1e-6, 0.05, 60) for wish in (0.1, 2.0, 20.0)),
    ],
)
def test_steps_within_epsilon_invert_calibrated_noise(
    target: float, delta: float, rate: float, steps: int
) -> None:
    sigma = noise_for(sampled(rate, steps), target, delta)
    reached = epsilon_pld(PoissonGaussian.single(rate, sigma, steps), delta)
    assert target * 0.999 <= reached <= target
    fitting = steps_within(lambda n: PoissonGaussian.single(rate, sigma, n), target, delta)
    assert fitting == pytest.approx(steps, abs=max(1, steps // 200))
    more = epsilon_pld(PoissonGaussian.single(rate, sigma, fitting + 1), delta)
    assert more > target


def test_calibrated_noise_includes_the_cost_of_the_composed_release() -> None:
    vocabulary = ThresholdedHistogram(64, 60.0, 380, unit=PrivacyUnit.PATIENT)
    training = sampled(0.05, 100, unit=PrivacyUnit.PATIENT)
    both = noise_for(training, 2.0, 1e-6, vocabulary)
    assert both > noise_for(training, 2.0, 1e-6)
    assert 0.995 * 2.0 <= epsilon_pld(compose(vocabulary, training(both)), 1e-6) <= 2.0


def test_search_returns_its_limits_when_every_parameter_fits() -> None:
    assert noise_for(sampled(1e-6, 1), 100.0, 0.5) == LEAST_NOISE
    assert steps_within(lambda n: Gaussian(1e6 * math.sqrt(n)), 1.0, 1e-6) == 10_000_000


def test_epochs_have_the_noise_of_one_gaussian_and_whole_epochs_of_updates() -> None:
    def event(steps: int, sigma: float) -> ShuffledGaussian:
        return ShuffledGaussian(sigma, math.ceil(steps / 20))

    sigma = noise_for(lambda s: event(60, s), 3.0, 1e-5)
    # Three Gaussians equal one with μ = √3/σ, whose ε has a closed form (Balle and Wang).
    assert gaussian_epsilon(1e-5, math.sqrt(3) / sigma) == pytest.approx(3.0, rel=2e-3)
    assert steps_within(lambda n: event(n, sigma), 3.0, 1e-5) == 60
    assert steps_within(lambda n: event(n, 1.2 * sigma), 3.0, 1e-5) == 80


def test_targets_out_of_reach_are_refused() -> None:
    leaky, training = ThresholdedHistogram(64, 60.0, 100), sampled(0.05, 10)
    with pytest.raises(BadInput, match="already spend it"):
        noise_for(training, 1.0, 1e-6, leaky)
    with pytest.raises(BadInput, match="one update"):
        steps_within(lambda n: PoissonGaussian.single(0.5, 0.5, n), 0.01, 1e-6)
    with pytest.raises(BadInput, match="epsilon"):
        noise_for(training, 0.0, 1e-6)
    with pytest.raises(BadInput, match="delta"):
        noise_for(training, 1.0, 0.0)
