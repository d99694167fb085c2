"""Tests of the Python API: its job is the command line's, and misuse raises before any charge."""

import csv
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dp_core.errors import BadInput, BudgetExceeded, ConfideError, Contradicted
from dp_core.labels import Label
from tasks import python_api
from tasks.commands.init_command import NoteSource
from tasks.execution.run_job import Job, JobOutcome
from tasks.protocol.job import job_steps, point_and_task
from tasks.protocol.settings import JobSettings
from tasks.runtime.deployment import Deployment

pytestmark = pytest.mark.usefixtures("at_home")
SECRET = "zyxsecret"  # represents the private text of a note
TEXTS = [f"{SECRET} no fever on day {n}" for n in range(58)]


class Dataset:
    """A table with the attributes of a Hugging Face `datasets.Dataset` that `read` uses."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns_by_name = columns
        self.column_names = list(columns)

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns_by_name[name]


def table(texts: list[str] = TEXTS) -> dict[str, list[Any]]:
    return {"PatNr": [n // 2 for n in range(len(texts))], "Note": list(texts)}


def write(file: Path, texts: list[str] = TEXTS) -> Path:
    with file.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(table())
        rows.writerows(zip(*table(texts).values(), strict=True))
    return file


def frame(texts: list[str] = TEXTS) -> Any:
    return pytest.importorskip("pandas").DataFrame(table(texts))


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that `train` starts; none of them is executed."""
    started: list[Job] = []

    def start(job: Job, deployment: Deployment, watch: object) -> JobOutcome:
        started.append(job)
        return JobOutcome(job, deployment.logs)

    monkeypatch.setattr(python_api, "run_and_give_back", start)
    return started


def budget(name: str = "notes", **terms: Any) -> python_api.RegisteredBudget:
    return python_api.Ledger().register(name, **{"epsilon": 8, "delta": 1e-5} | terms)


def train(notes: python_api.PrivateNotes, **given: Any) -> python_api.PrivateModel:
    return python_api.train(notes, **{"declared_units": 1000} | given)


def test_job_is_the_job_of_the_command_line_with_the_same_settings(confide, tmp_path, jobs):
    file = write(tmp_path / "notes.csv")
    words = ["--text", "Note", "--patient", "PatNr", "--units", 1000]
    settings = confide.json("init", file, "--out", tmp_path / "s.json", *words)["settings"]
    settings |= {"target_epsilon": 8, "target_delta": 1e-5, "epochs": 2}
    notes = python_api.read(file, text="Note", patient="PatNr")
    train(notes, budget=budget(), epsilon=8, epochs=2)
    specs = job_steps(JobSettings(**settings))
    assert jobs[0].steps == [(*point_and_task(name), spec) for name, spec in specs.items()]
    assert jobs[0].name == "dp_bert"


def test_same_rows_in_memory_are_the_same_job_in_any_order_and_container(jobs):
    dataset = Dataset(**{name: cells[::-1] for name, cells in table().items()})
    for source in (Dataset(**table()), dataset, frame()):
        notes = python_api.read(source, text="Note", patient="PatNr")
        train(notes, budget=budget())
    assert jobs[0].steps == jobs[1].steps == jobs[2].steps


def test_job_and_shown_notes_are_the_same_for_every_number_of_units(tmp_path, jobs):
    account, shown = budget(), set()
    for patients in (10, 11, 14, 15, 59, 60, 99, 100, 999, 1000):
        file = write(tmp_path / "notes.csv", [f"note {n}" for n in range(2 * patients)])
        notes = python_api.read(file, text="Note")
        train(notes, budget=account)
        shown.add((repr(notes), notes._repr_html_()))
    assert len(shown) == 1 and all(job.steps == jobs[0].steps for job in jobs)


def test_training_without_a_declared_bound_is_refused(jobs):
    for bound in ({}, {"declared_units": None}, {"declared_units": ""}):
        with pytest.raises(BadInput, match=r"^train: declared_units: no bound on the number of p"):
            python_api.train(python_api.read(TEXTS), budget=budget(), **bound)
    assert jobs == []


def test_missing_cells_have_no_text():
    pandas = pytest.importorskip("pandas")
    missing = (None, float("nan"), pandas.NA, pandas.NaT)
    assert [python_api._cell(value) for value in (*missing, "nan")] == [None] * 4 + ["nan"]


def test_objects_show_neither_text_nor_the_number_of_rows(jobs):
    notes, account = python_api.read(TEXTS), budget("b", unit="document")
    record = SimpleNamespace(name="attack", finding=SECRET, label=Label.OPERATOR)
    audit = python_api.AuditFindings((record,), SimpleNamespace(sentence="consistent"))
    for shown in (notes, account, python_api.Ledger(), audit):
        for words in (repr(shown), shown._repr_html_()):
            shown_words = words.replace(str(account.deployment.home), "")
            assert SECRET not in words and "58" not in shown_words
    assert "size: private" in repr(notes) and "ε: 8" in repr(account)
    html = python_api.Shown._repr_html_(SimpleNamespace(public=lambda: {"<i>": "<b>"}))
    assert "<i>" not in html and "<b>" not in html


# --- attacks: each would make an untrue ε, or spend two budgets on the same people


@pytest.mark.parametrize("kind", ["file", "list", "frame"])
def test_text_that_changed_after_read_is_refused(tmp_path, jobs, kind):
    file, texts = write(tmp_path / "notes.csv"), list(TEXTS)
    source = {"file": file, "list": texts, "frame": frame()}[kind]
    notes = python_api.read(
        source, **{} if kind == "list" else {"text": "Note", "patient": "PatNr"}
    )
    texts[0] = "another text"
    write(file, texts)
    if kind == "frame":
        source.loc[0, "Note"] = texts[0]
    account = budget(unit="document")
    with pytest.raises(BadInput, match="changed since `read`"):
        train(notes, budget=account)
    assert jobs == [] and account.remaining.charged_entries == 0


def test_text_under_a_second_name_is_refused_in_any_format(tmp_path, jobs):
    notes = python_api.read(write(tmp_path / "notes.csv"), text="Note", patient="PatNr")
    train(notes, budget=budget())
    other = budget("other", unit="document")
    for source in (TEXTS[::-1], Dataset(**table()), write(tmp_path / "copy.csv")):
        columns = {} if isinstance(source, list) else {"text": "Note"}
        with pytest.raises(BadInput, match="was read as notes, which has another budget"):
            train(python_api.read(source, **columns), budget=other)
    train(notes, budget=budget())  # its first name stays valid
    assert len(jobs) == 2


def test_another_unit_than_the_budgets_is_refused(jobs):
    account = budget("patient")
    with pytest.raises(BadInput, match="the unit is the patient, and no column of patients"):
        train(python_api.read(TEXTS), budget=account)
    with pytest.raises(BadInput, match="registered already, with another budget"):
        budget("patient", unit="document")
    with pytest.raises(BadInput, match="'ward' is none of"):
        budget("ward", unit="ward")
    assert jobs == []


@pytest.mark.cases
def test_wrong_arguments_are_refused_before_the_job(tmp_path, jobs, settings, line):
    (tmp_path / "a.txt").write_text("public text")
    account, settings = budget(unit="document"), {"public": tmp_path / "a.txt"} | settings
    with pytest.raises(BadInput, match=line):
        train(python_api.read(TEXTS), budget=account, **settings)
    assert jobs == []
    assert python_api.open_ledger(account.deployment).sources.public() == []


def test_model_of_private_text_is_refused_as_public(tmp_path, jobs):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("privacy_statement.json", "a.txt"):
        (folder / name).write_text("{}")
    with pytest.raises(BadInput, match="of private text too"):
        train(python_api.read(TEXTS), budget=budget(unit="document"), public=folder)
    assert jobs == []


def test_public_folder_is_a_model_or_text(tmp_path, jobs):
    folder, account = tmp_path / "public", budget(unit="document")
    folder.mkdir()
    (folder / "a.txt").write_text("public text")
    train(python_api.read(TEXTS), budget=account, public=folder)
    corpus = next(spec for _, task, spec in jobs[0].steps if task == "public_corpus")
    assert (corpus.format, corpus.path) == ("text", str(folder))
    (folder / "config.json").write_text("{}")
    assert python_api._public_settings(str(folder)) == {"public_model": str(folder)}


@pytest.mark.parametrize("column", ["Station", "PatNr"])
def test_table_in_memory_has_the_units_of_its_file(tmp_path, column):
    rows = {column: ["", *(n // 4 for n in range(57))], "Datum": ["1", "2"] * 29, "Note": TEXTS}
    with (tmp_path / "n.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([[*rows], *zip(*rows.values(), strict=True)])
    table = Dataset(**{name: [cell or None for cell in map(str, rows[name])] for name in rows})
    with python_api._file_of(table, {"text": "Note"}) as (file, columns):
        sources = [NoteSource.of(file, columns), NoteSource.of(tmp_path / "n.csv", {})]
    assert sources[0].units == sources[1].units and sources[0].texts == sources[1].texts
    assert ("patient" in sources[0].units) is (column == "PatNr")


@pytest.mark.parametrize(
    "source", [{"text": TEXTS}, [1, 2], 3, Dataset(other=TEXTS), iter(TEXTS), [], [*TEXTS, None]]
)
def test_source_without_text_is_refused(source):
    with pytest.raises(BadInput, match=f"^read: {type(source).__name__}: "):
        python_api.read(source)


def test_arguments_of_a_wrong_type_are_refused(tmp_path, jobs):
    notes, account = python_api.read(TEXTS), budget(unit="document")
    for call in (
        lambda: python_api.train("notes.csv", budget=account),
        lambda: python_api.train(notes, budget="notes"),
        lambda: budget("other", epsilon="8"),
        lambda: budget("other", delta="1e-5"),
        lambda: python_api.read(frame(), text=0),
    ):
        with pytest.raises(BadInput, match=r"it is of type (str|int)"):
            call()
    with pytest.raises(BadInput, match="encoding:utf-8 or windows-1252"):
        python_api.read(write(tmp_path / "n.csv"), encoding="latin-9")


def test_unknown_column_is_refused_with_place_and_columns(tmp_path):
    for source, where in ((write(tmp_path / "n.csv"), "n.csv: "), (frame(), "read: DataFrame: ")):
        with pytest.raises(
            BadInput, match=f"{where}a header lacks Wrong. Its columns: "
        ) as refused:
            python_api.read(source, text="Wrong")
        assert all(column in str(refused.value) for column in table())
    with pytest.raises(BadInput, match="not on this machine"):
        python_api.read("gs://ward/notes.csv")


def test_smaller_epsilon_leaves_delta_for_a_later_training(jobs):
    train(python_api.read(TEXTS), budget=budget(unit="document"), epsilon=4)
    pretraining = [spec for *_, spec in jobs[0].steps if getattr(spec, "target", None)]
    assert sum(spec.plan.delta for spec in pretraining) < 2.5e-6


@pytest.mark.parametrize(
    ("code", "kind"), [(1, ConfideError), (2, BadInput), (3, BudgetExceeded), (4, Contradicted)]
)
def test_failed_job_raises_the_kind_of_its_exit_code(monkeypatch, code, kind):
    failed = {"exit_code": code, "failed": "budget: no room"}
    start = lambda job, deployment, _: JobOutcome(job, deployment.logs, **failed)  # noqa: E731
    monkeypatch.setattr(python_api, "run_and_give_back", start)
    with pytest.raises(kind, match="no room") as error:
        train(python_api.read(TEXTS), budget=budget(unit="document"))
    assert type(error.value) is kind


def test_ledger_file_has_its_folder_next_to_it_or_the_home_that_holds_it(tmp_path, deployment):
    ledger = python_api.Ledger(tmp_path / "ward.db")
    assert ledger.deployment.home == tmp_path / "ward.confide"
    assert ledger.deployment.seeds == tmp_path / "ward.confide" / "seeds"
    assert python_api.Ledger(deployment.home / "copy.db").deployment.home != deployment.home
    assert python_api.Ledger(deployment.home / "ledger.db").deployment == deployment
    assert python_api.Ledger().deployment == deployment


@pytest.mark.parametrize("has_tqdm", [True, False])
def test_progress_shows_steps_without_times(monkeypatch, capsys, has_tqdm):
    if has_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with python_api._progress(2) as watch:
        for name in ("budget", "budget", "report"):
            watch(name, python_api.StepProgress(done=0, total=0))
            time.sleep(0.11)
    shown = capsys.readouterr().err
    assert "budget" in shown and "report" in shown and "2" in shown
    assert ":" not in shown and json.dumps(SECRET) not in shown
