"""Releases that the filter admits keep (ε, δ), by an accounting that the filter does not use."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_examples import reservation

from dp_core.errors import BudgetExceeded
from dp_core.privacy.accounting import delta_pld, gaussian_delta
from dp_core.privacy.ledger import State, privacy_filter
from dp_core.privacy.ledger.models import Budget, Entry, canonical
from dp_core.privacy.mechanisms import (
    Gaussian,
    MechanismEvent,
    NeighboringRelation,
    PoissonGaussian,
    PrivacyUnit,
    ThresholdedHistogram,
    compose,
)


def budget(epsilon: float, delta: float, order: float | None = None) -> Budget:
    if order is None:
        order = privacy_filter.best_order(epsilon, delta)
    return Budget(
        name="notes",
        unit=PrivacyUnit.PATIENT,
        relation=NeighboringRelation.ADD_REMOVE,
        epsilon=epsilon,
        delta=delta,
        order=order,
    )


def entry(event: MechanismEvent, delta: float, number: int) -> Entry:
    return reservation(f"{number}", event, delta=delta, state=State.RESERVED)


def fill(held_by: Budget, events: list[tuple[MechanismEvent, float]]) -> list[Entry]:
    """Admit the events in turn until one is refused, and return the admitted entries."""
    held: list[Entry] = []
    for number, (event, delta) in enumerate(itertools.islice(itertools.cycle(events), 2000)):
        asked = entry(event, delta, number)
        try:
            privacy_filter.admit(held_by, held, ((canonical(asked.event), delta),))
        except BudgetExceeded:
            return held
        held.append(asked)
    raise AssertionError("nothing was refused")


@given(st.floats(0.3, 20), st.floats(-9, -4), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_gaussians_that_fill_a_budget_stay_within_it(
    epsilon: float, log_delta: float, size: float
) -> None:
    """k Gaussian mechanisms equal one with σ/√k, whose δ(ε) has a closed form."""
    own = budget(epsilon, 10**log_delta)
    room = privacy_filter.capacity(own)
    assert room is not None
    assert math.isfinite(own.order)
    k = 1 + int(8 * size)
    sigma = math.sqrt(k * own.order / (2 * room.rho)) * (1 + 1e-12)  # k of them fit exactly
    held = fill(own, [(Gaussian(sigma), 1e-7)])
    assert len(held) == k
    delta = float(gaussian_delta(epsilon, math.sqrt(k) / sigma))
    assert own.delta is not None
    assert delta <= own.delta


@pytest.mark.parametrize("order", [None, 16.0, math.inf])
@pytest.mark.parametrize(("epsilon", "delta"), [(2.0, 1e-5), (6.0, 1e-6)])
def test_mixed_releases_that_fill_a_budget_stay_within_it(
    epsilon: float, delta: float, order: float | None
) -> None:
    own = budget(epsilon, delta, order)
    events: list[tuple[MechanismEvent, float]] = [
        (ThresholdedHistogram(64, 60.0, 400), 1e-7),
        (PoissonGaussian.single(0.02, 1.5, 100), 1e-7),
        (Gaussian(12.0), 1e-7),
    ]
    held = fill(own, events)
    assert len(held) >= 2
    # These releases are fixed in advance, so PLD may compose them.
    truth = delta_pld(compose(*(e.event for e in held)), epsilon)
    assert truth <= delta
    standing = privacy_filter.standing(own, held)
    assert standing.share <= 1
    assert standing.epsilon_so_far <= epsilon


def test_coins_alone_fill_a_filter() -> None:
    leaky = ThresholdedHistogram(100, 30.0, 170)  # δ of a coin: about 100·Pr[Z ≥ 169] = 9e-7
    held = [entry(Gaussian(50.0), 1e-9, 0)]  # already charged, so the filter applies
    with pytest.raises(BudgetExceeded, match="is δ 0 "):
        privacy_filter.admit(budget(50.0, 1e-6), held, ((canonical(leaky), 1e-6),))


def test_release_of_infinite_cost_is_refused() -> None:
    hopeless = Gaussian(1e-3)
    for order in (4.0, math.inf):
        with pytest.raises(BudgetExceeded):
            privacy_filter.admit(budget(8.0, 1e-5, order), [], ((canonical(hopeless), 1e-7),))
        cost = privacy_filter.decide(budget(8.0, 1e-5, order), [], ((canonical(hopeless), 1e-7),))
        assert not cost.fits
        assert cost.more_of_the_same == 0


def test_conversion_equals_the_published_formula() -> None:
    # Canonne, Kamath and Steinke 2020, Proposition 12, evaluated by hand at α = 10, δ = 1e-5
    expected = math.log(9 / 10) + (math.log(1e5) - math.log(10)) / 9
    assert privacy_filter.conversion(1e-5, 10) == pytest.approx(expected)
    assert expected == pytest.approx(0.918010, abs=1e-6)
    room = privacy_filter.capacity(budget(3.0, 2e-5, 10.0))
    assert room is not None
    assert room.rho == pytest.approx(3 - expected)
    assert room.delta == 1e-5


def test_default_order_has_room_for_most_gaussians() -> None:
    best = budget(8.0, 1e-5)
    mine = len(fill(best, [(Gaussian(3.0), 1e-7)]))
    for order in (2.0, 3.0, 8.0, 32.0, math.inf):
        assert len(fill(budget(8.0, 1e-5, order), [(Gaussian(3.0), 1e-7)])) <= mine
    assert privacy_filter.best_order(0.01, 1e-6) == math.inf  # no order has room
