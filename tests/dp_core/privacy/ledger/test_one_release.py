"""One seed, one charge, one release: of two processes that worked at once, one is accepted."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from ledger_examples import GAUSSIAN, Gate, reservation
from sqlalchemy import text

from dp_core.errors import BadInput
from dp_core.privacy.ledger import Entry, Ledger, State
from dp_core.privacy.mechanisms import Unaccounted
from dp_core.privacy.seed_store import SeedStore

PATIENCE = 300.0


def slow(decide: Callable[..., None]) -> Callable[..., None]:
    """Hold on between decision and record: a decision outside the transaction must show."""

    def decided(*arguments: Any) -> None:
        decide(*arguments)
        time.sleep(0.2)

    return decided


def release_in_a_process(url: str, seeds: Path, content: bytes, gate: Gate, answers: Any) -> None:
    """Reserve, take the seed, wait until everybody has, settle; say what was handed out."""
    Entry.refuse_other_release = slow(Entry.refuse_other_release)
    ledger = Ledger.open(url)
    entry = ledger.reserve(reservation("one", GAUSSIAN))
    seed = ledger.seed(entry, SeedStore(seeds), b"manifest")
    gate.wait()
    try:
        ledger.settle(entry.id, seed.derive("released", content))
        answers.put((seed.salted_hash(), content))
    except BadInput as error:
        answers.put((seed.salted_hash(), str(error)))


def test_of_two_results_under_one_seed_exactly_one_is_accepted(
    ledger: Ledger, url: str, tmp_path: Path, other_processes: ForkServerContext
) -> None:
    contents = [b"weights", b"weights, rounded otherwise"]
    gate, answers = other_processes.Barrier(2), other_processes.Queue()
    processes = [
        other_processes.Process(
            target=release_in_a_process, args=(url, tmp_path / "seeds", content, gate, answers)
        )
        for content in contents
    ]
    for process in processes:
        process.start()
    told = [answers.get(timeout=PATIENCE) for _ in processes]
    for process in processes:
        process.join(PATIENCE)
    assert len({seed for seed, _ in told}) == 1  # one noise
    accepted = [said for _, said in told if said in contents]
    (refused,) = [said for _, said in told if said not in contents]
    assert len(accepted) == 1
    assert "came out otherwise" in refused
    (entry,) = ledger.history("notes")
    seed = SeedStore(tmp_path / "seeds").get(entry.seed_key)
    assert entry.state is State.SETTLED
    assert entry.released_hash == seed.derive("released", accepted[0]).hex()


def test_only_a_release_with_a_guarantee_has_a_digest(ledger: Ledger, tmp_path: Path) -> None:
    seeds = SeedStore(tmp_path / "seeds")
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


def test_what_an_older_version_settled_is_not_made_again(ledger: Ledger, tmp_path: Path) -> None:
    seeds = SeedStore(tmp_path / "seeds")
    entry = ledger.reserve(reservation())
    ledger.seed(entry, seeds, b"manifest")
    ledger.settle(entry.id, b"digest")
    with ledger._database.transaction() as db:
        db.execute(text("UPDATE entries SET released_hash = ''"))
    with pytest.raises(BadInput, match=r"nothing tells any more what came out\. Restore"):
        ledger.seed(entry, seeds, b"manifest")
    with pytest.raises(BadInput, match="nothing tells any more"):
        ledger.settle(entry.id, b"digest")
