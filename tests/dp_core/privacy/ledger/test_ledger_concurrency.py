from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest
from ledger_examples import (
    GAUSSIAN,
    KILL_POINTS,
    release_in_a_process,
    release_once,
    reservation,
    reserve_in_a_process,
    reserve_without_lock,
)
from processes import PATIENCE, run_at_once, run_until_killed
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from dp_core.privacy.ledger import Budget, Ledger, State
from dp_core.privacy.ledger.ledger import lock_budget
from dp_core.privacy.ledger.privacy_filter import PrivacyCharge
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import SeedStore

PROCESSES = 32

AtOnce = Callable[[Callable[..., str], str, list[str]], list[str]]


@pytest.fixture
def at_once(other_processes: ForkServerContext) -> AtOnce:
    return lambda work, url, spec_hashes: run_at_once(
        other_processes, work, [(url, spec_hash) for spec_hash in spec_hashes]
    )


def test_processes_that_race_for_the_last_entry_never_overspend(ledger, url, at_once):
    room = ledger.cost_of_plan([reservation("next", GAUSSIAN)]).more_of_the_same
    assert 4 < room < PROCESSES
    ids = at_once(reserve_in_a_process, url, [f"spec-{n}" for n in range(PROCESSES)])
    admitted = [i for i in ids if i]
    remaining = ledger.remaining("notes")
    assert len(admitted) == len(set(admitted)) == room == remaining.charged_entries
    assert remaining.spent.rho <= remaining.capacity.rho
    assert remaining.spent.delta <= remaining.capacity.delta


def test_processes_without_a_ledger_create_one_and_share_equal_releases(url, at_once):
    ids = at_once(reserve_in_a_process, url, [f"spec-{n % 4}" for n in range(PROCESSES)])
    ledger = Ledger.open(url)
    assert sorted(set(ids)) == sorted(e.id for e in ledger.history("notes"))
    assert len(set(ids)) == 4
    assert ledger.datasets()["notes"].unit is PrivacyUnit.PATIENT


@pytest.mark.postgres
def test_without_the_row_lock_they_would_overspend(postgres_url, at_once):
    """Without the row lock, the processes of the first test overspend, so its race is real."""
    ledger = Ledger.open(postgres_url)
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5)
    at_once(reserve_without_lock, postgres_url, [f"spec-{n}" for n in range(PROCESSES)])
    remaining = ledger.remaining("notes")
    assert remaining.spent.rho > remaining.capacity.rho


@pytest.mark.postgres
def test_budget_is_read_again_under_its_lock(postgres_url, monkeypatch):
    """Another process may close the budget for its plan before this one has the lock."""
    ledger = Ledger.open(postgres_url)
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5)
    read = Budget.of_dataset

    def raced(db: Session, name: str) -> Budget:
        budget = read(db, name)
        with create_engine(postgres_url, poolclass=NullPool).begin() as other:
            other.execute(text("UPDATE budgets SET closed_for = 'plan of another run'"))
        return budget

    monkeypatch.setattr(Budget, "of_dataset", raced)
    with ledger._database.transaction() as db:
        assert lock_budget(db, "notes").closed_for == "plan of another run"


def test_of_two_results_under_one_seed_exactly_one_is_accepted(
    ledger, url, tmp_path, other_processes
):
    contents = [b"weights", b"weights, rounded otherwise"]
    arguments: list[tuple[Any, ...]] = [(url, tmp_path / "seeds", c) for c in contents]
    answers = run_at_once(other_processes, release_once, arguments)
    assert len({seed for seed, _ in answers}) == 1  # all drew the same noise
    accepted = [said for _, said in answers if said in contents]
    (refused,) = [said for _, said in answers if said not in contents]
    assert len(accepted) == 1
    assert "its output differs" in refused
    (entry,) = ledger.history("notes")
    seed = SeedStore(tmp_path / "seeds").get(entry.seed_key)
    assert entry.state is State.SETTLED
    assert entry.released_hash == seed.derive("released", accepted[0]).hex()


@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_kill_never_loses_a_charge_nor_redraws_noise_nor_splits_a_plan(
    ledger, url, tmp_path, point, other_processes
):
    run_until_killed(other_processes, release_in_a_process, url, tmp_path, point)
    entries = ledger.history("notes")
    assert [entry.state for entry in entries] == KILL_POINTS[point]
    remaining, released = ledger.remaining("notes"), tmp_path / "released"
    assert (remaining.spent == PrivacyCharge(0.0, 0.0)) == (remaining.charged_entries == 0)
    order = list(KILL_POINTS)
    assert released.exists() == (order.index(point) >= order.index("after the release"))
    # Each seed has one file, without a second copy under another name.
    seeds = {file.name for file in (tmp_path / "seeds").glob("*")}
    assert seeds <= {"ledger", *(f"{entry.seed_key}.json" for entry in entries)}
    # The retry finishes with one entry for each release, and the noise of the first attempt.
    before = len(released.read_text().splitlines()) if released.exists() else 0
    retry = other_processes.Process(target=release_in_a_process, args=(url, tmp_path, "never"))
    retry.start()
    retry.join(PATIENCE)
    assert retry.exitcode == 0
    first, _ = ledger.history("notes")
    assert first.state is State.SETTLED
    assert {entry.id for entry in entries} <= {entry.id for entry in ledger.history("notes")}
    noises = released.read_text().splitlines()
    assert len(noises) == before + 1 and len(set(noises)) == 1
