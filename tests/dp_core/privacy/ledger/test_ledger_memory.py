"""Drawn seeds refuse a ledger that was deleted, emptied, replaced or rolled back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from ledger_examples import GAUSSIAN, reservation
from sqlalchemy import create_engine, text

from dp_core.errors import BadInput
from dp_core.privacy.ledger import Entry, Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import SeedStore


@pytest.fixture
def seeds(tmp_path: Path) -> SeedStore:
    return SeedStore(tmp_path / "seeds")


def release(ledger: Ledger, seeds: SeedStore, spec_hash: str = "one") -> Entry:
    entry = ledger.reserve(reservation(spec_hash, GAUSSIAN))
    seed = ledger.seed(entry, seeds, b"manifest")
    return ledger.settle(entry.id, seed.derive("released", b"what came out"))


def refused(ledger: Ledger, seeds: SeedStore, words: str) -> None:
    """Assert that both opening a deployment's ledger and drawing noise are refused."""
    with pytest.raises(BadInput, match=words) as caught:
        ledger.confirm_memory(seeds)
    assert "Restore ledger and seeds from one backup" in str(caught.value)
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5)
    entry = ledger.reserve(reservation("again", GAUSSIAN))
    before = seeds.drawn()
    with pytest.raises(BadInput, match=words):
        ledger.seed(entry, seeds, b"manifest")
    assert seeds.drawn() == before


def empty(url: str, *tables: str) -> None:
    with create_engine(url).begin() as db:
        for table in tables:
            db.execute(text(f"DELETE FROM {table}"))  # noqa: S608 - names of this file


def test_another_ledger_is_refused(
    ledger: Ledger, url: str, seeds: SeedStore, tmp_path: Path
) -> None:
    release(ledger, seeds)
    refused(Ledger.open(f"sqlite:///{tmp_path}/other.db"), seeds, "drawn under another ledger")
    assert ledger.confirm_memory(seeds) == ledger.identity()


def test_an_emptied_ledger_is_refused(ledger: Ledger, url: str, seeds: SeedStore) -> None:
    release(ledger, seeds)
    release(ledger, seeds, "two")
    empty(url, "entries", "datasets", "budgets")
    refused(Ledger.open(url), seeds, "drawn for 2 releases that it does not hold")


def test_one_deleted_entry_is_missed(ledger: Ledger, url: str, seeds: SeedStore) -> None:
    release(ledger, seeds)
    release(ledger, seeds, "two")
    with create_engine(url).begin() as db:
        db.execute(text("DELETE FROM entries WHERE spec_hash = 'two'"))
    with pytest.raises(BadInput, match="drawn for 1 releases"):
        Ledger.open(url).confirm_memory(seeds)


def test_an_older_copy_is_refused_and_the_backup_of_both_is_not(
    tmp_path: Path, seeds: SeedStore
) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    ledger = Ledger.open(url)
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5)
    release(ledger, seeds)
    create_engine(url).raw_connection().execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(tmp_path / "ledger.db", tmp_path / "older.db")
    shutil.copytree(tmp_path / "seeds", tmp_path / "older")
    release(ledger, seeds, "two")
    restored = Ledger.open(f"sqlite:///{tmp_path}/older.db")
    assert restored.confirm_memory(SeedStore(tmp_path / "older")) == ledger.identity()
    with pytest.raises(BadInput, match="drawn for 1 releases"):
        restored.confirm_memory(seeds)


def test_a_ledger_that_reserved_and_drew_nothing_yet_is_not_missed(
    ledger: Ledger, seeds: SeedStore, tmp_path: Path
) -> None:
    ledger.reserve(reservation())
    seeds.create("content-digests")  # belongs to the deployment, not to a release
    Ledger.open(f"sqlite:///{tmp_path}/new.db").confirm_memory(seeds)
    ledger.confirm_memory(seeds)


def test_the_ledger_is_remembered_before_the_first_seed_is_drawn(
    ledger: Ledger, seeds: SeedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = ledger.reserve(reservation())

    def killed(key: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(seeds, "create", killed)
    with pytest.raises(KeyboardInterrupt):
        ledger.seed(entry, seeds, b"manifest")
    assert seeds.remembered_ledger() == ledger.identity()
