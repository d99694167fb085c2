"""Errors name a damaged file or a full disk as the cause, and no charge is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger_examples import GAUSSIAN, reservation
from sqlalchemy import create_engine, event, text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError

from dp_core.errors import BadInput, without_password
from dp_core.privacy.ledger import Ledger, LedgerDamaged, LedgerUnavailable, database
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import SeedStore


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A ledger of many entries in one file, without a write-ahead log."""
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.db")
    ledger.register_made_up("notes")
    for number in range(40):
        ledger.reserve(reservation(f"{number}", GAUSSIAN))
    with create_engine(f"sqlite:///{tmp_path}/ledger.db").connect() as db:
        db.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    return tmp_path / "ledger.db"


def overwritten(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    file.write_bytes(content)


DAMAGES = {
    "no database": lambda file: file.write_bytes(b"not a database at all" * 1000),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:10_000]),
    "overwritten": overwritten,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_with_what_to_do(file: Path, damage: str) -> None:
    DAMAGES[damage](file)
    with pytest.raises(LedgerDamaged, match="it is damaged, or no ledger") as caught:
        Ledger.open(f"sqlite:///{file}").history("notes")
    assert caught.value.exit_code == 2
    assert "Restore ledger and seeds from one backup" in str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        "DROP TABLE entries",
        "DROP TABLE ledger_schema",
        "DELETE FROM ledger_schema",
        "DELETE FROM ledger_identity",
        "UPDATE entries SET event = 'x'",
        "UPDATE entries SET state = 'x'",
    ],
)
def test_missing_or_unreadable_rows_are_reported_as_damage(
    ledger: Ledger, url: str, command: str, tmp_path: Path
) -> None:
    ledger.reserve(reservation())
    with create_engine(url).begin() as db:
        db.execute(text(command))
    with pytest.raises(LedgerDamaged, match="Restore ledger and seeds"):
        opened = Ledger.open(url)
        opened.confirm_memory(SeedStore(tmp_path))
        opened.history("notes")


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Prevent every SQLite file from growing."""

    @event.listens_for(Engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA max_page_count = 1")  # SQLite raises this to the current size

    yield
    event.remove(Engine, "connect", connected)


def test_a_full_disk_is_called_one_and_nothing_is_lost(file: Path, full_disk: None) -> None:
    ledger = Ledger.open(f"sqlite:///{file}")
    before = len(ledger.history("notes"))
    with pytest.raises(LedgerUnavailable, match="the disk is full"):
        for number in range(1000):
            ledger.reserve(reservation(f"more-{number}", GAUSSIAN))
            before += 1
    assert len(ledger.history("notes")) == before


def test_a_server_with_a_full_disk_says_so() -> None:
    class Full(Exception):
        pgcode = "53100"

    error = OperationalError("INSERT", {}, Full())
    assert "the disk is full" in str(database.as_named(error, "postgresql://host/ledger"))


def test_a_whole_ledger_has_no_fault(ledger: Ledger, tmp_path: Path) -> None:
    seeds = SeedStore(tmp_path / "seeds")
    for name in ("a", "b", "c"):
        ledger.seed(ledger.reserve(reservation(name, GAUSSIAN)), seeds, b"manifest")
    assert ledger.faults(seeds) == []


def test_every_fault_is_reported(ledger: Ledger, url: str, tmp_path: Path) -> None:
    seeds = SeedStore(tmp_path / "seeds")
    entries = [ledger.reserve(reservation(name, GAUSSIAN)) for name in "abcd"]
    for entry in entries:
        ledger.seed(entry, seeds, b"manifest")
    exchanged, torn, unread, _ = entries
    folder = tmp_path / "seeds"
    other = folder / f"{unread.seed_key}.json"
    (folder / f"{exchanged.seed_key}.json").write_text(other.read_text())
    (folder / f"{torn.seed_key}.json").write_text("{")
    with create_engine(url).begin() as db:
        db.execute(text("UPDATE entries SET event = '{' WHERE spec_hash = 'c'"))
        if url.startswith("sqlite"):
            db.execute(text("UPDATE entries SET number = 9 WHERE spec_hash = 'd'"))
    found = "\n".join(ledger.faults(seeds))
    assert f"the seed of entry {exchanged.id} is not the one that it was bound to" in found
    assert f"the seed of entry {torn.id}" in found
    assert f"ledger entry {unread.id}: it cannot be read" in found
    assert ("5 entries are gone" in found) == url.startswith("sqlite")


# --- URLs


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg2"])
def test_a_postgresql_url_takes_the_driver_that_is_installed(scheme: str) -> None:
    with pytest.raises(LedgerUnavailable, match="does not answer"):
        Ledger.open(f"{scheme}://somebody@127.0.0.1:1/ledger")


@pytest.mark.postgres
def test_a_plain_postgresql_url_opens_a_ledger(postgres_url: str) -> None:
    plain = postgres_url.replace("postgresql+psycopg2://", "postgresql://")
    Ledger.open(plain).register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5)
    assert list(Ledger.open(postgres_url).datasets()) == ["notes"]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://127.0.0.1:1/ledger?user=somebody&password=hunter2",
        "postgresql://somebody:hunter2@127.0.0.1:1/ledger?password=hunter2",
        "postgresql://127.0.0.1:1/ledger?password=a@hunter2",
        "postgresql://somebody:a?hunter2@127.0.0.1:1/ledger",
        "postgresql+nothing://somebody:hunter2@127.0.0.1:1/ledger",
        "postgresql://somebody:hunter2@127.0.0.1:port/ledger",
        "mysql://somebody:hunter2@127.0.0.1:1/ledger",
    ],
)
def test_no_password_of_a_url_is_shown(url: str) -> None:
    with pytest.raises((BadInput, LedgerUnavailable)) as caught:
        Ledger.open(url)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in without_password(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:p@host:5432/ledger?sslmode=require", "postgresql://host:5432/ledger"),
        ("sqlite:////srv/confide/ledger.db", "sqlite:////srv/confide/ledger.db"),
        ("https://mlflow.example.org", "https://mlflow.example.org"),
        ("http://u:12?3@host", "http://…"),
        ("", ""),
    ],
)
def test_shown_url_has_no_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    "url", ["sqlite:///ledger.db", "sqlite:///./ledger.db", "sqlite:///file::memory:?uri=true"]
)
def test_a_relative_place_is_no_ledger(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"relative place.*four slashes"):
        database.Database(url)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_new_ledger_is_its_owners_alone(tmp_path: Path) -> None:
    Ledger.open(f"sqlite:///{tmp_path}/new/ledger.db")
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0
