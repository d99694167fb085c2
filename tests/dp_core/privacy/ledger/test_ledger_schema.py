import re
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text, update

from dp_core.errors import BadInput
from dp_core.privacy.ledger import Ledger, State
from dp_core.privacy.ledger.schema import CURRENT, METADATA, MIGRATIONS, VERSION
from dp_core.privacy.units import PrivacyUnit

GOLDEN = Path(__file__).parent / "golden"


def test_opening_again_changes_nothing(url: str) -> None:
    Ledger.open(url).register_dataset("notes", PrivacyUnit.PATIENT, 1.0, 1e-6)
    again = Ledger.open(url)
    assert list(again.datasets()) == ["notes"]
    with create_engine(url).connect() as db:
        assert db.execute(text("SELECT version FROM ledger_schema")).all() == [(CURRENT,)]


def test_a_newer_ledger_is_refused_in_one_line(url: str) -> None:
    Ledger.open(url)
    with create_engine(url).begin() as db:
        db.execute(update(VERSION).values(version=CURRENT + 1))
    with pytest.raises(BadInput) as caught:
        Ledger.open(url)
    assert re.search(rf"version {CURRENT + 1}.*knows {CURRENT}.*newer release", str(caught.value))
    assert "\n" not in str(caught.value)


def test_the_migrations_lead_to_the_tables_that_the_code_uses(url: str) -> None:
    Ledger.open(url)
    found = inspect(create_engine(url))
    assert sorted(found.get_table_names()) == sorted(METADATA.tables)
    for table in METADATA.tables.values():
        columns = {c["name"] for c in found.get_columns(table.name)}
        assert columns == {c.name for c in table.columns}
    unique = found.get_unique_constraints("entries")
    assert ["dataset", "spec_hash", "attempt"] in [u["column_names"] for u in unique]


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS) + 1))
def test_a_ledger_of_every_past_version_still_tells_what_was_spent(
    tmp_path: Path, version: int
) -> None:
    url = f"sqlite:///{tmp_path / 'old.db'}"
    raw = create_engine(url).raw_connection()
    raw.executescript((GOLDEN / f"ledger_v{version}.sql").read_text())
    raw.close()
    ledger = Ledger.open(url)
    remaining = ledger.remaining("notes")
    assert (remaining.budget.epsilon, remaining.budget.delta) == (8.0, 1e-5)
    assert remaining.budget.order == 4.0
    assert remaining.charged_entries == 2
    assert remaining.operator_releases == 1
    assert remaining.spent is not None
    assert remaining.spent.rho == pytest.approx(4 / 8 + 4 * 64 / (2 * 80**2), rel=1e-9)
    states = [entry.state for entry in ledger.history("notes")]
    assert states == [State.SETTLED, State.RESERVED, State.SETTLED]
    assert ledger.datasets()["synthetic-notes"].made_up
