import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pytest
from release_examples import hold, record
from step_outputs import output_folder

from dp_core.audit.canaries import Canary
from dp_core.audit.exposure import EMBEDDED, EXPOSURE, exposure_finding, rows_from_ranks
from dp_core.audit.protocol import Finding
from dp_core.config.release import EXACT_WORDS, ReleaseRecord
from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit, Unaccounted
from dp_core.privacy.statement import operator_only, total_epsilon
from tasks.execution import contract
from tasks.protocol.job import job_steps, point_and_task, point_steps
from tasks.protocol.messages import MetricRecord, StepResult
from tasks.protocol.specs import FinetuneSpec, PretrainSpec, RunContext, StepSpec
from tasks.protocol.sweep import SweepSettings
from tasks.report.job_results import DOCUMENTS_FILE, OCCURRENCES_FILE
from tasks.results import FINDINGS, write_findings
from tasks.runtime.deployment import Deployment
from tasks.steps.report_step import EDITIONS
from tasks.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore")  # Warnings of MLflow and SQLAlchemy.

SETTINGS = SweepSettings(
    sweep_noise_multipliers="1,2", sweep_batch_sizes="20", sweep_epochs="1",
    synthetic_patients=50, declared_units=60, batch_size=20, sequence_length=32,
)  # fmt: skip
CONTEXT = RunContext(run_key="sweep", run_name="sweep", task="report")
FACTS = {
    "vocabulary": {"unit": "patient", "dataset": "notes", "declared_units": 60},
    "pretraining": {
        "known_seed": False,
        "epsilon_training": 2.0,
        "shape": {"layers": 1, "hidden": 64},
    },
}


def tasks_of(settings: SweepSettings) -> list[tuple[str, StepSpec]]:
    """Return task and spec of each step of a sweep."""
    return [(point_and_task(name)[1], spec) for name, spec in job_steps(settings).items()]


def sweep_with(**changes: Any) -> SweepSettings:
    """Return the settings of the sweep with these changes."""
    return SweepSettings.model_validate(SETTINGS.model_dump() | changes)


def rows_of(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of each row of a table by name and unit of their column."""
    columns = [f"{column['name']} {column['unit']}" for column in table["headers"]]
    return [dict(zip(columns, row, strict=True)) for row in table["rows"]]


def exposures(rank: float, label: Label) -> Finding:
    """Return the exposure of a model if every secret has this rank among 1024 candidates."""
    planted = [Canary(f"HS-{i}", "HS", rate, (5, 6)) for rate in (0.1, 0.5) for i in range(4)]
    ranks = np.full((len(planted), 8), rank)
    rows = rows_from_ranks(
        planted, ranks, [], np.zeros((0, 8)), context=EMBEDDED, candidates=1024, declared_units=60
    )
    return exposure_finding(EXPOSURE, rows, EMBEDDED, label)


def _done(
    deployment: Deployment,
    task: str,
    spec: StepSpec,
    f1: float = 0.5,
    rank: float = 512.0,
    score: str = "f1",
    label: Literal["dp", "operator"] = "dp",
    releases: list[ReleaseRecord] | None = None,
    files: Mapping[str, Any] = MappingProxyType({}),
    metrics: Sequence[MetricRecord] | None = None,
    **facts: Any,
) -> None:
    """Publish the output of a step as the step would."""
    if task == "finetuning":
        facts = {"documents": {"": (f1, 1, 1)}} | facts
    event = PoissonGaussian.single(0.3, 1.0, 3, unit=PrivacyUnit.PATIENT)
    release = record(spec.digest(), event, delta=1e-5)
    if releases is None:
        releases = [release] if task == "pretraining" else []
    exposure_label = Label.OPERATOR if operator_only(releases) else Label.DP
    result = StepResult(
        step=spec.step,
        spec_hash=spec.digest(),
        outputs=dict.fromkeys(
            [FINDINGS[exposure_label], *(name.removesuffix(".json") for name in files)], ""
        ),
        metrics=[MetricRecord(name=score, value=f1, label=label)]
        if metrics is None
        else list(metrics),
        releases=releases,
        facts={"made_up": True, **FACTS.get(task, {}), **facts},
    )
    hold(deployment, result.releases)
    store = Store(deployment.store, deployment.cache)
    left = deployment.work / spec.digest()
    left.mkdir(parents=True, exist_ok=True)
    write_findings(left, [exposures(rank, exposure_label)])
    for name, content in files.items():
        (left / name).write_text(json.dumps(content))
    store.publish(left, spec.output)
    store.write(f"{spec.output}/result.json", result.model_dump_json().encode())


def sweep_of_private_text(deployment: Deployment, baselines: str, **more: Any) -> SweepSettings:
    """Return a sweep of one point and baselines on a data set that is registered as private."""
    Ledger.open(deployment.ledger).register_dataset("notes", PrivacyUnit.PATIENT, 20.0, 1e-3)
    fields = {
        "sweep_noise_multipliers": "1", "sweep_baselines": baselines, "private_format": "text",
        "private_path": "/a", "private_dataset": "notes",
    }  # fmt: skip
    return sweep_with(**fields | more)


def reported(
    deployment: Deployment, settings: SweepSettings
) -> tuple[StepResult, Path, list[dict[str, Any]]]:
    """Return the result of the report step, its folder, and the rows of its published table."""
    report = job_steps(settings)["report"]
    done = contract.run_step(report, deployment, CONTEXT)
    return done, output_folder(deployment, report.output), rows_of(done.facts["table"])


def epsilon_of(trainings: int) -> Any:
    """Return the total ε of so many trainings of `_done`."""
    event = PoissonGaussian.single(0.3, 1.0, 3, unit=PrivacyUnit.PATIENT)
    events = [event.stating(PrivacyUnit.PATIENT)] * trainings
    return pytest.approx(total_epsilon(events, trainings * 1e-5))


def test_failed_point_is_listed_and_included_once_finished(tracked):
    Ledger.open(tracked.ledger).register_made_up("notes")
    first, second = (point_steps(SETTINGS, point) for point in SETTINGS.points())
    report = job_steps(SETTINGS)["report"]
    with pytest.raises(BadInput, match="no model has finished"):
        contract.run_step(report, tracked, CONTEXT)
    for task in ("vocabulary", "pretraining", "finetuning", "exposure"):
        _done(tracked, task, first[task])
    names = ("documents_quarantined", "documents_quarantined/empty")
    omitted = [MetricRecord(name=name, value=3, label="public") for name in names]
    _done(tracked, "public_corpus", first["public_corpus"], metrics=omitted, releases=[])
    _done(tracked, "pretraining", second["pretraining"])  # the fine-tuning of this point failed
    names = list(report.points)
    page = output_folder(tracked, report.output) / "report" / "report.html"

    partial = contract.run_step(report, tracked, CONTEXT)
    assert partial.facts["missing"] == names[1:]
    assert f"did not finish: {names[1]}" in page.read_text()
    assert "Not read, public_corpus:</b> documents left out: 3 (no text: 3)." in page.read_text()
    assert [r.ledger_id for r in partial.releases] == [first["pretraining"].digest()]

    for task in ("finetuning", "exposure"):
        _done(tracked, task, second[task])
    whole = contract.run_step(report, tracked, CONTEXT)
    assert whole.facts["missing"] == [] and "did not finish" not in page.read_text()
    assert [(m.value, m.step) for m in whole.metrics if m.name == "points"] == [(2, 2)]
    assert contract.run_step(report, tracked, CONTEXT) == whole  # the result is reused


def test_seeds_and_folds_are_one_row_with_their_joint_cost(tracked):
    """Trainings 1 and 2, on folds 1 and 2: F1 of 0.8, 0.6 and 0.7, 0.3 over ten documents each."""
    Ledger.open(tracked.ledger).register_made_up("notes")
    settings = sweep_with(
        sweep_noise_multipliers="1",
        sweep_batch_sizes="20,30",
        sweep_seeds=2,
        entities_folds=2,
        sweep_baselines="public-training",
    )
    f1s = iter([0.8, 0.6, 0.7, 0.3] * 2 + [0.2, 0.4])
    for task, spec in tasks_of(settings):
        if isinstance(spec, FinetuneSpec):
            f1 = next(f1s)
            right = [(int(i < 10 * f1), 1, 1) for i in range(10)]
            documents = {f"{spec.fold}-{i}": counts for i, counts in enumerate(right)}
            _done(tracked, task, spec, f1, documents=documents)
        elif isinstance(spec, PretrainSpec) and spec.mode == "public":
            facts = {"shape": {"layers": 1, "hidden": 64}, "epsilon_training": 0.0}
            _done(tracked, task, spec, releases=[], **facts)
        elif isinstance(spec, PretrainSpec):
            plan = {"schedule": [{"steps": spec.updates, "expected_batch": 20}]}
            _done(tracked, task, spec, plan=plan)
        elif task in ("vocabulary", "exposure"):
            _done(tracked, task, spec, rank=256.0)

    done, folder, (first, second, public) = reported(tracked, settings)
    sizes = [row["Batch size expected units"]["value"] for row in (first, second, public)]
    assert sizes == [20, 30, None]
    assert first["Entity F1 strict, micro, %"]["value"] == pytest.approx(0.6)
    assert first["F1 SD over seeds"]["value"] == pytest.approx(0.2 / 2**0.5)
    assert first["F1 SD over folds"]["value"] == pytest.approx(0.3 / 2**0.5)
    low, high = map(float, first["F1 95% interval"]["text"].split(" – "))
    assert low < 60.0 < high
    assert first["Exposure mean, bits"]["value"] == pytest.approx(2.0)
    assert (first["Model "]["text"], public["Model "]["text"]) == ("with DP", "public training")
    assert public["Noise multiplier σ"]["text"] == "–"
    assert public["Exposure mean, bits"]["value"] == pytest.approx(2.0)
    assert public["Entity F1 strict, micro, %"]["value"] == pytest.approx(0.3)
    assert public["ε in total, per patient"]["value"] == 0
    # The cost of a row includes both of its trainings, and the cost of the sweep all four.
    assert first["ε in total, per patient"]["value"] == epsilon_of(2)
    metrics = {metric.name: metric.value for metric in done.metrics}
    assert metrics["epsilon"] == epsilon_of(4)
    assert len(done.facts["models"]) == 4 + 1  # one per training, not per fold
    report = folder / "report"
    assert {file.stem for file in report.glob("*.svg")} == {"sweep", "sweep-exposure"}
    drawn = (report / "sweep-exposure.svg").read_text()
    assert "bs=20 step=3 σ=1" in drawn and "bs=30 step=2 σ=1" in drawn


def test_nonprivate_baseline_is_for_the_operator_and_not_in_the_total(tracked):
    """With private text, exact counts of a baseline do not make other metrics operator-only."""
    settings = sweep_of_private_text(tracked, "public,nonprivate")
    exact = Unaccounted(EXACT_WORDS, unit=PrivacyUnit.PATIENT)
    report, red_name = job_steps(settings)["report"], "without privacy"
    shape = {"layers": 1, "hidden": 64}
    for point in settings.points():
        steps = point_steps(settings, point)
        red = point.baseline == "nonprivate"
        releases = [record("exact", exact, delta=0.0)] if red else None
        epsilon_training = None if red else 0.0 if point.baseline else 2.0
        trained = {"shape": shape, "epsilon_training": epsilon_training}
        releases = [] if point.baseline == "public" else releases
        options: dict[str, Any] = {"releases": releases, "label": "operator" if red else "dp"}
        counts = {str(i): (5 + i % 3, 10, 10) for i in range(12)}
        _done(tracked, "vocabulary", steps["vocabulary"], **options)
        _done(tracked, "pretraining", steps["pretraining"], **options, **trained)
        _done(tracked, "exposure", steps["exposure"], rank=2.0 if red else 512.0, **options)
        _done(
            tracked, "finetuning", steps["finetuning"], 0.71828, documents=counts, **options,
            files={DOCUMENTS_FILE: counts} if red else {},
        )  # fmt: skip
        # baselines with another vocabulary have other canaries; no model has group 9
        held = {"means": {f"HS at {rate}": 60.75 if point.baseline else 31.25 for rate in (0.5, 9)}}
        _done(
            tracked, "private_store", steps["private_store"], releases=[],
            files={OCCURRENCES_FILE: held},
        )  # fmt: skip

    done, folder, rows = reported(tracked, settings)
    assert f"{red_name} · epochs=1" in report.points
    numbers = {m.name: (m.value, m.label) for m in done.metrics}
    epsilon = epsilon_of(1)
    assert numbers["epsilon"] == (epsilon, "public")
    assert numbers["points"] == (3, "public")
    assert [r.ledger_id for r in done.releases if r.epsilon == math.inf] == []
    assert {
        label for file, label in done.facts["artifacts"].items() if file.startswith("report/")
    } == {"dp"}
    assert set(done.facts["models"]) == {
        "σ=1 · B=20 · epochs=1 / pretraining", "public text only / pretraining"
    }  # fmt: skip

    _, public, red_row = rows
    assert [row["ε_V vocabulary"]["text"] for row in rows] == ["0", "0", "∞"]
    assert [row["ε_T training"]["text"] for row in rows] == ["2", "0", "∞"]
    assert [row["ε in total, per patient"]["value"] for row in rows] == [epsilon, 0, "inf"]
    assert public["Entity F1 strict, micro, %"]["value"] == 0.71828
    for column in (
        "Entity F1 strict, micro, %", "F1 95% interval", "MLM accuracy public text, %",
        "Exposure mean, bits", "Exposure largest, bits",
    ):  # fmt: skip
        assert red_row[column].get("withheld") or red_row[column]["text"] == "–", column
    shown, kept = ((folder / name / "tables.json").read_text() for name in EDITIONS)
    assert shown.count("0.71828") == 2 and kept.count("0.71828") == 3
    counted = [row for row in json.loads(kept)["training"]["rows"] if "canary" in row[0]["text"]]
    assert [(row[0]["detail"], row[1]["value"]) for row in counted] == [("30 are expected", 31.25)]
    assert "31.25" not in shown and "60.75" not in kept
    lines = [(folder / name / "sweep-exposure.svg").exists() for name in EDITIONS]
    # nonprivate lines are for the operator, and a figure needs two lines
    assert lines == [False, True]
    operator_rows = {row["Model "]["text"]: row for row in rows_of(json.loads(kept)["sweep"])}
    interval = operator_rows[red_name]["F1 95% interval"]
    assert interval["label"] == "operator" and " – " in interval["text"]


def test_report_with_only_a_nonprivate_point_does_not_deny_private_text(tracked):
    settings = sweep_of_private_text(tracked, "nonprivate")
    exact = record("exact", Unaccounted(EXACT_WORDS, unit=PrivacyUnit.PATIENT), delta=0.0)
    (point,) = (candidate for candidate in settings.points() if candidate.baseline)
    steps = point_steps(settings, point)
    for task in ("vocabulary", "pretraining", "exposure", "finetuning"):
        trained = {"shape": {"layers": 1, "hidden": 64}, "epsilon_training": None}
        facts = trained if task == "pretraining" else {}
        _done(tracked, task, steps[task], label="operator", releases=[exact], **facts)
    _, folder, _ = reported(tracked, settings)
    for edition in EDITIONS:
        page = (folder / edition / "report.html").read_text()
        assert "No private text was used" not in page
        assert "No training with differential privacy of this sweep has finished" in page


def test_settings_are_compared_on_the_development_part_for_the_operator(tracked):
    settings = sweep_of_private_text(
        tracked, "public-training", model_kind="feed-forward", sweep_seeds=2,
        sweep_noise_multipliers="1", development_share=0.5,
    )  # fmt: skip
    values = {"development": iter([650.5, 610.5, 630.5]), "private": iter([710.5, 710.5, 710.5])}
    shape = {"kind": "feed-forward", "layers": 3, "hidden": 64}
    for task, spec in tasks_of(settings):
        metrics = [
            MetricRecord(name=f"perplexity_{part}", value=next(of_part), label="operator")
            for part, of_part in values.items()
            if task == "pretraining"
        ]
        if task in ("pretraining", "vocabulary", "exposure"):
            _done(tracked, task, spec, metrics=metrics, shape=shape)
    _, folder, _ = reported(tracked, settings)
    shown, kept = ((folder / name / "tables.json").read_text() for name in EDITIONS)
    row = rows_of(json.loads(kept)["sweep"])[0]
    assert row["Perplexity private text, by token"]["value"] == 710.5
    assert row["Perplexity private text (development part), by token"]["value"] == 620.5
    assert row["Perplexity SD over seeds"]["value"] == pytest.approx(200**0.5)
    assert "710.5" not in shown and "620.5" not in shown and "development" not in shown


def test_causal_models_are_compared_by_private_perplexity(tracked):
    """On private text, one training of the second setting diverged and has no perplexity."""
    settings = sweep_of_private_text(
        tracked, "public-training", model_kind="feed-forward", sweep_seeds=2,
        sweep_noise_multipliers="1,2",
    )  # fmt: skip
    report = job_steps(settings)["report"]
    perplexities = iter([(300.0, 610.5), (310.0, 420.25), (318.0, 440.25), (311.0, 500.75), None])
    shape = {"kind": "feed-forward", "layers": 3, "hidden": 64}
    for task, spec in tasks_of(settings):
        if task == "pretraining":
            perplexity = next(perplexities)
            metrics = [] if perplexity is None else [
                MetricRecord(name="perplexity_public", value=perplexity[0], label="dp"),
                MetricRecord(name="perplexity_private", value=perplexity[1], label="operator"),
            ]  # fmt: skip
            extra = {} if spec.mode == "dp" else {"epsilon_training": 0.0, "releases": []}
            _done(tracked, task, spec, metrics=metrics, shape=shape, **extra)
        elif task in ("vocabulary", "exposure"):
            _done(tracked, task, spec, **({} if task == "exposure" else {"releases": []}))

    done, folder, _ = reported(tracked, settings)
    assert "public training / exposure" in report.results
    assert not any("finetuning" in name for name in report.results)
    assert done.facts["finetuned"] == {} and done.facts["missing"] == []
    shown, kept = ((folder / name / "tables.json").read_text() for name in EDITIONS)
    rows = rows_of(json.loads(kept)["sweep"])
    private = [row["Perplexity private text, by token"] for row in rows]
    assert [cell["value"] for cell in private] == [430.25, None, 610.5]
    assert [cell.get("label") for cell in private] == ["operator", None, "operator"]
    deviation = rows[0]["Perplexity SD over seeds"]
    assert (deviation["value"], deviation["label"]) == (pytest.approx(200**0.5), "operator")
    reach = 12.7062 * 10  # Student's t of one degree of freedom, times 20 / √2 / √2
    low, high = map(float, rows[0]["Perplexity 95% interval"]["text"].split(" – "))
    assert (low, high) == (round(430.25 - reach), round(430.25 + reach))
    assert [row["Perplexity public text, by token"]["value"] for row in rows] == [314.0, None, 300]
    assert not [column for column in rows[0] if "F1" in column or "MLM" in column]
    # No published file contains a figure that was computed from private text.
    files = [*(folder / "report").glob("*.json"), *(folder / "report").glob("*.html")]
    texts = [done.model_dump_json(include={"facts"}), *(file.read_text() for file in files)]
    for secret in ("430.2", ">430<", "610.5", ">610<", "440.2", f"{low:g} – {high:g}"):
        assert not any(secret in text for text in texts), secret
    assert "430.2" in kept and "314.0" in shown
    assert {m.name for m in done.metrics} == {"epsilon", "delta", "points"}
    figures = json.loads((folder / "operator_report" / "figures.json").read_text())["models"]
    extra = figures["public training"]["Perplexity, private text, by token"]
    assert (extra["value"], extra["label"]) == (610.5, "operator")


@pytest.mark.parametrize("seeds", [7, 8])
def test_three_best_seeds_are_shown_from_eight_seeds_on(tracked, seeds):
    """Accuracy of pairs, as Jagannatha et al. 2021 report MedNLI."""
    Ledger.open(tracked.ledger).register_made_up("notes")
    settings = sweep_with(sweep_noise_multipliers="1", sweep_finetune_seeds=seeds, head="pairs")
    accuracies = iter([0.1, 0.9, 0.2, 0.8, 0.3, 0.4, 0.7, 0.5])
    for task, spec in tasks_of(settings):
        if isinstance(spec, FinetuneSpec):
            accuracy = next(accuracies)
            documents = {str(i): (int(10 * accuracy), 10, 10) for i in range(10)}
            _done(tracked, task, spec, accuracy, score="accuracy", documents=documents)
        elif task in ("vocabulary", "pretraining", "exposure"):
            _done(tracked, task, spec)
    done, _, (row,) = reported(tracked, settings)
    tried = [0.1, 0.9, 0.2, 0.8, 0.3, 0.4, 0.7, 0.5][:seeds]
    assert row["Accuracy %"]["value"] == pytest.approx(sum(tried) / seeds)
    assert "Entity F1 strict, micro, %" not in row
    best = row.get("Accuracy three best seeds, %")
    if seeds == 8:
        assert best is not None and best["value"] == pytest.approx(0.8)
        notes = done.facts["table"]["notes"]
        assert any("selected on the test part" in note for note in notes)
    else:
        assert best is None


def test_checkpoints_of_one_training_share_its_epsilon(tracked):
    """Two seeds after 1 and 4 epochs: two charges, and every row has the ε of both."""
    Ledger.open(tracked.ledger).register_made_up("notes")
    settings = sweep_with(
        sweep_noise_multipliers="1",
        sweep_epochs="1,4",
        sweep_seeds=2,
        sweep_epochs_from="checkpoints",
    )
    for task, spec in tasks_of(settings):
        on_the_way = bool(spec.model_dump().get("model_updates"))
        if isinstance(spec, FinetuneSpec):
            _done(tracked, task, spec, 0.3 if on_the_way else 0.7)
        elif isinstance(spec, PretrainSpec) and spec.mode == "dp":
            assert (spec.updates, spec.kept_updates) == (12, (3,))
            plan = {"schedule": [{"steps": spec.updates, "expected_batch": 20}]}
            _done(tracked, task, spec, 0.4, score="mlm_accuracy_public", plan=plan)
        elif task in ("vocabulary", "exposure"):
            _done(tracked, task, spec, rank=512.0 if on_the_way else 128.0)
    done, folder, (first, last) = reported(tracked, settings)
    assert (first["Epochs "]["text"], first["Epochs "]["detail"]) == ("1", "of 4 trained")
    assert (last["Epochs "]["text"], last["Epochs "]["detail"]) == ("4", "")
    for row, f1, exposure in ((first, 0.3, 1.0), (last, 0.7, 3.0)):
        assert row["ε in total, per patient"]["value"] == epsilon_of(2)
        assert row["Entity F1 strict, micro, %"]["value"] == pytest.approx(f1)
        assert row["Exposure mean, bits"]["value"] == pytest.approx(exposure)
    (epsilon,) = (m.value for m in done.metrics if m.name == "epsilon")
    assert epsilon == epsilon_of(2)
    accuracies = [row["MLM accuracy public text, %"]["text"] for row in (first, last)]
    assert accuracies == ["–", "40.0"]  # measured for the last model only
    folder /= "report"
    drawn = (folder / "sweep-exposure.svg").read_text()
    assert "bs=20 step=3 σ=1" in drawn and "bs=20 step=12 σ=1" in drawn
    assert "models that one training saved before its end" in (folder / "report.html").read_text()
    # one per training, because only last models are registered
    assert len(done.facts["models"]) == 2
