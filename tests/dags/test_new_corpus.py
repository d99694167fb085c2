import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowFailException

from dp_core.errors import BadInput

DAG_FILE = Path(__file__).resolve().parents[2] / "dags" / "new_corpus.py"
NOTES = {"private_format": "jsonl", "private_path": "/data/notes.jsonl", "declared_units": 5000}


@pytest.fixture
def module(monkeypatch, tmp_path):
    """The namespace of the DAG file in a deployment with two private data sets."""
    file = tmp_path / "corpora.json"
    file.write_text(json.dumps({"ward-notes": NOTES, "letters": NOTES | {"epochs": 3}}))
    monkeypatch.setenv("CONFIDE_CORPORA", str(file))
    return SimpleNamespace(**runpy.run_path(str(DAG_FILE)))


def test_every_configured_data_set_is_an_asset_of_its_name(module):
    names = [asset.name for asset in module.new_corpus().schedule.objects]
    assert names == ["letters", "ward-notes"]


def test_without_configuration_the_made_up_notes_show_how_it_goes(dags):
    assert [asset.name for asset in dags["new_corpus"].schedule.objects] == ["synthetic-notes"]
    assert dags["new_corpus"].catchup is False


def test_an_event_starts_the_data_set_s_job_with_its_version(module):
    extra = {"data_version": "2026-11", "from_rest_api": True}
    run = module.run_of({"corpus": "letters", "extra": extra})
    assert run == {
        "run_id": "corpus__letters__2026-11",
        "conf": NOTES | {"epochs": 3.0, "private_dataset": "letters", "data_version": "2026-11"},
    }


@pytest.mark.cases
def test_an_event_is_data_and_changes_nothing_but_the_version(module, corpus, extra, words):
    with pytest.raises(AirflowFailException, match=words) as refused:
        module.run_of({"corpus": corpus, "extra": extra})
    assert "\n" not in str(refused.value)
    assert "rm -rf" not in str(refused.value)


@pytest.mark.cases
def test_invalid_corpora_are_one_line_of_import_error(monkeypatch, tmp_path, content, words):
    file = tmp_path / "corpora.json"
    file.write_text(content, encoding="latin-1")
    monkeypatch.setenv("CONFIDE_CORPORA", str(file))
    with pytest.raises((ValueError, BadInput), match="CONFIDE_CORPORA") as refused:
        runpy.run_path(str(DAG_FILE))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
