"""The ledger's schema is upgraded by revisions, and unknown versions are refused."""

import re
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from ledger_examples import GAUSSIAN, reservation
from sqlalchemy import Connection, create_engine, inspect, text
from sqlalchemy.exc import DBAPIError

from dp_core.errors import BadInput
from dp_core.privacy.ledger import Ledger, migrations
from dp_core.privacy.ledger.migrations import CURRENT, OLDEST, alembic_config
from dp_core.privacy.ledger.models import Base
from dp_core.privacy.mechanisms import PrivacyUnit


def versions(url: str) -> tuple[object, object]:
    """Return the versions in `ledger_schema` and `ledger_alembic_version`."""
    with create_engine(url).connect() as db:
        return (
            db.execute(text("SELECT version FROM ledger_schema")).scalar_one(),
            db.execute(text("SELECT version_num FROM ledger_alembic_version")).scalar_one(),
        )


def test_newest_revision_is_the_current_version(url: str) -> None:
    Ledger.open(url)
    assert versions(url) == (CURRENT, str(CURRENT))
    with create_engine(url).connect() as db:
        scripts = ScriptDirectory.from_config(alembic_config(db))
    assert scripts.get_current_head() == str(CURRENT)


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
        assert db.execute(text("SELECT version FROM ledger_schema")).all() == [(CURRENT,)]


@pytest.mark.parametrize(("version", "release"), [(OLDEST - 1, "older"), (CURRENT + 1, "newer")])
def test_ledger_of_unknown_version_is_refused_in_one_line(
    url: str, version: int, release: str
) -> None:
    Ledger.open(url)
    with create_engine(url).begin() as db:
        db.execute(text("UPDATE ledger_schema SET version = :v"), {"v": version})
    with pytest.raises(BadInput) as caught:
        Ledger.open(url)
    assert re.search(rf"version {version}.*reads.*the {release} release", str(caught.value))
    assert "\n" not in str(caught.value)


def test_revisions_create_the_mapped_tables(url: str) -> None:
    Ledger.open(url)
    found = inspect(create_engine(url))
    versions = {"ledger_schema", "ledger_alembic_version"}
    assert set(found.get_table_names()) == versions | set(Base.metadata.tables)
    for table in Base.metadata.tables.values():
        columns = {c["name"] for c in found.get_columns(table.name)}
        assert columns == {c.name for c in table.columns}
    unique = found.get_unique_constraints("entries")
    assert ["dataset", "spec_hash", "attempt"] in [u["column_names"] for u in unique]


NEXT_REVISION = """
import sqlalchemy as sa
from alembic import op

revision = "5"
down_revision = "4"


def upgrade():
    op.add_column("entries", sa.Column("note", sa.String(20), nullable=False, server_default=""))
    {last}
"""


@pytest.fixture
def next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a revision file for the next version, which the code now reads too."""
    folder = tmp_path / "versions"
    folder.mkdir()

    def with_later_revision(db: Connection) -> Config:
        config = alembic_config(db)
        known = Path(migrations.__file__).parent / "versions"
        config.set_main_option("path_separator", "newline")
        config.set_main_option("version_locations", f"{known}\n{folder}")
        return config

    monkeypatch.setattr(migrations, "CURRENT", 5)
    monkeypatch.setattr(migrations, "alembic_config", with_later_revision)
    return folder / "v5_notes.py"


def test_older_ledger_is_upgraded_with_its_entries(
    ledger: Ledger, url: str, next_version: Path
) -> None:
    entry, spent = ledger.reserve(reservation("held", GAUSSIAN)), ledger.remaining("notes").spent
    next_version.write_text(NEXT_REVISION.format(last="pass"))
    upgraded = Ledger.open(url)
    assert upgraded.remaining("notes").spent == spent
    assert upgraded.history("notes") == [entry]
    assert versions(url) == (5, "5")
    assert "note" in {c["name"] for c in inspect(create_engine(url)).get_columns("entries")}


def test_interrupted_upgrade_leaves_the_old_ledger(
    ledger: Ledger, url: str, next_version: Path
) -> None:
    entry = ledger.reserve(reservation("held", GAUSSIAN))
    next_version.write_text(NEXT_REVISION.format(last="raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        Ledger.open(url)
    assert versions(url) == (4, "4")
    assert "note" not in {c["name"] for c in inspect(create_engine(url)).get_columns("entries")}
    assert ledger.history("notes") == [entry]


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
    assert reader.cost_of_next("notes", [(GAUSSIAN, 1e-6)]).fits
    assert reader.sources.public() == [] and reader.sources.declaration("a") is None
    assert not reader.sources.is_text_of("a", "notes") and not reader.sources.same_files_as("notes")
    with pytest.raises(DBAPIError, match="read-only transaction"):
        reader.reserve(reservation("more", GAUSSIAN))
