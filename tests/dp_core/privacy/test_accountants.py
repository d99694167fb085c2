"""Conformance of accountants: valid and monotone bounds, and ∞ without a guarantee."""

import math
from collections.abc import Callable

import pytest

from dp_core.privacy.accounting.pld import epsilon_pld
from dp_core.privacy.accounting.profiles import epsilon_unamplified
from dp_core.privacy.accounting.rdp import epsilon_rdp
from dp_core.privacy.mechanisms import (
    Gaussian,
    MechanismEvent,
    PoissonGaussian,
    Unaccounted,
    compose,
)

Accountant = Callable[[MechanismEvent, float], float | None]


def epsilon_of(accountant: Accountant, event: MechanismEvent, delta: float) -> float:
    epsilon = accountant(event, delta)
    return math.inf if epsilon is None else epsilon


@pytest.mark.parametrize("accountant", [epsilon_pld, epsilon_rdp, epsilon_unamplified])
class TestAccountant:
    """Conformance tests of one accountant, on Gaussians, whose δ is known exactly."""

    @pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
    @pytest.mark.parametrize(("sigma", "count"), [(0.5, 1), (2.0, 3), (100.0, 10_000)])
    def test_it_is_at_least_the_truth(
        self, accountant: Accountant, sigma: float, count: int, delta: float
    ) -> None:
        def exact(epsilon: float) -> float:  # Balle and Wang 2018, in terms of erfc
            mu = math.sqrt(count) / sigma
            high = math.erfc((epsilon / mu - mu / 2) / math.sqrt(2)) / 2
            return high - math.exp(epsilon) * math.erfc((epsilon / mu + mu / 2) / math.sqrt(2)) / 2

        epsilon = epsilon_of(accountant, Gaussian(sigma, count), delta)
        assert exact(epsilon) <= delta * (1 + 1e-6)
        assert exact(0.8 * epsilon) > delta  # the bound is nearly tight

    def test_less_noise_more_steps_or_a_smaller_delta_cost_more(
        self, accountant: Accountant
    ) -> None:
        def epsilon(sigma: float, steps: int, delta: float) -> float:
            event = compose(PoissonGaussian.single(0.1, sigma, steps), Gaussian(5.0))
            return epsilon_of(accountant, event, delta)

        least = epsilon(2.0, 50, 1e-5)
        assert least < min(epsilon(1.5, 50, 1e-5), epsilon(2.0, 150, 1e-5), epsilon(2.0, 50, 1e-7))

    def test_it_knows_no_bound_without_a_guarantee(self, accountant: Accountant) -> None:
        for event in (Unaccounted("public"), compose(Gaussian(2.0), Unaccounted("public"))):
            assert epsilon_of(accountant, event, 1e-6) == math.inf
