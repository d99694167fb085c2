"""The statement of a model: all its releases, or the warning that it is not private."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from release_examples import record

from dp_core.errors import BadInput
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit, Unaccounted
from tasks.protocol import ReleaseRecord
from tasks.results import (
    STATEMENT_DATA,
    STATEMENT_WORDS,
    refuse_own_model,
    statement_of,
    write_statement,
)

RELEASE = record("entry-1", PoissonGaussian.single(0.01, 2.0, 100, unit=PrivacyUnit.PATIENT))


def test_statement_names_ledger_entries_and_no_seed(tmp_path: Path) -> None:
    write_statement(tmp_path, [RELEASE], made_up=False)
    data = json.loads((tmp_path / STATEMENT_DATA).read_text())
    assert data["private"] is True
    assert data["ledger_ids"] == ["entry-1"]
    assert 0 < data["epsilon"] < 1
    assert "entry-1" in (tmp_path / STATEMENT_WORDS).read_text()
    assert "seed_hash" not in (tmp_path / STATEMENT_DATA).read_text()


def _used(dataset: str) -> ReleaseRecord:
    event = Unaccounted("training without privacy", unit=PrivacyUnit.DOCUMENT)
    return record(f"used-{dataset}", event, dataset)


def test_statement_of_a_nonprivate_model_is_marked(tmp_path: Path) -> None:
    write_statement(tmp_path, [_used("notes")], made_up=False)
    data = json.loads((tmp_path / STATEMENT_DATA).read_text())
    assert (data["private"], data["epsilon"]) == (False, "inf")
    assert "must not be exported" in (tmp_path / STATEMENT_WORDS).read_text()


def test_unaccounted_use_of_any_data_set_is_stated_first(tmp_path: Path) -> None:
    write_statement(tmp_path, [RELEASE, _used("labels")], made_up=False)
    data = json.loads((tmp_path / STATEMENT_DATA).read_text())
    assert (data["private"], data["epsilon"], data["dataset"]) == (False, "inf", "labels")
    assert data["others"][0]["dataset"] == "notes"
    assert (tmp_path / STATEMENT_WORDS).read_text().startswith("# Not private")


def test_infinite_epsilon_round_trips_through_json() -> None:
    used = _used("notes")
    assert json.loads(used.model_dump_json())["epsilon"] == "inf"
    assert ReleaseRecord.model_validate_json(used.model_dump_json()) == used
    for wrong in (math.nan, -1.0, -math.inf):
        with pytest.raises(ValueError, match="epsilon"):
            ReleaseRecord.model_validate(used.model_dump() | {"epsilon": wrong})


@pytest.mark.parametrize("name", [STATEMENT_WORDS, STATEMENT_DATA, "result.json", "Privacy.md"])
def test_model_made_by_confide_is_refused_as_public_model(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    refuse_own_model(tmp_path, "public_model")
    (tmp_path / name).write_text("{}")
    with pytest.raises(BadInput, match="init_uri"):
        refuse_own_model(tmp_path, "public_model")


def test_statement_has_one_line_per_item() -> None:
    words = statement_of([RELEASE], made_up=False).paragraphs
    assert sum(line.startswith("• ") for line in words) >= 2
    assert not any("**" in line or line.startswith(("#", "- ")) for line in words)
