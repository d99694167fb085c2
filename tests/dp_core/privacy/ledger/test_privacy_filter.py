"""Releases that the filter admits keep (ε, δ), by an accounting that the filter does not use."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_examples import reservation
from numpy.typing import NDArray
from scipy.special import logsumexp

from dp_core.errors import BudgetExceeded
from dp_core.privacy import mechanisms
from dp_core.privacy.accounting.accountants import composed_profile, epsilon_pld, pure_dp_rdp
from dp_core.privacy.accounting.profiles import gaussian_delta
from dp_core.privacy.ledger import State, privacy_filter
from dp_core.privacy.ledger.models import Budget, Entry
from dp_core.privacy.ledger.privacy_filter import PrivacyCharge, charge


def budget(epsilon: float, delta: float, order: float | None = None) -> Budget:
    if order is None:
        order = privacy_filter.best_order(epsilon, delta)
    return Budget(
        name="notes",
        unit=mechanisms.PrivacyUnit.PATIENT,
        relation=mechanisms.NeighboringRelation.ADD_REMOVE,
        epsilon=epsilon,
        delta=delta,
        order=order,
    )


def entry(event: mechanisms.MechanismEvent, delta: float, number: int) -> Entry:
    return reservation(f"{number}", event, delta=delta, state=State.RESERVED)


def fill(held_by: Budget, events: list[tuple[mechanisms.MechanismEvent, float]]) -> list[Entry]:
    """Admit the events in turn until one is refused, and return the admitted entries."""
    held: list[Entry] = []
    for number, (event, delta) in enumerate(itertools.islice(itertools.cycle(events), 2000)):
        asked = entry(event, delta, number)
        try:
            privacy_filter.admit(held_by, held, [asked])
        except BudgetExceeded:
            return held
        held.append(asked)
    raise AssertionError("nothing was refused")


@given(st.floats(0.3, 20), st.floats(-9, -4), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_gaussians_that_fill_a_budget_stay_within_it(epsilon, log_delta, size):
    """k Gaussian mechanisms equal one with σ/√k, whose δ(ε) has a closed form."""
    limit = budget(epsilon, 10**log_delta)
    room = privacy_filter.capacity(limit)
    assert math.isfinite(limit.order)
    k = 1 + int(8 * size)
    sigma = math.sqrt(k * limit.order / (2 * room.rho)) * (1 + 1e-12)  # k of them fit exactly
    held = fill(limit, [(mechanisms.Gaussian(sigma), 1e-7)])
    assert len(held) == k
    delta = float(gaussian_delta(epsilon, math.sqrt(k) / sigma))
    assert delta <= limit.delta


@pytest.mark.parametrize("order", [None, 16.0, math.inf])
@pytest.mark.parametrize(("epsilon", "delta"), [(2.0, 1e-5), (6.0, 1e-6)])
def test_mixed_releases_that_fill_a_budget_stay_within_it(epsilon, delta, order):
    limit = budget(epsilon, delta, order)
    events: list[tuple[mechanisms.MechanismEvent, float]] = [
        (mechanisms.ThresholdedHistogram(64, 60.0, 400), 1e-7),
        (mechanisms.PoissonGaussian.single(0.02, 1.5, 100), 1e-7),
        (mechanisms.Gaussian(12.0), 1e-7),
    ]
    held = fill(limit, events)
    assert len(held) >= 2
    # These releases are fixed in advance, so PLD may compose them.
    truth = composed_profile(mechanisms.compose(*(e.event for e in held)))(epsilon)
    assert truth <= delta
    standing = privacy_filter.standing(limit, held)
    assert standing.share <= 1
    assert standing.epsilon_so_far <= epsilon


def test_coins_alone_fill_a_filter():
    leaky = mechanisms.ThresholdedHistogram(
        100, 30.0, 170
    )  # δ of a coin: about 100·Pr[Z ≥ 169] = 9e-7
    held = [entry(mechanisms.Gaussian(50.0), 1e-9, 0)]  # already charged, so the filter applies
    with pytest.raises(BudgetExceeded, match="is δ 0 "):
        privacy_filter.admit(budget(50.0, 1e-6), held, [entry(leaky, 1e-6, 1)])


def test_release_of_infinite_cost_is_refused():
    hopeless = entry(mechanisms.Gaussian(1e-3), 1e-7, 0)
    for order in (4.0, math.inf):
        with pytest.raises(BudgetExceeded):
            privacy_filter.admit(budget(8.0, 1e-5, order), [], [hopeless])
        cost = privacy_filter.decide(budget(8.0, 1e-5, order), [], [hopeless])
        assert not cost.fits
        assert cost.more_of_the_same == 0


def test_conversion_equals_the_published_formula() -> None:
    # Canonne, Kamath and Steinke 2020, Proposition 12, evaluated by hand at α = 10, δ = 1e-5
    expected = math.log(9 / 10) + (math.log(1e5) - math.log(10)) / 9
    assert privacy_filter.conversion(1e-5, 10) == pytest.approx(expected)
    assert expected == pytest.approx(0.918010, abs=1e-6)
    room = privacy_filter.capacity(budget(3.0, 2e-5, 10.0))
    assert room.rho == pytest.approx(3 - expected)
    assert room.delta == 1e-5


def test_default_order_has_room_for_most_gaussians():
    best = budget(8.0, 1e-5)
    mine = len(fill(best, [(mechanisms.Gaussian(3.0), 1e-7)]))
    for order in (2.0, 3.0, 8.0, 32.0, math.inf):
        assert len(fill(budget(8.0, 1e-5, order), [(mechanisms.Gaussian(3.0), 1e-7)])) <= mine
    assert privacy_filter.best_order(0.01, 1e-6) == math.inf  # no order has room


def cost(event: mechanisms.MechanismEvent, order: float, delta: float = 1e-6) -> PrivacyCharge:
    return charge(((event, delta),), order)


def divergence(p: NDArray[np.float64], q: NDArray[np.float64], order: float) -> float:
    return float(logsumexp(order * np.log(p) + (1 - order) * np.log(q)) / (order - 1))


@pytest.mark.parametrize("order", [2, 5, 16])
@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 1.0), (0.2, 2.0), (1.0, 3.0)])
def test_a_poisson_sampled_gaussian_costs_its_divergence(rate, sigma, order):
    """Compare with E_Q[(P/Q)^α] by quadrature in both directions, where P is the mixture."""
    x = np.linspace(-30 * sigma, 30 * sigma + 16, 400_001)
    q = np.exp(-(x**2) / (2 * sigma**2))
    p = (1 - rate) * q + rate * np.exp(-((x - 1) ** 2) / (2 * sigma**2))
    inside = q > 1e-300
    p, q = p[inside] / p.sum(), q[inside] / q.sum()
    truth = max(divergence(p, q, order), divergence(q, p, order))
    charged = cost(mechanisms.PoissonGaussian.single(rate, sigma, 7), order)
    assert charged.rho == pytest.approx(7 * truth, rel=1e-6)
    assert charged.delta == 0


@given(st.floats(1e-4, 20), st.integers(2, 512))
def test_randomised_response_has_the_largest_charge_of_an_epsilon(epsilon, order):
    assert pure_dp_rdp(epsilon, math.inf) == epsilon
    assert pure_dp_rdp(math.inf, order) == math.inf
    rho = pure_dp_rdp(epsilon, order)
    assert 0 <= rho <= epsilon
    assert rho <= order * epsilon**2 / 2 * (1 + 1e-6)  # Bun and Steinke 2016, Proposition 3.3
    if order * epsilon < 200:
        p = np.array([1.0, math.exp(-epsilon)]) / (1 + math.exp(-epsilon))
        assert rho == pytest.approx(divergence(p, p[::-1], order), rel=1e-6, abs=1e-12)


SIGMA, THRESHOLD, WORDS = 2.0, 9, 3
HISTOGRAM = mechanisms.ThresholdedHistogram(WORDS, SIGMA, THRESHOLD)


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
def test_a_histogram_costs_no_less_than_it_gives_away(order):
    """Enumerate ℓ, the words that only the unit has; it shares the other N − ℓ words."""
    charged = cost(HISTOGRAM, order)
    passes = 1 - released(1)[0]
    worst = 0.0
    for lone in range(WORDS + 1):
        coin = 1 - (1 - passes) ** lone
        assert coin <= charged.delta * (1 + 1e-9)
        for base in range(1, 3 * THRESHOLD):
            here, there = released(base + 1), released(base)
            both = (here > 1e-250) & (there > 1e-250)
            for p, q in ((here, there), (there, here)):
                worst = max(worst, (WORDS - lone) * divergence(p[both], q[both], order))
    assert worst <= charged.rho * (1 + 1e-9)
    assert worst > charged.rho * 0.8  # the charge is nearly tight
    assert charged.delta == pytest.approx(1 - (1 - passes) ** WORDS, rel=1e-9)


def test_events_without_a_renyi_bound_cost_their_epsilon_and_delta():
    event = mechanisms.TruncatedPoissonGaussian(1000, 40, ((0.02, 2.0, 10),))
    charged = cost(event, 8, 1e-5)
    assert charged == PrivacyCharge(pure_dp_rdp(epsilon_pld(event, 1e-5), 8), 1e-5)
    assert cost(event, math.inf, 1e-5) == PrivacyCharge(epsilon_pld(event, 1e-5), 1e-5)
