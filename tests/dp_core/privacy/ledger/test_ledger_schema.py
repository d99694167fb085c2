"""The ledger has one schema, and ledgers of other versions are refused."""

import re
from pathlib import Path

import pytest
from ledger_examples import GAUSSIAN, reservation
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import DBAPIError

from dp_core.errors import BadInput
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.ledger.models import SCHEMA_VERSION, Base
from dp_core.privacy.mechanisms import PrivacyUnit


def test_tables_of_other_programs_are_not_changed(url: str) -> None:
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir()
    with create_engine(url).begin() as db:
        db.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
        db.execute(text("INSERT INTO alembic_version VALUES ('of another program')"))
    Ledger.open(url).register_dataset("notes", PrivacyUnit.PATIENT, 1.0, 1e-6)
    with create_engine(url).connect() as db:
        kept = db.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
    assert kept == "of another program"


def test_second_opening_changes_nothing(url: str) -> None:
    Ledger.open(url).register_dataset("notes", PrivacyUnit.PATIENT, 1.0, 1e-6)
    again = Ledger.open(url)
    assert list(again.datasets()) == ["notes"]
    with create_engine(url).connect() as db:
        assert db.execute(text("SELECT version FROM ledger_schema")).all() == [(SCHEMA_VERSION,)]


@pytest.mark.parametrize(
    ("version", "release"), [(SCHEMA_VERSION - 1, "older"), (SCHEMA_VERSION + 1, "newer")]
)
def test_ledger_of_another_version_is_refused_in_one_line_and_stays_unchanged(
    ledger: Ledger, url: str, version: int, release: str
) -> None:
    """The pattern for the test of a migration, once an older version can be upgraded."""
    ledger.reserve(reservation("held", GAUSSIAN))
    with create_engine(url).begin() as db:
        db.execute(text("UPDATE ledger_schema SET version = :v"), {"v": version})
        db.execute(text("ALTER TABLE entries DROP COLUMN declared_units"))
        before = db.execute(text("SELECT * FROM entries")).all()
    with pytest.raises(BadInput) as caught:
        Ledger.open(url)
    assert re.search(rf"version {version}.*reads.*the {release} release", str(caught.value))
    assert "\n" not in str(caught.value)
    with create_engine(url).connect() as db:
        assert db.execute(text("SELECT * FROM entries")).all() == before


def test_ledger_refuses_a_second_entry_of_one_release(url: str) -> None:
    Ledger.open(url)
    tables = inspect(create_engine(url))
    assert set(tables.get_table_names()) == set(Base.metadata.tables)
    unique = tables.get_unique_constraints("entries")
    assert ["dataset", "spec_hash", "attempt"] in [u["column_names"] for u in unique]


@pytest.mark.postgres
def test_reader_without_write_permission_can_query(postgres_url: str) -> None:
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
