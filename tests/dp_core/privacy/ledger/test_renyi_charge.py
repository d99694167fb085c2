import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import logsumexp

from dp_core.privacy.accounting import epsilon_pld
from dp_core.privacy.accounting.rdp import pure_dp_rdp
from dp_core.privacy.ledger.models import canonical
from dp_core.privacy.ledger.privacy_filter import PrivacyCharge, charge
from dp_core.privacy.mechanisms import (
    Composed,
    FixedSizeGaussian,
    Gaussian,
    MechanismEvent,
    PoissonGaussian,
    ThresholdedHistogram,
    TruncatedPoissonGaussian,
)


def cost(event: MechanismEvent, order: float, delta: float = 1e-6) -> PrivacyCharge:
    return charge(((canonical(event), delta),), order)


def divergence(p: NDArray[np.float64], q: NDArray[np.float64], order: float) -> float:
    """Return the Rényi divergence of two distributions given as probabilities."""
    return float(logsumexp(order * np.log(p) + (1 - order) * np.log(q)) / (order - 1))


@pytest.mark.parametrize("order", [2, 5, 16])
@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 1.0), (0.2, 2.0), (1.0, 3.0)])
def test_a_poisson_sampled_gaussian_costs_its_divergence(
    rate: float, sigma: float, order: int
) -> None:
    """Compare with E_Q[(P/Q)^α] by quadrature in both directions, where P is the mixture."""
    x = np.linspace(-30 * sigma, 30 * sigma + 16, 400_001)
    q = np.exp(-(x**2) / (2 * sigma**2))
    p = (1 - rate) * q + rate * np.exp(-((x - 1) ** 2) / (2 * sigma**2))
    inside = q > 1e-300
    p, q = p[inside] / p.sum(), q[inside] / q.sum()
    truth = max(divergence(p, q, order), divergence(q, p, order))
    charged = cost(PoissonGaussian.single(rate, sigma, 7), order)
    assert charged.rho == pytest.approx(7 * truth, rel=1e-6)
    assert charged.delta == 0


@given(st.floats(1e-4, 20), st.integers(2, 512))
def test_randomised_response_has_the_largest_charge_of_an_epsilon(
    epsilon: float, order: int
) -> None:
    rho = pure_dp_rdp(epsilon, order)
    assert 0 <= rho <= epsilon
    assert rho <= order * epsilon**2 / 2 * (1 + 1e-6)  # Bun and Steinke 2016, Proposition 3.3
    if order * epsilon < 200:
        p = np.array([1.0, math.exp(-epsilon)]) / (1 + math.exp(-epsilon))
        assert rho == pytest.approx(divergence(p, p[::-1], order), rel=1e-6, abs=1e-12)


def test_an_epsilon_costs_itself_at_infinite_order() -> None:
    assert pure_dp_rdp(1.5, math.inf) == 1.5
    assert pure_dp_rdp(math.inf, 4) == math.inf


SIGMA, THRESHOLD, WORDS = 2.0, 9, 3
HISTOGRAM = ThresholdedHistogram(WORDS, SIGMA, THRESHOLD)


def released(count: int) -> NDArray[np.float64]:
    """Return the probabilities that a word is absent, or has each noised count ≥ THRESHOLD."""
    reach = 60
    values = np.arange(-reach, reach + 1)
    mass = np.exp(-(values.astype(float) ** 2) / (2 * SIGMA**2))
    noised = np.zeros(4 * reach)
    noised[values + count + reach] = mass / mass.sum()
    shown = noised[reach + THRESHOLD :]
    return np.concatenate([[1 - shown.sum()], shown])


@pytest.mark.parametrize("order", [2, 4, 32])
def test_a_histogram_costs_no_less_than_it_gives_away(order: int) -> None:
    """Enumerate ℓ, the words that only the unit has; it shares the other N − ℓ words."""
    charged = cost(HISTOGRAM, order)
    passes = 1 - released(1)[0]
    worst = 0.0
    for own in range(WORDS + 1):
        coin = 1 - (1 - passes) ** own
        assert coin <= charged.delta * (1 + 1e-9)
        for base in range(1, 3 * THRESHOLD):
            here, there = released(base + 1), released(base)
            both = (here > 1e-250) & (there > 1e-250)
            for p, q in ((here, there), (there, here)):
                worst = max(worst, (WORDS - own) * divergence(p[both], q[both], order))
    assert worst <= charged.rho * (1 + 1e-9)
    assert worst > charged.rho * 0.8  # the charge is nearly tight
    assert charged.delta == pytest.approx(1 - (1 - passes) ** WORDS, rel=1e-9)


def test_events_without_a_renyi_bound_cost_their_epsilon_and_delta() -> None:
    event = TruncatedPoissonGaussian(1000, 40, ((0.02, 2.0, 10),))
    charged = cost(event, 8, 1e-5)
    assert charged == PrivacyCharge(pure_dp_rdp(epsilon_pld(event, 1e-5), 8), 1e-5)
    assert cost(event, math.inf, 1e-5) == PrivacyCharge(epsilon_pld(event, 1e-5), 1e-5)


def test_a_composition_costs_the_sum_of_its_parts() -> None:
    parts = (Gaussian(2.0), PoissonGaussian.single(0.1, 1.0, 5), HISTOGRAM)
    whole = cost(Composed(parts), 6)
    assert whole.rho == pytest.approx(sum(cost(p, 6).rho for p in parts), rel=1e-12)
    assert whole.delta == cost(HISTOGRAM, 6).delta


def test_fixed_size_batches_have_a_renyi_bound() -> None:
    charged = cost(FixedSizeGaussian(1000, ((20, 4.0, 10),)), 4)
    assert charged.delta == 0
    assert 0 < charged.rho < cost(Gaussian(4.0 / 2, 10), 4).rho  # amplified
