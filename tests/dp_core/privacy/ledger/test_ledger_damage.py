import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger_examples import GAUSSIAN, reservation
from sqlalchemy import create_engine, event, inspect, text
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import NullPool

from dp_core.errors import BadInput, without_password
from dp_core.privacy.ledger import Entry, Ledger, LedgerDamaged, LedgerUnavailable, database
from dp_core.privacy.ledger.models import SCHEMA_VERSION, Base
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import SeedStore


@pytest.fixture
def file(tmp_path: Path) -> Path:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.db")
    ledger.register_made_up("notes")
    for number in range(40):
        ledger.reserve(reservation(f"{number}", GAUSSIAN))
    with create_engine(f"sqlite:///{tmp_path}/ledger.db", poolclass=NullPool).connect() as db:
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
def test_damage_is_named_with_what_to_do(file, damage):
    DAMAGES[damage](file)
    with pytest.raises(LedgerDamaged, match="it is damaged, or no ledger") as caught:
        Ledger.open(f"sqlite:///{file}").history("notes")
    assert caught.value.exit_code == 2
    assert "Restore ledger and seeds from one backup" in str(caught.value)


@pytest.mark.cases
def test_missing_or_unreadable_rows_are_reported_as_damage(ledger, url, command, tmp_path):
    ledger.reserve(reservation())
    with create_engine(url, poolclass=NullPool).begin() as db:
        db.execute(text(command))
    with pytest.raises(LedgerDamaged, match="Restore ledger and seeds"):
        opened = Ledger.open(url)
        opened.confirm_memory(SeedStore(tmp_path))
        opened.history("notes")


@pytest.fixture
def full_disk() -> Iterator[None]:
    @event.listens_for(Engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA max_page_count = 1")  # SQLite raises this to the current size

    yield
    event.remove(Engine, "connect", connected)


def test_a_full_disk_is_called_one_and_nothing_is_lost(file, full_disk):
    ledger = Ledger.open(f"sqlite:///{file}")
    before = len(ledger.history("notes"))
    with pytest.raises(LedgerUnavailable, match="the disk is full"):
        for number in range(1000):
            ledger.reserve(reservation(f"more-{number}", GAUSSIAN))
            before += 1
    assert len(ledger.history("notes")) == before


def test_a_server_with_a_full_disk_says_so():
    full = type("Full", (Exception,), {"pgcode": "53100"})()
    error = database.as_named(OperationalError("INSERT", {}, full), "postgresql://host/ledger")
    assert "the disk is full" in str(error)


def test_every_fault_is_reported(ledger, url, seeds, tmp_path):
    entries = [ledger.reserve(reservation(name, GAUSSIAN)) for name in "abcd"]
    for entry in entries:
        ledger.seed(entry, seeds, b"manifest")
    assert ledger.faults(seeds) == []
    exchanged, torn, unread, _ = entries
    folder = tmp_path / "seeds"
    other = folder / f"{unread.seed_key}.json"
    (folder / f"{exchanged.seed_key}.json").write_text(other.read_text())
    (folder / f"{torn.seed_key}.json").write_text("{")
    with create_engine(url, poolclass=NullPool).begin() as db:
        db.execute(text("UPDATE entries SET event = '{' WHERE spec_hash = 'c'"))
        if url.startswith("sqlite"):
            db.execute(text("UPDATE entries SET number = 9 WHERE spec_hash = 'd'"))
    faults = "\n".join(ledger.faults(seeds))
    assert f"the seed of entry {exchanged.id} is not the one that it was bound to" in faults
    assert f"the seed of entry {torn.id}" in faults
    assert f"ledger entry {unread.id}: it cannot be read" in faults
    assert ("5 entries are gone" in faults) == url.startswith("sqlite")


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg2"])
def test_a_postgresql_url_takes_the_driver_that_is_installed(scheme):
    with pytest.raises(LedgerUnavailable, match="does not answer") as caught:
        Ledger.open(f"{scheme}://user:hunter2@127.0.0.1:1/ledger")
    assert caught.value.exit_code == 1
    assert "hunter2" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.postgres
def test_a_plain_postgresql_url_opens_a_ledger(postgres_url):
    plain = postgres_url.replace("postgresql+psycopg2://", "postgresql://")
    Ledger.open(plain).register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5)
    assert list(Ledger.open(postgres_url).datasets()) == ["notes"]


URLS = json.loads((Path(__file__).parent / "urls.json").read_text())


@pytest.mark.parametrize("url", URLS["refused"])
def test_a_url_without_a_ledger_is_refused_and_its_password_is_not_shown(url):
    with pytest.raises((BadInput, LedgerUnavailable)) as caught:
        Ledger.open(url)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in without_password(url)


@pytest.mark.parametrize(("url", "shown"), URLS["shown"].items())
def test_shown_url_has_no_password(url, shown):
    assert without_password(url) == shown


@pytest.mark.parametrize(
    "url", ["sqlite:///ledger.db", "sqlite:///./ledger.db", "sqlite:///file::memory:?uri=true"]
)
def test_a_relative_place_is_no_ledger(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"relative place.*four slashes"):
        database.Database(url)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_new_ledger_is_its_owners_alone(tmp_path):
    Ledger.open(f"sqlite:///{tmp_path}/new/ledger.db")
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0


def test_tables_of_other_programs_are_not_changed(url):
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir()
    with create_engine(url, poolclass=NullPool).begin() as db:
        db.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
        db.execute(text("INSERT INTO alembic_version VALUES ('of another program')"))
    Ledger.open(url).register_dataset("notes", PrivacyUnit.PATIENT, 1.0, 1e-6)
    with create_engine(url, poolclass=NullPool).connect() as db:
        kept = db.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
    assert kept == "of another program"


@pytest.mark.parametrize(
    ("version", "release"), [(SCHEMA_VERSION - 1, "older"), (SCHEMA_VERSION + 1, "newer")]
)
def test_ledger_of_another_version_is_refused_in_one_line_and_stays_unchanged(
    ledger, url, version, release
):
    ledger.reserve(reservation("held", GAUSSIAN))
    with create_engine(url, poolclass=NullPool).begin() as db:
        db.execute(text("UPDATE ledger_schema SET version = :v"), {"v": version})
        db.execute(text("ALTER TABLE entries DROP COLUMN declared_units"))
        before = db.execute(text("SELECT * FROM entries")).all()
    with pytest.raises(BadInput) as caught:
        Ledger.open(url)
    assert re.search(rf"version {version}.*reads.*the {release} release", str(caught.value))
    assert "\n" not in str(caught.value)
    with create_engine(url, poolclass=NullPool).connect() as db:
        assert db.execute(text("SELECT * FROM entries")).all() == before


def test_ledger_refuses_a_second_entry_of_one_release(url):
    Ledger.open(url)
    tables = inspect(create_engine(url, poolclass=NullPool))
    assert set(tables.get_table_names()) == set(Base.metadata.tables)
    unique = tables.get_unique_constraints("entries")
    assert ["dataset", "spec_hash", "attempt"] in [u["column_names"] for u in unique]


@pytest.mark.postgres
def test_reader_without_write_permission_can_query(postgres_url):
    """Steps that parse files can only read the ledger's tables, so queries must not lock."""
    writer = Ledger.open(postgres_url)
    writer.register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5)
    held = writer.reserve(reservation("held", GAUSSIAN))
    server = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with server.connect() as db:
        name = db.execute(text("SELECT current_database()")).scalar_one()
        db.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = on"))
    reader = Ledger.open(postgres_url)
    assert reader.identity() and list(reader.datasets()) == ["notes"]
    assert reader.entry(held.id) == held and reader.history("notes") == [held]
    assert reader.remaining("notes").charged_entries == 1
    assert reader.cost_of_plan([reservation("next", GAUSSIAN)]).fits
    assert reader.sources.public() == [] and reader.sources.declaration("a") is None
    assert not reader.sources.is_text_of("a", "notes") and not reader.sources.same_files_as("notes")
    with pytest.raises(DBAPIError, match="read-only transaction"):
        reader.reserve(reservation("more", GAUSSIAN))


# --- drawn seeds refuse a ledger that was deleted, emptied, replaced or rolled back


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


def test_another_ledger_is_refused(ledger, url, seeds, tmp_path):
    release(ledger, seeds)
    refused(Ledger.open(f"sqlite:///{tmp_path}/other.db"), seeds, "drawn under another ledger")
    assert ledger.confirm_memory(seeds) == ledger.identity()


@pytest.mark.cases
def test_one_deleted_entry_is_missed(ledger, url, seeds, deleted, lost):
    release(ledger, seeds)
    release(ledger, seeds, "two")
    with create_engine(url, poolclass=NullPool).begin() as db:
        for rows in deleted:
            db.execute(text(f"DELETE FROM {rows}"))  # noqa: S608 - rows of this file
    refused(Ledger.open(url), seeds, f"drawn for {lost} releases that it does not hold")


def test_an_older_copy_is_refused_and_the_backup_of_both_is_not(tmp_path, seeds):
    url = f"sqlite:///{tmp_path}/ledger.db"
    ledger = Ledger.open(url)
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5)
    release(ledger, seeds)
    with create_engine(url, poolclass=NullPool).connect() as db:
        db.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(tmp_path / "ledger.db", tmp_path / "older.db")
    shutil.copytree(tmp_path / "seeds", tmp_path / "older")
    release(ledger, seeds, "two")
    restored = Ledger.open(f"sqlite:///{tmp_path}/older.db")
    assert restored.confirm_memory(SeedStore(tmp_path / "older")) == ledger.identity()
    with pytest.raises(BadInput, match="drawn for 1 releases"):
        restored.confirm_memory(seeds)


def test_a_ledger_that_reserved_and_drew_nothing_yet_is_not_missed(ledger, seeds, tmp_path):
    ledger.reserve(reservation())
    seeds.create("content-digests")  # belongs to the deployment, not to a release
    Ledger.open(f"sqlite:///{tmp_path}/new.db").confirm_memory(seeds)
    ledger.confirm_memory(seeds)


def test_the_ledger_is_remembered_before_the_first_seed_is_drawn(ledger, seeds, monkeypatch):
    entry = ledger.reserve(reservation())

    def killed(key: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(seeds, "create", killed)
    with pytest.raises(KeyboardInterrupt):
        ledger.seed(entry, seeds, b"manifest")
    assert seeds.remembered_ledger() == ledger.identity()
