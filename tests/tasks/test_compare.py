import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from step_outputs import publish

from dp_core.labels import Label
from tasks.commands.report_command import Run, scores_by_labels
from tasks.report.model import F1
from tasks.report.tables import Cell, bits, withheld
from tasks.results import FIGURES_FILE
from tasks.runtime.deployment import Deployment
from tasks.storage.store import RESULT, Store

EDITIONS = ("report", "operator_report")


class Reports:
    """Reports in a store, and the fine-tunings that they show."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.folder, self.count = store, folder, 0

    def add(
        self,
        settings: Mapping[str, Any],
        models: Mapping[str, int | None],
        leakage: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Write a run whose models are correct on so many of 400 documents, if published."""
        self.count += 1
        finetuned, figures = {}, {}
        for name, right in models.items():
            uri = f"store://finetune/{len(finetuned):08}{self.count:08}"
            counts = {str(i): (int(i < (right or 0)), 1, 1) for i in range(400)}
            publish(self.store, uri, **({} if right is None else {"documents": counts}))
            finetuned[name] = [{"uri": uri, "seed": "", "fold": 0, "start": ""}]
            figures[name] = {"ε": Cell("∞", label=Label.PUBLIC)}
            figures[name]["F1, %"] = Cell(f"{(right or 0) / 4:.1f}", label=Label.DP)
        uri, made = f"store://report/{self.count:016}", self.folder / str(self.count)
        for edition in EDITIONS:
            (made / edition).mkdir(parents=True)
            hidden = edition == "report"
            exposure = withheld() if hidden else bits(7, Label.OPERATOR)
            shown = {
                model: {title: asdict(cell) for title, cell in (cells | {"bits": exposure}).items()}
                for model, cells in figures.items()
            }
            leakages = [] if hidden else leakage
            written = {"settings": settings, "models": shown, "leakage": leakages}
            (made / edition / FIGURES_FILE).write_text(json.dumps(written))
        created = f"2026-01-0{self.count}T10:11:12"
        publish(self.store, uri, made, created=created, finetuned=finetuned)
        answer = json.loads(self.store.read(f"{uri}/{RESULT}"))
        answer["outputs"] = {name: name for name in EDITIONS}
        self.store.write(f"{uri}/{RESULT}", json.dumps(answer).encode())
        return uri


@pytest.fixture
def reports(at_home: None, deployment: Deployment, tmp_path: Path) -> Reports:
    return Reports(Store(deployment.store, deployment.cache), tmp_path / "made")


def test_changed_settings_and_f1_difference_of_two_runs_are_shown(reports, confide):
    old = reports.add({"epochs": 2, "seed": 1}, {"With DP": 200, "Public text only": 100})
    new = reports.add({"epochs": 4, "seed": 1, "layers": 2}, {"With DP": 220})
    answer = confide.json("compare", "1", "0")
    assert [run["uri"] for run in answer["runs"]] == [old, new]
    assert answer["settings"] == {"epochs": [2, 4], "layers": [None, 2]}
    (entry,) = answer["f1_differences"]
    assert (entry["first"], entry["second"]) == ([0, "With DP"], [1, "With DP"])
    assert entry["difference"]["value"] == pytest.approx(0.05)
    assert entry["difference"]["p_value"] < 0.01
    low, high = entry["difference"]["interval"]
    assert 0 < low < 0.05 < high < 0.1
    code, out, err = confide("compare", old, new)
    assert (code, err) == (0, "")
    for words in ("epochs", "55.0", "50.0", "+5.0", "∞", "▒▒"):
        assert words in out
    assert "layers" in out and "seed" not in out.replace("seeds", "")


def test_operator_sees_leakage_by_model_kind_and_epoch(reports, confide):
    def leakage(epoch: float | None, value: float) -> dict[str, Any]:
        row = {"model": "With DP", "kind": "dp", "level": "patient", "label": "operator"}
        return {**row, "attack": "loss", "epoch": epoch, "value": value, "interval": [0.0, 1.0]}

    reports.add(
        {"model_kind": "bert"}, {"With DP": 200}, [leakage(1.0, 0.021), leakage(2.0, 0.032)]
    )
    reports.add({"model_kind": "gpt2"}, {"With DP": 200}, [leakage(None, 0.071)])
    code, out, _ = confide("compare", "--operator", "1", "0")
    table = out[out.index("Membership: leakage") :].partition("Differences")[0]
    words = " ".join(table.split())
    assert code == 0 and "loss" in words and "patient" in words
    for kind in ("bert", "gpt2"):
        assert kind in words
    (row,) = [line for line in table.splitlines() if "2.1" in line]
    assert row.index("2.1") < row.index("3.2") < row.index("7.1")
    assert "Membership" not in confide("compare", "1", "0")[1]


def test_page_shows_families_in_one_figure_and_label_sets_in_one_table(reports, confide, tmp_path):
    def leakage(model: str, kind: str, epoch: float | None) -> dict[str, Any]:
        row = {"model": model, "kind": kind, "level": "patient", "attack": "loss"}
        return {**row, "epoch": epoch, "value": 0.2, "interval": [0.1, 0.3], "label": "operator"}

    trained = [leakage("Without privacy", "nonprivate", epoch) for epoch in (1.0, 2.0)]
    for family in ("bert", "gpt2"):
        settings = {"model_kind": family, "entities_train": f"i2b2-{family}"}
        reports.add(settings, {"With DP": 200}, [*trained, leakage("Public", "public", None)])
    page = tmp_path / "page"
    assert confide("compare", "--operator", "--page", str(page), "1", "0")[0] == 0
    assert page.stat().st_mode & 0o077 == (page / "report.html").stat().st_mode & 0o077 == 0
    figure = (page / "leakage.svg").read_text()
    for line in ("BERT, Without privacy", "GPT-2, Without privacy", "GPT-2, Public"):
        assert line in figure
    table = json.loads((page / "tables.json").read_text())["labels"]
    assert [header["name"] for header in table["headers"][-2:]] == ["i2b2-bert", "i2b2-gpt2"]
    assert "P-BBA: loss, by patient" in (page / "report.html").read_text()
    assert "the folder exists" in confide("compare", "--page", str(page), "1", "0")[2]
    assert confide("compare", "--page", str(tmp_path / "publishable"), "1", "0")[0] == 0
    assert not list((tmp_path / "publishable").glob("leakage.*"))


def test_models_of_equal_name_share_a_row_only_if_their_cost_is_equal():
    def run(epsilon: float, f1: float) -> Run:
        cells = {
            "ε, in total, per patient": asdict(Cell(f"{epsilon}", epsilon, Label.PUBLIC)),
            F1.title: asdict(Cell(f"{f1}", f1, Label.DP)),
        }
        return Run("", "", {}, {"With DP": cells}, {})

    def texts(*runs: Run) -> list[list[str]]:
        return [[cell.text for cell in row] for row in scores_by_labels(runs).rows]

    assert texts(run(2.0, 80.5), run(2.0, 81.5)) == [["With DP", "2.0", "80.5", "81.5"]]
    assert texts(run(2.0, 80.5), run(9.0, 81.5)) == [
        ["With DP", "2.0", "80.5", "–"], ["With DP", "9.0", "–", "81.5"],
    ]  # fmt: skip


def test_models_are_compared_with_the_first_of_their_run_or_of_their_name(reports, confide):
    reports.add({}, {"Public text only": 200, "With DP": 200, "Without privacy": 280})
    differences = confide.json("compare", "0")["f1_differences"]
    assert [(entry["first"][1], entry["second"][1]) for entry in differences] == [
        ("Public text only", "With DP"), ("Public text only", "Without privacy"),
    ]  # fmt: skip
    assert [entry["difference"]["value"] for entry in differences] == [0.0, pytest.approx(0.2)]
    assert differences[0]["difference"]["p_value"] == 1.0
    reports.add({}, {"With DP": 210})
    reports.add({}, {"With DP": None})
    first, second = confide.json("compare", "2", "1", "0")["f1_differences"]
    assert [pair["first"] for pair in (first, second)] == [[0, "With DP"]] * 2
    assert [pair["second"] for pair in (first, second)] == [[1, "With DP"], [2, "With DP"]]
    assert second["difference"] is None and "labels or model are private" in second["why_not"]


def test_operator_figures_need_the_operator_option(reports, confide):
    reports.add({}, {"With DP": 200})
    shown, whole = (confide.json("compare", "0", *more) for more in ([], ["--operator"]))
    hidden, exposure = (answer["runs"][0]["models"]["With DP"]["bits"] for answer in (shown, whole))
    assert (hidden["value"], hidden["withheld"], exposure["value"]) == (None, True, 7)
    # The end time to the second would reveal the size of the data.
    assert (shown["runs"][0]["created"], whole["runs"][0]["created"][10:]) == (
        "2026-01-01", "T10:11:12",
    )  # fmt: skip


def test_unknown_run_is_refused_in_one_line(reports, confide, tmp_path):
    uri = reports.add({}, {"With DP": 200})
    (tmp_path / "old" / "report").mkdir(parents=True)
    old = f"store://report/{'a' * 16}"
    publish(reports.store, old, tmp_path / "old", created="2025-01-01")
    answer = json.loads(reports.store.read(f"{old}/{RESULT}")) | {"outputs": {"report": "report"}}
    reports.store.write(f"{old}/{RESULT}", json.dumps(answer).encode())
    for words, reason in (
        (["3"], "RUN 3: there are 2 reports. 0 is the latest."),
        ([uri, "0"], "one run is named twice"),
        (["store://report/x"], "no report there"),
        (["elsewhere"], "elsewhere"),
        ([old], "of an earlier version"),
    ):
        code, out, err = confide("compare", *words)
        assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
        assert reason in err
