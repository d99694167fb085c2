"""What travels with a model: the statement of all its releases, or the warning of none."""

from __future__ import annotations

import json
from pathlib import Path

from dp_core.privacy.events import PoissonGaussian
from dp_core.privacy.units import PrivacyUnit
from tasks.specs import ReleaseRecord
from tasks.statements import DATA, WORDS, statement_of, write_operator_notice, write_statement

RELEASE = ReleaseRecord(
    ledger_id="entry-1",
    dataset="notes",
    unit="patient",
    event=PoissonGaussian.single(0.01, 2.0, 100, unit=PrivacyUnit.PATIENT).to_json(),
    epsilon=0.3,
    epsilon_rdp=0.4,
    delta=1e-6,
)


def test_a_statement_names_its_ledger_entries_and_never_a_seed(tmp_path: Path) -> None:
    write_statement(tmp_path, [RELEASE], made_up=False)
    data = json.loads((tmp_path / DATA).read_text())
    assert data["private"] is True
    assert data["ledger_ids"] == ["entry-1"]
    assert 0 < data["epsilon"] < 1
    assert "entry-1" in (tmp_path / WORDS).read_text()
    assert "seed_hash" not in (tmp_path / DATA).read_text()


def test_a_model_without_privacy_says_so(tmp_path: Path) -> None:
    write_operator_notice(tmp_path)
    assert json.loads((tmp_path / DATA).read_text()) == {"private": False, "epsilon": "inf"}
    assert "must not be exported" in (tmp_path / WORDS).read_text()


def test_the_report_shows_each_item_by_itself() -> None:
    words = statement_of([RELEASE], made_up=False).words
    assert sum(line.startswith("• ") for line in words) >= 2
    assert not any("**" in line or line.startswith(("#", "- ")) for line in words)
