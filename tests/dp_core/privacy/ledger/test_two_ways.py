import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_examples import GAUSSIAN, TRAINING, register_run, reservation, whole_run
from processes import run_at_once

from dp_core.errors import BadInput, BudgetExceeded
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.accounting.profiles import gaussian_delta
from dp_core.privacy.ledger import Entry, Ledger, State, Way, privacy_filter
from dp_core.privacy.mechanisms import Gaussian, PrivacyUnit, compose
from dp_core.privacy.seed_store import PrivacySeed, SeedStore

EPSILON, DELTA = 8.0, 1e-5
ONLY_BY_PLD = 0.62  # σ of a Gaussian that keeps (8, 1e-5) by PLD but that the filter refuses


def plan(*sigmas: float, key: str = "run", first: int = 0) -> list[Entry]:
    return [
        reservation(f"{key}-{n}", Gaussian(sigma), plan_key=key, run=key)
        for n, sigma in enumerate(sigmas, start=first)
    ]


def one_plan() -> list[Entry]:
    """Return a plan of two releases that fits only as the single plan of its budget."""
    return plan(math.sqrt(2) * ONLY_BY_PLD, math.sqrt(2) * ONLY_BY_PLD)


def way(ledger: Ledger) -> Way | None:
    return ledger.remaining("notes").way


def test_small_plan_leaves_the_budget_to_the_filter(ledger):
    assert way(ledger) is None
    assert ledger.cost_of_plan(plan(4.0)).way is Way.SEQUENCE
    ledger.register_plan(plan(4.0))
    assert way(ledger) is Way.SEQUENCE
    ledger.reserve(reservation("later", Gaussian(4.0)))
    with pytest.raises(BudgetExceeded) as refused:
        ledger.register_plan(plan(ONLY_BY_PLD, key="too late"))
    assert "as one plan" not in str(refused.value)


def test_plan_that_fits_by_pld_alone_closes_the_budget(ledger):
    decision = ledger.cost_of_plan(one_plan())
    assert (decision.way, decision.left_after, decision.more_of_the_same) == (Way.ONE_PLAN, 0.0, 1)
    ledger.register_plan(one_plan())
    remaining = ledger.remaining("notes")
    together = compose(*(r.event for r in one_plan()))
    assert remaining.way is Way.ONE_PLAN
    assert remaining.capacity == privacy_filter.PrivacyCharge(EPSILON, DELTA)
    assert remaining.share == pytest.approx(remaining.spent.rho / EPSILON)
    assert remaining.spent.rho == pytest.approx(epsilon_pld(together, DELTA))
    with pytest.raises(BudgetExceeded, match="closed for every other release"):
        ledger.reserve(reservation("tiny", Gaussian(500.0)))
    with pytest.raises(BudgetExceeded, match="closed for every other release"):
        ledger.register_plan(plan(500.0, key="tiny plan"))
    assert not ledger.cost_of_plan([reservation("next", Gaussian(500.0), delta=1e-9)]).fits
    ledger.register_plan(one_plan())  # a retry, or the same settings in another run
    assert len(ledger.history("notes")) == 2


def test_plan_beyond_both_ways_is_refused_with_both_sums(ledger):
    with pytest.raises(BudgetExceeded, match=r"Rényi order.*; and as one plan ε .* > 8 at δ"):
        ledger.register_plan(plan(0.5))
    assert ledger.history("notes") == []
    assert way(ledger) is None


def test_lost_seed_in_a_closed_budget_is_refused(ledger, tmp_path):
    first, _ = one_plan()
    ledger.register_plan(one_plan())
    ledger.seed(ledger.reserve(first), SeedStore(tmp_path / "seeds"), b"manifest")
    again = reservation(first.spec_hash, first.event, run="run", plan_key="run", attempt=1)
    with pytest.raises(BudgetExceeded, match="a lost seed that is drawn again"):
        ledger.reserve(again)
    assert ledger.reserve(first).state is State.RESERVED


def test_untouched_plan_is_given_back_and_the_way_is_open_again(ledger):
    ledger.register_plan(one_plan())
    ledger.withdraw_plan("notes", "run")
    assert way(ledger) is None
    ledger.reserve(reservation("small", Gaussian(4.0)))
    assert way(ledger) is Way.SEQUENCE
    with pytest.raises(BudgetExceeded):
        ledger.reserve(one_plan()[0])  # registers its whole plan, which the filter refuses
    assert [e.state for e in ledger.history("notes")] == [
        State.WITHDRAWN, State.WITHDRAWN, State.RESERVED
    ]  # fmt: skip


def test_begun_plan_keeps_the_budget_closed(ledger):
    """The data may decide when a run stops, so giving back the rest would be a filter by PLD."""
    ledger.register_plan(one_plan())
    ledger.reserve(one_plan()[0])
    assert ledger.give_back("run") == []
    with pytest.raises(BadInput, match="given back whole or not at all"):
        ledger.withdraw_plan("notes", "run")
    with pytest.raises(BadInput, match="has grown since its first release"):
        ledger.register_plan([*one_plan(), *plan(500.0, first=2)])
    with pytest.raises(BudgetExceeded, match="closed"):
        ledger.register_plan(plan(500.0, key="changed settings"))
    assert way(ledger) is Way.ONE_PLAN


def test_new_plan_replaces_the_untouched_plan_of_an_ended_run_if_it_fits(ledger):
    ledger.register_plan(plan(2.0, 2.0, key="killed"))
    spent = ledger.remaining("notes").spent
    with pytest.raises(BudgetExceeded):
        ledger.register_plan(plan(0.5, key="large"), ended={"killed"}.__contains__)
    assert [e.state for e in ledger.history("notes")] == [State.PLANNED] * 2
    ledger.register_plan(plan(2.0, 2.0, key="corrected"), ended={"killed"}.__contains__)
    assert ledger.remaining("notes").spent == spent
    assert [e.state for e in ledger.history("notes")] == [State.WITHDRAWN] * 2 + [State.PLANNED] * 2


@pytest.mark.parametrize("begun", [False, True])
def test_plan_of_a_live_or_begun_run_is_counted_next_to_a_new_one(ledger, begun):
    ledger.register_plan(plan(2.0, 2.0, key="first"))
    if begun:
        ledger.reserve(plan(2.0, key="first")[0])
    ended = {"first" if begun else "another"}
    ledger.register_plan(plan(2.0, key="second"), ended=ended.__contains__)
    assert ledger.remaining("notes").charged_entries == 3


def test_identical_run_takes_the_plan_over_from_the_first(ledger):
    """Otherwise the end of the first run would release the budget that the second one needs."""
    releases = one_plan()
    ledger.register_plan(releases)
    again = [reservation(r.spec_hash, r.event, plan_key="again", run="again") for r in releases]
    ledger.register_plan(again)
    assert ledger.give_back("run") == []
    assert {e.run for e in ledger.history("notes")} == {"again"}
    assert len(ledger.give_back("again")) == 2


def test_run_that_shares_a_release_pays_for_no_withdrawn_plan_of_another_run(ledger):
    ledger.register_plan(plan(4.0, 2.0, 2.0, key="sweep"))
    vocabulary = reservation("sweep-0", Gaussian(4.0), plan_key="job", run="job")
    ledger.register_plan([vocabulary, *plan(4.0, key="job")])
    ledger.give_back("sweep")
    ledger.reserve(vocabulary)
    assert [e.run for e in ledger.history("notes") if e.charged] == ["job"] * 2
    ledger.reserve(plan(2.0, key="sweep", first=1)[0])  # of a step of the sweep that still runs
    assert ledger.remaining("notes").charged_entries == 4


def test_end_of_a_run_gives_back_its_untouched_plans_of_every_data_set(ledger):
    ledger.register_dataset("labels", PrivacyUnit.PATIENT, EPSILON, DELTA)
    ledger.register_plan(plan(4.0, key="on notes"))
    labels = [reservation("l", GAUSSIAN, dataset="labels", plan_key="on labels", run="on notes")]
    ledger.register_plan(labels)
    ledger.register_plan(plan(4.0, key="other run"))
    assert {e.dataset for e in ledger.give_back("on notes")} == {"notes", "labels"}
    assert ledger.remaining("labels").spent == privacy_filter.PrivacyCharge(0.0, 0.0)
    assert [e.run for e in ledger.history("notes") if e.charged] == ["other run"]


# --- a plan is charged as a whole or not at all, and given back only where no data was read


def states(ledger: Ledger) -> list[State]:
    return [entry.state for entry in ledger.history("notes")]


def test_refused_plan_leaves_no_entry_and_names_the_plan_that_holds_the_budget(ledger):
    ledger.register_plan(whole_run())
    dear = plan(0.6, key="later")
    with pytest.raises(BudgetExceeded, match="`confide ledger withdraw DATASET RUN`") as caught:
        ledger.register_plan(dear)
    assert "spent + asked > capacity" in str(caught.value) and "\n" not in str(caught.value)
    assert "2 of dp_bert/one" in str(caught.value)
    assert len(ledger.history("notes")) == 2
    ledger.reserve(whole_run()[0])
    ledger.withdraw_plan("notes", "dp_bert/one")
    with pytest.raises(BudgetExceeded, match="1 of dp_bert/one") as caught:
        ledger.register_plan(dear)
    assert "ledger withdraw" not in str(caught.value)  # a plan that has begun stays charged


def test_withdrawn_release_is_admitted_again_before_it_is_reserved(ledger):
    asked = reservation("dear", Gaussian(0.8), plan_key="dp_bert/one", run="dp_bert/one")
    ledger.register_plan([asked])
    ledger.withdraw_plan("notes", "dp_bert/one")
    ledger.reserve(reservation("other", Gaussian(0.8)))
    with pytest.raises(BudgetExceeded):
        ledger.reserve(asked)
    assert states(ledger) == [State.WITHDRAWN, State.RESERVED]


def test_begun_release_stays_charged(ledger):
    vocabulary, _ = whole_run()
    ledger.register_plan(whole_run())
    ledger.reserve(vocabulary)
    before = ledger.cost_of_plan([vocabulary])
    assert before.share == 0  # it is charged already
    (gone,) = ledger.withdraw_plan("notes", "dp_bert/one")
    assert gone.spec_hash == "training"
    assert states(ledger) == [State.RESERVED, State.WITHDRAWN]
    with pytest.raises(BadInput, match="no planned release"):
        ledger.withdraw_plan("notes", "dp_bert/one")


@pytest.mark.parametrize("begun", [State.RESERVED, State.SETTLED])
def test_plan_composed_by_pld_is_given_back_whole_or_not_at_all(url, begun):
    ledger = Ledger.open(url)
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5, order=math.inf)
    ledger.register_plan(whole_run())
    spent = ledger.remaining("notes").spent
    first = ledger.reserve(whole_run()[0])
    if begun is State.SETTLED:
        ledger.bind(first.id, PrivacySeed.draw(), b"manifest")
        ledger.settle(first.id, b"released")
    with pytest.raises(BadInput, match="charged as one"):
        ledger.withdraw_plan("notes", "dp_bert/one")
    assert ledger.remaining("notes").spent == spent
    assert states(ledger) == [begun, State.PLANNED]
    other = [reservation("later", TRAINING, plan_key="later", run="later")]
    ledger.register_plan(other)
    ledger.withdraw_plan("notes", "later")
    assert ledger.remaining("notes").spent == spent


def test_release_withdrawn_from_a_plan_cannot_join_it_after_its_first_result(url):
    ledger = Ledger.open(url)
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, 20.0, 1e-4, order=math.inf)
    ledger.register_plan(plan(2.0, 2.0, 2.0))
    ledger.register_plan(plan(2.0, 2.0))
    ledger.reserve(plan(2.0)[0])
    spent = ledger.remaining("notes").spent
    with pytest.raises(BadInput, match="has grown since its first release"):
        ledger.reserve(plan(2.0, first=2)[0])
    assert ledger.remaining("notes").spent == spent


def test_withdrawn_release_draws_no_noise(ledger, tmp_path):
    ledger.register_plan(whole_run())
    (first, _) = ledger.withdraw_plan("notes", "dp_bert/one")
    with pytest.raises(BadInput, match="reserve it"):
        ledger.seed(first, SeedStore(tmp_path / "seeds"), b"manifest")
    with pytest.raises(BadInput, match="never reserved"):
        ledger.settle(first.id)


def test_second_of_two_racing_runs_is_refused_with_the_reason(ledger, url, other_processes):
    names = ("dp_bert/a", "dp_bert/b")
    said = dict(run_at_once(other_processes, register_run, [(url, name) for name in names]))
    (refused,) = [name for name in names if said[name]]
    (admitted,) = set(names) - {refused}
    assert f"2 of {admitted}" in said[refused]
    assert [e.run for e in ledger.history("notes")] == [admitted] * 2


# --- against brute force

PLANS = ([0.55], [0.62], [0.88, 0.88], [0.95, 2.0], [1.2, 1.2], [5.0])
ACTIONS = ("register", "register", "reserve", "reserve", "retry", "withdraw", "end", "alone")
MOVES = st.lists(
    st.tuples(
        st.sampled_from(ACTIONS),
        st.integers(0, 1),  # number of the run
        st.sampled_from(PLANS),
    ),
    min_size=3,
    max_size=14,
)


def register_as_forecast(
    ledger: Ledger, planned: list[Entry], ended: Callable[[str], bool]
) -> None:
    """Register a plan, and assert that the ledger decides as its forecast of the cost states."""
    forecast = ledger.cost_of_plan(planned, ended)
    try:
        ledger.register_plan(planned, ended)
    except BudgetExceeded:
        assert not forecast.fits
        raise
    assert forecast.fits
    if forecast.new_releases:
        assert way(ledger) is forecast.way
        share = ledger.remaining("notes").share
        if forecast.way is Way.SEQUENCE:
            assert share == pytest.approx(1 - forecast.left_after)
        else:
            assert share == pytest.approx(forecast.share)


def move(ledger: Ledger, action: str, number: int, sigmas: list[float]) -> None:
    key = f"run {number}"
    planned = plan(*sigmas, key=f"{key} of {sigmas}")
    more: dict[str, Any] = {"run": planned[0].run, "plan_key": planned[0].plan_key}
    match action:
        case "register":
            register_as_forecast(ledger, planned, lambda run: run.startswith(key))
        case "reserve":
            ledger.reserve(planned[-1])
        case "retry":
            ledger.reserve(reservation(planned[0].spec_hash, planned[0].event, attempt=1, **more))
        case "withdraw":
            ledger.withdraw_plan("notes", planned[0].plan_key)
        case "end":
            ledger.give_back(planned[0].run)
        case "alone":
            ledger.reserve(reservation(f"alone {number}", Gaussian(sigmas[0])))


def check(charged: list[Entry], order: float, room: float) -> None:
    """Assert by closed forms that the charged Gaussians fit one of the two ways."""
    mu2 = math.fsum(1 / e.event.noise_multiplier**2 for e in charged)  # type: ignore[attr-defined]
    if mu2:
        assert float(gaussian_delta(EPSILON, math.sqrt(mu2))) <= DELTA
    assert order * mu2 / 2 <= room or len({e.group for e in charged}) == 1


@given(MOVES)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_sequence_of_plans_leaves_its_way_or_exceeds_the_budget(tmp_path_factory, moves):
    ledger = Ledger.open(f"sqlite:///{tmp_path_factory.mktemp('ledger')}/ledger.db")
    budget = ledger.register_dataset("notes", PrivacyUnit.PATIENT, EPSILON, DELTA)
    room = EPSILON - privacy_filter.conversion(DELTA / 2, budget.order)
    begun: set[str] = set()
    decided: Way | None = None
    fixed: set[str] = set()  # charged entries when the first release began
    for action, number, sigmas in moves:
        with suppress(BudgetExceeded, BadInput):
            move(ledger, action, number, sigmas)
        charged = [e for e in ledger.history("notes") if e.charged]
        check(charged, budget.order, room)
        assert begun <= {e.id for e in charged}  # begun releases stay charged
        begun = {e.id for e in charged if e.begun}
        if begun and decided is None:
            decided, fixed = way(ledger), {e.id for e in charged}
        if decided is not None:
            assert way(ledger) is decided
        if decided is Way.ONE_PLAN:
            assert {e.id for e in charged} == fixed
        if decided is Way.SEQUENCE:
            mu2 = math.fsum(1 / e.event.noise_multiplier**2 for e in charged)  # type: ignore[attr-defined]
            assert budget.order * mu2 / 2 <= room * (1 + 1e-12)
