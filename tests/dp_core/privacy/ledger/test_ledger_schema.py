import json
import re
from pathlib import Path
from typing import Any

import pytest
from alembic import op
from alembic.script import ScriptDirectory
from golden.make_every_kind import told
from ledger_examples import GAUSSIAN, GOLDEN, HISTOGRAM, golden, reservation
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import DBAPIError

from dp_core.errors import BadInput
from dp_core.privacy.ledger import Ledger, State
from dp_core.privacy.ledger.migrations import CURRENT, alembic_config
from dp_core.privacy.ledger.models import Base
from dp_core.privacy.mechanism_event import REGISTRY
from dp_core.privacy.mechanisms import PrivacyUnit


def versions(url: str) -> tuple[object, object]:
    """Return what the two tables of versions hold."""
    with create_engine(url).connect() as db:
        return (
            db.execute(text("SELECT version FROM ledger_schema")).scalar_one(),
            db.execute(text("SELECT version_num FROM ledger_alembic_version")).scalar_one(),
        )


def test_the_newest_revision_is_the_current_version(url: str) -> None:
    Ledger.open(url)
    assert versions(url) == (CURRENT, str(CURRENT))
    with create_engine(url).connect() as db:
        scripts = ScriptDirectory.from_config(alembic_config(db))
    assert scripts.get_current_head() == str(CURRENT)


def test_a_database_of_other_programs_is_left_as_it_is(url: str) -> None:
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir()
    with create_engine(url).begin() as db:
        db.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
        db.execute(text("INSERT INTO alembic_version VALUES ('of another program')"))
    Ledger.open(url).register_dataset("notes", PrivacyUnit.PATIENT, 1.0, 1e-6)
    with create_engine(url).connect() as db:
        kept = db.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
    assert kept == "of another program"


def test_opening_again_changes_nothing(url: str) -> None:
    Ledger.open(url).register_dataset("notes", PrivacyUnit.PATIENT, 1.0, 1e-6)
    again = Ledger.open(url)
    assert list(again.datasets()) == ["notes"]
    with create_engine(url).connect() as db:
        assert db.execute(text("SELECT version FROM ledger_schema")).all() == [(CURRENT,)]


def test_a_newer_ledger_is_refused_in_one_line(url: str) -> None:
    Ledger.open(url)
    with create_engine(url).begin() as db:
        db.execute(text("UPDATE ledger_schema SET version = version + 1"))
    with pytest.raises(BadInput) as caught:
        Ledger.open(url)
    assert re.search(rf"version {CURRENT + 1}.*knows {CURRENT}.*newer release", str(caught.value))
    assert "\n" not in str(caught.value)


def test_the_migrations_lead_to_the_tables_that_the_code_uses(url: str) -> None:
    Ledger.open(url)
    found = inspect(create_engine(url))
    versions = {"ledger_schema", "ledger_alembic_version"}
    assert set(found.get_table_names()) == versions | set(Base.metadata.tables)
    for table in Base.metadata.tables.values():
        columns = {c["name"] for c in found.get_columns(table.name)}
        assert columns == {c.name for c in table.columns}
    unique = found.get_unique_constraints("entries")
    assert ["dataset", "spec_hash", "attempt"] in [u["column_names"] for u in unique]


@pytest.mark.parametrize("version", range(1, CURRENT + 1))
def test_a_ledger_of_every_past_version_still_tells_what_was_spent(
    tmp_path: Path, version: int, url: str
) -> None:
    url = golden(version, tmp_path, url)
    ledger = Ledger.open(url)
    remaining = ledger.remaining("notes")
    assert (remaining.budget.epsilon, remaining.budget.delta) == (8.0, 1e-5)
    assert remaining.budget.order == 4.0
    assert remaining.charged_entries == 2
    assert remaining.operator_releases == 1
    assert remaining.spent is not None
    assert remaining.spent.rho == pytest.approx(4 / 8 + 4 * 64 / (2 * 80**2), rel=1e-9)
    states = [entry.state for entry in ledger.history("notes")]
    withdrawn = [State.WITHDRAWN] * (version >= 2)
    assert states == [State.SETTLED, State.RESERVED, State.SETTLED, *withdrawn]
    assert ledger.datasets()["synthetic-notes"].made_up
    kept = [(s.label, s.known_private, s.private_in) for s in ledger.sources.public()]
    assert kept == ([("wiki", False, ()), ("notes", True, ("notes",))] if version >= 3 else [])
    # and it goes on: what was reserved is found again, what is new is charged and can be withdrawn
    before = ledger.history("notes")
    assert ledger.reserve(reservation("vocabulary", HISTOGRAM)).id == before[1].id
    assert ledger.remaining("notes").spent == remaining.spent
    ledger.register_plan([reservation("new", GAUSSIAN, plan_key="new")])
    assert ledger.remaining("notes").charged_entries == 3
    ledger.withdraw_plan("notes", "new")
    assert ledger.remaining("notes").spent == remaining.spent
    with create_engine(url).connect() as db:
        assert db.execute(text("SELECT version FROM ledger_schema")).all() == [(CURRENT,)]


def _alike(found: Any, recorded: Any) -> bool:
    """Whether everything recorded is found again; later versions may tell more."""
    if isinstance(recorded, dict):
        return all(_alike(found[key], value) for key, value in recorded.items())
    if isinstance(recorded, list):
        return len(found) == len(recorded) and all(map(_alike, found, recorded))
    if isinstance(recorded, float):
        return bool(found == pytest.approx(recorded, rel=1e-9, abs=0))
    return bool(found == recorded)


NEWER = {"phrase_rounds", "noised_weights", "cyclic_poisson_gaussian"}  # than what was recorded


@pytest.mark.parametrize("version", range(2, CURRENT + 1))
def test_every_kind_of_entry_costs_what_it_cost_when_it_was_recorded(
    tmp_path: Path, version: int, url: str
) -> None:
    url = golden(version, tmp_path, url, "every_kind")
    recorded = json.loads((GOLDEN / f"every_kind_v{version}.json").read_text())
    found = told(Ledger.open(url))
    assert found.keys() == recorded.keys()
    for name, account in recorded.items():
        assert _alike(found[name]["stands"], account["stands"]), name
        for now, then in zip(found[name]["entries"], account["entries"], strict=True):
            assert _alike(now, then), (name, then["id"])
    kinds = {e["event"]["kind"] for account in recorded.values() for e in account["entries"]}
    assert kinds == {kind for kind, _ in REGISTRY} - NEWER
    assert {e["state"] for e in recorded["notes"]["entries"]} == {*State}


def test_an_upgrade_that_breaks_off_leaves_the_old_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = golden(1, tmp_path, "sqlite")

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(op, "create_table", broken)  # of version 3, after version 2
        with pytest.raises(KeyboardInterrupt):
            Ledger.open(url)
    with create_engine(url).connect() as db:
        assert db.execute(text("SELECT version FROM ledger_schema")).all() == [(1,)]
        assert "withdrawn_at" not in {c["name"] for c in inspect(db).get_columns("entries")}
    assert Ledger.open(url).remaining("notes").charged_entries == 2


@pytest.mark.postgres
def test_who_may_only_read_opens_and_asks(postgres_url: str) -> None:
    """Steps that parse files have the ledger's tables to read: to ask takes no lock."""
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
