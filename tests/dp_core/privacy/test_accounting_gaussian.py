import math

import numpy as np
import pytest
from privacy_oracles import gaussian_mixture, hockey_stick

from dp_core.privacy.accounting.profiles import gaussian_delta, gaussian_epsilon


@pytest.mark.parametrize("mu", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("epsilon", [-1.0, 0.0, 0.5, 3.0])
def test_delta_is_the_integral(mu: float, epsilon: float) -> None:
    p, q = gaussian_mixture({mu: 1.0}, 1.0), gaussian_mixture({0.0: 1.0}, 1.0)
    expected = hockey_stick(p, q, epsilon, 16.0)
    assert float(gaussian_delta(epsilon, mu)) == pytest.approx(expected, rel=1e-6, abs=1e-14)


def test_a_published_value() -> None:
    # The analytic Gaussian mechanism's σ for (1, 1e-5) and sensitivity 1 (Balle and Wang's code).
    assert float(gaussian_delta(1.0, 1 / 3.730632)) == pytest.approx(1e-5, rel=1e-4)


@pytest.mark.parametrize("mu", [0.01, 0.3, 2.0, 30.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-9, 1e-15])
def test_epsilon_inverts_delta(mu: float, delta: float) -> None:
    epsilon = gaussian_epsilon(delta, mu)
    if epsilon == 0:
        assert float(gaussian_delta(0.0, mu)) <= delta
    else:
        assert float(gaussian_delta(epsilon, mu)) == pytest.approx(delta, rel=1e-4)


def test_no_sensitivity_no_loss() -> None:
    assert np.allclose(gaussian_delta([0.0, 1.0], 0.0), 0.0)
    assert float(gaussian_delta(-1.0, 0.0)) == pytest.approx(1 - math.exp(-1))
