"""Backup and restore of the ledger: the restored ledger has every entry."""

import shutil
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner

from dp_core.errors import BadInput, ConfideError
from dp_core.privacy.ledger import Entry, Ledger
from dp_core.privacy.mechanisms import PrivacyUnit, Unaccounted
from dp_core.privacy.seed_store import SeedStore
from tasks.commands.local_stack import backup, copied
from tasks.context import content_key
from tasks.runtime.deployment import Deployment


def reserve(ledger: Ledger, name: str):
    return ledger.reserve(
        Entry(
            dataset="notes",
            unit=PrivacyUnit.PATIENT,
            event=Unaccounted("made up", unit=PrivacyUnit.PATIENT),
            delta=0.0,
            spec_hash=name,
            plan_key=name,
            run=name,
        )
    )


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    """A deployment with one settled and one reserved release."""
    deployment = Deployment.from_environment({"CONFIDE_HOME": str(tmp_path / "home")})
    deployment.prepare()
    ledger = Ledger.open(deployment.ledger)
    ledger.register_made_up("notes")
    entry = reserve(ledger, "first")
    ledger.seed(entry, SeedStore(deployment.seeds), b"{}")
    content_key(deployment, "content-digest")
    ledger.settle(entry.id)
    reserve(ledger, "begun")
    with sqlite3.connect(deployment.home / "mlflow.db") as mlflow:
        mlflow.execute("CREATE TABLE runs (id TEXT)")
    return deployment


def test_restored_ledger_has_every_entry(deployment: Deployment, tmp_path: Path) -> None:
    before = Ledger.open(deployment.ledger).history("notes")
    kept = copied(deployment, tmp_path / "backup")
    assert set(kept) == {"ledger", "seeds", "keys", "mlflow"}
    digests = content_key(deployment, "content-digest")

    # Lose the home folder, then restore it with the commands of docs/operate.md.
    shutil.rmtree(deployment.home)
    deployment.prepare()
    shutil.copy(tmp_path / "backup" / "ledger.db", deployment.home / "ledger.db")
    shutil.copytree(tmp_path / "backup" / "seeds", deployment.seeds)
    shutil.copytree(tmp_path / "backup" / "keys", deployment.keys)
    assert content_key(deployment, "content-digest") == digests  # unfinished work can continue

    restored = Ledger.open(deployment.ledger)
    assert restored.history("notes") == before
    # Reserving a settled release again returns its entry, without a charge and with the same seed.
    again = reserve(restored, "first")
    assert again.id == before[0].id
    seed = SeedStore(deployment.seeds).get(again.seed_key)
    assert seed.salted_hash() == again.seed_hash
    assert len(restored.history("notes")) == len(before)


def test_ledger_in_use_is_copied_consistently(deployment: Deployment, tmp_path: Path) -> None:
    ledger = Ledger.open(deployment.ledger)
    with sqlite3.connect(deployment.home / "ledger.db") as busy:
        busy.execute("BEGIN IMMEDIATE")
        busy.execute("UPDATE entries SET run = 'half-way'")
        copied(deployment, tmp_path / "backup")
        busy.rollback()
    copy = Ledger.open(f"sqlite:///{tmp_path}/backup/ledger.db")
    assert copy.history("notes") == ledger.history("notes")


def test_backup_is_readable_by_its_owner_only(deployment: Deployment, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CONFIDE_HOME", str(deployment.home))
    for name in ("CONFIDE_LEDGER", "CONFIDE_SEEDS", "CONFIDE_TRACKING"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(backup, [str(tmp_path / "backup")])
    assert done.exit_code == 0, done.output
    for file in (tmp_path / "backup", *(tmp_path / "backup").rglob("*")):
        assert file.stat().st_mode & 0o077 == 0, file.name
    with pytest.raises(BadInput, match="already"):
        CliRunner().invoke(backup, [str(tmp_path / "backup")], catch_exceptions=False)


def test_backup_of_a_damaged_database_is_refused(deployment: Deployment, tmp_path: Path) -> None:
    (deployment.home / "mlflow.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(ConfideError, match="not complete"):
        copied(deployment, tmp_path / "backup")
