import json
import math

import pytest
from ledger_examples import GAUSSIAN, HISTOGRAM, TRAINING, reservation
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from dp_core.errors import BadInput, BudgetExceeded
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.ledger import Entry, Ledger, State, privacy_filter
from dp_core.privacy.mechanisms import (
    NeighboringRelation,
    PoissonGaussian,
    PrivacyUnit,
    ShuffledGaussian,
    Unaccounted,
    compose,
)
from dp_core.privacy.seed_store import PrivacySeed


def spent(ledger: Ledger, dataset: str = "notes") -> float:
    return ledger.remaining(dataset).spent.rho


def test_registering_again_is_no_change_and_another_budget_is_refused(ledger):
    first = ledger.datasets()["notes"]
    assert ledger.register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5) == first
    for unit, epsilon, delta in (
        (PrivacyUnit.PATIENT, 9.0, 1e-5),
        (PrivacyUnit.PATIENT, 8.0, 1e-6),
        (PrivacyUnit.DOCUMENT, 8.0, 1e-5),
    ):
        with pytest.raises(BadInput, match="registered already"):
            ledger.register_dataset("notes", unit, epsilon, delta)
    with pytest.raises(BadInput, match="registered already"):
        ledger.register_made_up("notes")
    assert ledger.datasets() == {"notes": first}


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_a_budget_is_a_positive_number(ledger, epsilon):
    with pytest.raises(BadInput, match="budget"):
        ledger.register_dataset("other", PrivacyUnit.PATIENT, epsilon, 1e-5)
    for delta in (0.0, 5e-324, 0.011, 0.5, 1.0, math.nan):
        with pytest.raises(BadInput, match=r"δ = .* is not from 1e-300 to 0\.01"):
            ledger.register_dataset("other", PrivacyUnit.PATIENT, 1.0, delta)
    with pytest.raises(BadInput, match="order"):
        ledger.register_dataset("other", PrivacyUnit.PATIENT, 1.0, 1e-5, order=2.5)
    with pytest.raises(BadInput, match="no room at all"):
        ledger.register_dataset("other", PrivacyUnit.PATIENT, 1.0, 1e-5, order=2.0)


def test_data_sets_that_share_people_share_one_budget(ledger):
    ledger.register_dataset("letters", PrivacyUnit.PATIENT, 8.0, 1e-5, shares_budget_with="notes")
    ledger.reserve(reservation("a", GAUSSIAN))
    ledger.reserve(reservation("b", GAUSSIAN, dataset="letters"))
    assert ledger.remaining("notes") == ledger.remaining("letters")
    assert ledger.remaining("notes").charged_entries == 2
    assert [e.dataset for e in ledger.history("letters")] == ["notes", "letters"]
    with pytest.raises(BadInput, match="different"):
        ledger.register_dataset("third", PrivacyUnit.PATIENT, 2.0, 1e-5, shares_budget_with="notes")


def test_made_up_data_need_no_budget_and_no_single_unit(ledger):
    ledger.register_made_up("synthetic-notes")
    for number, unit in enumerate(PrivacyUnit):
        ledger.reserve(reservation(f"{number}", GAUSSIAN, dataset="synthetic-notes", unit=unit))
    remaining = ledger.remaining("synthetic-notes")
    assert remaining.budget.made_up
    assert remaining.charged_entries == 3
    assert remaining.capacity is None
    assert ledger.cost_of_plan([reservation("next", dataset="synthetic-notes")]).fits
    assert spent(ledger) == 0.0


def test_a_reservation_counts_before_it_is_settled(ledger, url):
    entry = ledger.reserve(reservation(plan_key="run-1", run="dp_bert/run-1"))
    assert (entry.state, entry.event.unit) == (State.RESERVED, PrivacyUnit.PATIENT)
    before = spent(ledger)
    assert before > 0 and ledger.remaining("notes").unsettled == 1
    assert Ledger.open(url).reserve(reservation(run="two")) == entry
    ledger.bind(entry.id, PrivacySeed.draw(), b"manifest")
    settled = ledger.settle(entry.id, b"released")
    assert settled.state is State.SETTLED
    assert settled.settled_at >= settled.reserved_at
    # A repetition is the same entry with the same seed, without a charge.
    assert ledger.settle(entry.id, b"released") == ledger.reserve(reservation()) == settled
    assert (settled.id, settled.seed_key) == (entry.id, entry.seed_key)
    assert spent(ledger) == before and ledger.remaining("notes").unsettled == 0
    assert ledger.history("notes") == [settled]


def test_a_new_attempt_is_a_new_seed_and_a_new_charge(ledger):
    first = ledger.reserve(reservation())
    once = spent(ledger)
    second = ledger.reserve(reservation(attempt=1))
    assert second.id != first.id
    assert second.seed_key != first.seed_key
    assert spent(ledger) == pytest.approx(2 * once)


def test_same_spec_hash_with_another_mechanism_is_refused(ledger):
    ledger.reserve(reservation())
    for other in (reservation(event=GAUSSIAN), reservation(delta=1e-7)):
        with pytest.raises(BadInput, match="another mechanism"):
            ledger.reserve(other)
    assert len(ledger.history("notes")) == 1


def test_what_does_not_fit_is_refused_with_the_arithmetic(ledger):
    held = 0
    with pytest.raises(BudgetExceeded) as caught:
        while True:
            ledger.reserve(reservation(f"spec-{held}", GAUSSIAN))
            held += 1
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    remaining = ledger.remaining("notes")
    each = 4 / (2 * 2.0**2)  # α/2σ² at order 4
    assert remaining.budget.order == 4
    assert held == int(remaining.capacity.rho / each)
    for figure in (f"{held * each:.5g}", f"{each:.5g}", f"{remaining.capacity.rho:.5g}", "ε = 8"):
        assert figure in str(caught.value)
    assert remaining.charged_entries == held
    assert held * each <= remaining.capacity.rho < (held + 1) * each
    # A smaller release may still fit, since the refusal did not close the budget.
    ledger.reserve(reservation("small", PoissonGaussian.single(0.01, 4.0, 100)))


@pytest.mark.parametrize("another", ["256 words", "one labelled sentence"])
def test_examples_of_another_kind_are_another_unit(ledger, another):
    ledger.register_dataset("tuples", PrivacyUnit.EXAMPLE, 10.0, 1e-5)

    def release(example: str, name: str) -> Entry:
        event = TRAINING.stating(PrivacyUnit.EXAMPLE, example)
        return Entry("tuples", PrivacyUnit.EXAMPLE, event, 1e-7, name, f"plan of {name}")

    first = ledger.reserve(release("64 words", "first"))
    units = ", ".join(sorted(f"example of {kind}" for kind in ("64 words", another)))
    attempts = (lambda plan: ledger.reserve(*plan), ledger.register_plan, ledger.cost_of_plan)
    for attempt in attempts:
        with pytest.raises(BadInput, match=units):
            attempt([release(another, "second")])
    assert [entry.id for entry in ledger.history("tuples")] == [first.id]
    ledger.reserve(release("64 words", "third"))


def test_releases_that_do_not_compose_are_refused(ledger):
    with pytest.raises(BadInput, match="unit"):
        ledger.reserve(reservation(unit=PrivacyUnit.DOCUMENT))
    for attempt in (ledger.reserve, lambda planned: ledger.cost_of_plan([planned])):
        with pytest.raises(BadInput, match="neighbours"):
            attempt(reservation(event=ShuffledGaussian(2.0, 3)))
    with pytest.raises(BadInput, match="unit"):
        reservation(event=GAUSSIAN.__class__(2.0, unit=PrivacyUnit.DOCUMENT))
    assert ledger.history("notes") == []
    ledger.register_dataset(
        "zero-out", PrivacyUnit.PATIENT, 8.0, 1e-5, relation=NeighboringRelation.ZERO_OUT
    )
    ledger.reserve(reservation(event=ShuffledGaussian(5.0, 3), dataset="zero-out"))


def test_a_release_without_guarantee_is_listed_and_not_charged(ledger):
    ledger.reserve(reservation("a", GAUSSIAN))
    before = spent(ledger)
    entry = ledger.reserve(reservation("b", Unaccounted("non-private training"), delta=0.0))
    assert not entry.accounted
    assert spent(ledger) == before
    remaining = ledger.remaining("notes")
    assert (remaining.charged_entries, remaining.operator_releases) == (1, 1)
    assert [e.accounted for e in ledger.history("notes")] == [True, False]
    assert ledger.settle(entry.id).state is State.SETTLED  # it has no secret noise
    assert ledger.reserve(reservation("b", Unaccounted("non-private training"), delta=0.0)).id == (
        entry.id
    )


@pytest.mark.parametrize(
    "wrong",
    [{"delta": 0.0}, {"delta": 1.0}, {"delta": math.nan}, {"spec_hash": ""}, {"dataset": ""}],
)
def test_an_incomplete_reservation_is_refused(wrong):
    with pytest.raises(BadInput):
        reservation(**wrong)  # type: ignore[arg-type]


def test_plan_fits_whole_or_not_at_all(ledger):
    room = ledger.cost_of_plan([reservation("next", GAUSSIAN)]).more_of_the_same
    points = [reservation(f"p{n}", GAUSSIAN, plan_key="sweep") for n in range(4 * room)]
    with pytest.raises(BudgetExceeded):
        ledger.register_plan(points)
    assert ledger.history("notes") == []
    entries = ledger.register_plan(points[:room])
    assert {e.state for e in entries} == {State.PLANNED}
    assert ledger.remaining("notes").unsettled == room
    with pytest.raises(BudgetExceeded):
        ledger.reserve(reservation("one more", GAUSSIAN))


def test_planned_release_is_charged_once(ledger):
    plan = [reservation(f"p{n}", GAUSSIAN, plan_key="sweep") for n in range(3)]
    entries = ledger.register_plan(plan)
    before = spent(ledger)
    with pytest.raises(BadInput, match="reserve it before"):
        ledger.bind(entries[1].id, PrivacySeed.draw(), b"manifest")
    with pytest.raises(BadInput, match="never reserved"):
        ledger.settle(entries[1].id)
    begun = ledger.reserve(plan[1])
    assert (begun.id, begun.state) == (entries[1].id, State.RESERVED)
    assert [e.state for e in ledger.register_plan(plan)] == [
        State.PLANNED,
        State.RESERVED,
        State.PLANNED,
    ]
    assert spent(ledger) == before
    with pytest.raises(BadInput, match="grown"):
        ledger.register_plan([*plan, reservation("p3", GAUSSIAN, plan_key="sweep")])


def test_plan_in_a_budget_of_infinite_order_is_composed_by_pld(ledger):
    ledger.register_dataset("sums", PrivacyUnit.PATIENT, 20.0, 1e-4, order=math.inf)
    events = [HISTOGRAM, TRAINING, TRAINING]
    plan = [
        reservation(f"p{n}", event, dataset="sums", plan_key="run", delta=1e-6)
        for n, event in enumerate(events)
    ]
    ledger.register_plan(plan)
    together = epsilon_pld(compose(*(r.event for r in plan)), 3e-6)
    remaining = ledger.remaining("sums")
    assert remaining.spent.rho == pytest.approx(together, rel=1e-9)
    assert remaining.spent.delta == pytest.approx(3e-6)
    # If the same releases are chosen one after the other, their ε add up.
    for n, event in enumerate(events):
        ledger.reserve(reservation(f"q{n}", event, dataset="sums", delta=1e-6))
    apart = sum(epsilon_pld(event, 1e-6) for event in events)
    assert spent(ledger, "sums") == pytest.approx(together + apart, rel=1e-9)
    assert together < apart


def test_a_seed_belongs_to_its_entry_and_use(ledger, seeds):
    entry = ledger.reserve(reservation())
    seed = ledger.seed(entry, seeds, b"manifest")
    bound = ledger.entry(entry.id)
    assert bound.seed_hash == seed.salted_hash()
    assert bound.is_bound_to(seed, b"manifest")
    assert not bound.is_bound_to(seed, b"another manifest")
    assert not bound.is_bound_to(PrivacySeed.draw(), b"manifest")
    assert not entry.is_bound_to(seed, b"manifest")
    assert not bound.known_seed
    again = ledger.seed(ledger.reserve(reservation()), seeds, b"manifest")
    assert again.derive("x") == seed.derive("x")
    with pytest.raises(BadInput, match="inputs are not those"):
        ledger.seed(entry, seeds, b"another manifest")
    other = ledger.reserve(reservation("other"))
    assert ledger.seed(other, seeds, b"manifest").derive("x") != seed.derive("x")


def test_a_lost_seed_is_not_replaced_within_the_same_charge(ledger, seeds, tmp_path):
    unbound = ledger.reserve(reservation())
    ledger.seed(unbound, seeds, b"manifest")
    (tmp_path / "seeds" / f"{unbound.seed_key}.json").unlink()
    with pytest.raises(BadInput, match="new charge"):
        ledger.seed(ledger.reserve(reservation()), seeds, b"manifest")
    # An entry that was read before it was bound cannot replace the seed either.
    with pytest.raises(BadInput, match="not the one it began with"):
        ledger.seed(unbound, seeds, b"manifest")


def test_the_ledger_holds_no_secret(ledger, seeds, tmp_path, url):
    entry = ledger.reserve(reservation())
    ledger.seed(entry, seeds, b"manifest of private content")
    ledger.settle(entry.id, b"released")
    secret = json.loads((tmp_path / "seeds" / f"{entry.seed_key}.json").read_text())["secret"]
    with create_engine(url, poolclass=NullPool).connect() as db:
        rows = str(db.execute(text("SELECT * FROM entries")).all())
    assert secret not in rows
    assert "manifest of private" not in rows
    if url.startswith("sqlite"):
        for file in (tmp_path / "home").iterdir():
            assert bytes.fromhex(secret) not in file.read_bytes()
            assert secret.encode() not in file.read_bytes()


def test_a_known_seed_is_for_made_up_data_and_marks_them(ledger):
    with pytest.raises(BadInput, match="known seed"):
        ledger.bind(ledger.reserve(reservation()).id, PrivacySeed.fixed(1), b"manifest")
    ledger.register_made_up("synthetic-notes")
    entry = ledger.reserve(reservation(dataset="synthetic-notes"))
    ledger.bind(entry.id, PrivacySeed.fixed(1), b"manifest")
    assert ledger.settle(entry.id, b"released").known_seed


def test_a_private_release_cannot_be_settled_without_a_seed(ledger):
    entry = ledger.reserve(reservation())
    with pytest.raises(BadInput, match=r"Ledger\.seed"):
        ledger.settle(entry.id)
    with pytest.raises(BadInput, match="no such entry"):
        ledger.settle("unknown")
    with pytest.raises(BadInput, match="no such entry"):
        ledger.entry("unknown")


def test_only_a_release_with_a_guarantee_has_a_digest(ledger, seeds):
    entry = ledger.reserve(reservation())
    ledger.seed(entry, seeds, b"manifest")
    with pytest.raises(BadInput, match="has a digest"):
        ledger.settle(entry.id)
    assert ledger.entry(entry.id).state is State.RESERVED
    free = ledger.reserve(reservation("free", Unaccounted("no privacy"), delta=0.0))
    with pytest.raises(BadInput, match="has a digest"):
        ledger.settle(free.id, b"digest")
    assert ledger.settle(free.id).released_hash == ""
    assert ledger.settle(free.id).state is State.SETTLED


def test_releases_that_the_ledger_holds_are_not_charged_again(ledger):
    def run(**more: str) -> list[Entry]:
        return [reservation("v", HISTOGRAM, **more), reservation("t", GAUSSIAN, **more)]

    first = ledger.cost_of_plan(run())
    assert (first.new_releases, first.share > 0) == (2, True)
    vocabulary = ledger.reserve(run()[0])
    before = spent(ledger)
    again = run(plan_key="run-2")
    entries = ledger.register_plan([*again, reservation("t", GAUSSIAN, plan_key="run-2")])
    assert entries[0] == vocabulary and entries[1] == entries[2]
    assert spent(ledger) == pytest.approx(before + 4 / 8)
    cost = ledger.cost_of_plan(run())
    assert (cost.new_releases, cost.share, cost.fits) == (0, 0.0, True)
    assert cost.charge is not None  # None without a limit
    assert cost.left_after == pytest.approx(1 - ledger.remaining("notes").share)
    assert cost.left_after == pytest.approx(first.left_after)
    assert cost.more_of_the_same is None
    ledger.reserve(run()[1])
    assert ledger.cost_of_plan([*run(), reservation("new", GAUSSIAN)]).new_releases == 1
    with pytest.raises(BadInput, match="plan_key"):
        ledger.register_plan([reservation()])


def test_a_better_accountant_lowers_the_past_and_the_events_stay(ledger, monkeypatch):
    ledger.reserve(reservation("a", GAUSSIAN))
    before, events = spent(ledger), [e.event for e in ledger.history("notes")]
    curve = type(GAUSSIAN).rdp
    privacy_filter.charge.cache_clear()
    monkeypatch.setattr(type(GAUSSIAN), "rdp", lambda *a: (c := curve(*a)) is not None and c * 0.9)
    assert spent(ledger) == pytest.approx(0.9 * before)
    assert [e.event for e in ledger.history("notes")] == events
    privacy_filter.charge.cache_clear()


def test_an_entry_that_cannot_be_read_stops_everything(ledger, url):
    ledger.reserve(reservation("a", GAUSSIAN))
    with create_engine(url, poolclass=NullPool).begin() as db:
        db.execute(text("""UPDATE entries SET event = '{"kind": "future", "version": 9}'"""))
    for attempt in (
        lambda: ledger.remaining("notes"),
        lambda: ledger.reserve(reservation("b", GAUSSIAN)),
    ):
        with pytest.raises(BadInput, match="unknown event kind"):
            attempt()


WIKI, WARD, FOLDER = "1a" * 32, "2b" * 32, "3c" * 32


def test_declaration_is_valid_until_it_is_withdrawn(ledger):
    assert ledger.sources.declaration(WIKI) is None
    declared = ledger.sources.declare_public(WIKI, "wiki")
    assert declared.holds and declared == ledger.sources.declaration(WIKI)
    ledger.sources.declare_public(WIKI, "x" * 300)  # again, with another label
    assert [(s.digest, s.label) for s in ledger.sources.public()] == [(WIKI, "x" * 200)]
    for mark in (WIKI[:7], "", WARD):
        with pytest.raises(BadInput, match="no declarations begin with"):
            ledger.sources.withdraw_public(mark)
    ledger.sources.declare_public(WIKI[:-1] + "0", "another")
    with pytest.raises(BadInput, match="2 declarations begin with"):
        ledger.sources.withdraw_public(WIKI[:10])
    assert ledger.sources.withdraw_public(WIKI).digest == WIKI
    assert ledger.sources.withdraw_public(WIKI[:8]).label == "another"
    assert ledger.sources.public() == []


def test_private_source_becomes_public_only_by_confirmation(ledger):
    ledger.sources.declare_public(WIKI, "wiki")
    assert ledger.sources.read_as_private(WARD, "notes") == ()
    assert ledger.sources.read_as_private(WARD, "notes") == ()  # a retry
    for digest, contents in ((WARD, []), (FOLDER, [WIKI, WARD])):
        with pytest.raises(BadInput, match=r"private text of notes.*--known-private"):
            ledger.sources.declare_public(digest, "ward", contents=contents)
    assert [s.digest for s in ledger.sources.public()] == [WIKI]
    assert ledger.sources.declare_public(WARD, "ward", known_private=True).holds
    # The source is declared public first and read as private afterwards.
    ledger.sources.read_as_private(WIKI, "notes")
    declared = ledger.sources.declaration(WIKI)
    assert declared is not None and not declared.holds and declared.private_in == ("notes",)
    with pytest.raises(BadInput, match="confide ledger register"):
        ledger.sources.read_as_private(FOLDER, "unregistered")


@pytest.mark.parametrize("name", ["Notes", "NOTES", "ｎｏｔｅｓ", "note\u017f", "\u1d3aotes"])
def test_a_name_that_is_spelt_nearly_alike_is_refused(ledger, name):
    with pytest.raises(BadInput, match="registered data set notes by its spelling alone"):
        ledger.register_dataset(name, PrivacyUnit.PATIENT, 8.0, 1e-5)
    with pytest.raises(BadInput, match="by its spelling alone"):
        ledger.register_dataset(name, PrivacyUnit.PATIENT, 8.0, 1e-5, shares_budget_with="notes")
    with pytest.raises(BadInput, match="by its spelling alone"):
        ledger.register_made_up(name)
    ledger.register_dataset("notes-2", PrivacyUnit.PATIENT, 8.0, 1e-5)
    assert list(ledger.datasets()) == ["notes", "notes-2"]


def test_sqlite_forgets_no_commit(tmp_path):
    opened = Ledger.open(f"sqlite:///{tmp_path / 'ledger.db'}")
    with opened._database.transaction() as db:
        assert db.scalar(text("PRAGMA synchronous")) == 2  # FULL
        assert db.scalar(text("PRAGMA journal_mode")) == "wal"
        assert db.scalar(text("PRAGMA foreign_keys")) == 1
