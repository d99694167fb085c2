"""32 processes on one data set never overspend by one entry."""

from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from multiprocessing.queues import Queue

import pytest
from ledger_examples import (
    GAUSSIAN,
    Gate,
    open_and_register,
    reservation,
    reserve_in_a_process,
    reserve_without_lock,
)

from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit

PROCESSES = 32
PATIENCE = 300.0  # seconds, on a machine with other things to do


Work = Callable[[str, str, Gate], str]


def answer(work: Work, url: str, spec_hash: str, gate: Gate, answers: "Queue[str]") -> None:
    """Run in the process: send back what `work` returns, or how it failed."""
    try:
        answers.put(work(url, spec_hash, gate))
    except Exception as error:
        answers.put(f"failed: {error!r}")
        raise


AtOnce = Callable[[Work, str, list[str]], list[str]]


@pytest.fixture
def at_once(other_processes: ForkServerContext) -> AtOnce:
    """Run one process per spec hash, all at the same time, and return what each returned."""
    return lambda work, url, spec_hashes: run_at_once(other_processes, work, url, spec_hashes)


def run_at_once(
    context: ForkServerContext, work: Work, url: str, spec_hashes: list[str]
) -> list[str]:
    gate, answers = context.Barrier(len(spec_hashes)), context.Queue()
    processes = [
        context.Process(target=answer, args=(work, url, spec_hash, gate, answers))
        for spec_hash in spec_hashes
    ]
    for process in processes:
        process.start()
    returned = [answers.get(timeout=PATIENCE) for _ in processes]
    for process in processes:
        process.join(PATIENCE)
    assert [p.exitcode for p in processes] == [0] * len(processes), returned
    return returned


def test_processes_that_race_for_the_last_entry_never_overspend(
    ledger: Ledger, url: str, at_once: AtOnce
) -> None:
    room = ledger.cost_of_next("notes", [(GAUSSIAN, 1e-6)]).more_of_the_same
    assert room is not None
    assert 4 < room < PROCESSES
    ids = at_once(reserve_in_a_process, url, [f"spec-{n}" for n in range(PROCESSES)])
    admitted = [i for i in ids if i]
    remaining = ledger.remaining("notes")
    assert len(admitted) == len(set(admitted)) == room == remaining.charged_entries
    assert remaining.capacity is not None
    assert remaining.spent is not None
    assert remaining.spent.rho <= remaining.capacity.rho
    assert remaining.spent.delta <= remaining.capacity.delta


def test_processes_that_reserve_the_same_release_share_one_entry(
    ledger: Ledger, url: str, at_once: AtOnce
) -> None:
    ids = at_once(reserve_in_a_process, url, ["same"] * PROCESSES)
    assert len(set(ids)) == 1
    assert ledger.remaining("notes").charged_entries == 1


def test_processes_that_all_find_no_ledger_make_one(url: str, at_once: AtOnce) -> None:
    ids = at_once(open_and_register, url, [f"spec-{n % 4}" for n in range(PROCESSES)])
    ledger = Ledger.open(url)
    assert sorted(set(ids)) == sorted(e.id for e in ledger.history("notes"))
    assert len(set(ids)) == 4
    assert ledger.datasets()["notes"].unit is PrivacyUnit.PATIENT


@pytest.mark.postgres
def test_without_the_row_lock_they_would_overspend(postgres_url: str, at_once: AtOnce) -> None:
    """The race of the first test is real: the same processes, less one lock, overspend."""
    ledger = Ledger.open(postgres_url)
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5)
    room = ledger.cost_of_next("notes", [(GAUSSIAN, 1e-6)]).more_of_the_same
    for number in range((room or 0) - 1):
        ledger.reserve(reservation(f"held-{number}", GAUSSIAN))
    at_once(reserve_without_lock, postgres_url, [f"spec-{n}" for n in range(PROCESSES)])
    remaining = ledger.remaining("notes")
    assert remaining.capacity is not None
    assert remaining.spent is not None
    assert remaining.spent.rho > remaining.capacity.rho
