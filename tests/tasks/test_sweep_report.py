"""The sweep's page where points failed: it holds the others, says which, and waits for them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from release_examples import record

from dp_core.audit.canaries import Canary
from dp_core.audit.exposure import EMBEDDED, rows_from_ranks
from dp_core.errors import BadInput
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit
from dp_core.privacy.statement import total_epsilon
from tasks.protocol import (
    FinetuneSpec,
    MetricRecord,
    PretrainSpec,
    RunContext,
    StepResult,
    StepSpec,
    SweepSettings,
    sweep_point_steps,
    sweep_report,
    sweep_steps,
)
from tasks.report.results import EXPOSURE, EXPOSURE_FILE
from tasks.runtime import step as contract
from tasks.runtime.deployment import Deployment
from tasks.storage import Store

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's and SQLAlchemy's own

SETTINGS = SweepSettings(
    sweep_noise_multipliers="1,2", sweep_batch_sizes="20", sweep_epochs="1",
    synthetic_patients=50, declared_units=60, batch_size=20, sequence_length=32,
)  # fmt: skip
WHO = RunContext(run_key="sweep", run_name="sweep", task="report")
FACTS = {
    "vocabulary": {"unit": "patient", "dataset": "notes", "declared_units": 60},
    "pretraining": {
        "known_seed": False,
        "epsilon_training": 2.0,
        "shape": {"layers": 1, "hidden": 64},
    },
}


def exposures(rank: float) -> list[dict[str, Any]]:
    """Return what the exposure step leaves where every secret is ranked there among 1024."""
    planted = [Canary(f"HS-{i}", "HS", rate, (5, 6)) for rate in (0.1, 0.5) for i in range(4)]
    ranks = np.full((len(planted), 8), rank)
    rows = rows_from_ranks(
        planted, ranks, [], np.zeros((0, 8)), context=EMBEDDED, candidates=1024, declared_units=60
    )
    return [asdict(row) for row in rows]


def _done(
    deployment: Deployment,
    task: str,
    spec: StepSpec,
    f1: float = 0.5,
    rank: float = 512.0,
    score: str = "f1",
    **facts: Any,
) -> None:
    """Leave what a step of a point would have left."""
    if task == "finetuning":
        facts = {"documents": {"": (f1, 1, 1)}} | facts
    event = PoissonGaussian.single(0.3, 1.0, 3, unit=PrivacyUnit.PATIENT)
    release = record(spec.digest(), event, delta=1e-5)
    result = StepResult(
        step=spec.step,
        spec_hash=spec.digest(),
        outputs={EXPOSURE: EXPOSURE_FILE},
        metrics=[MetricRecord(name=score, value=f1, label="dp")],
        releases=[release] if task == "pretraining" else [],
        facts={"made_up": True, **FACTS.get(task, {}), **facts},
    )
    store = Store(deployment.store, deployment.cache)
    left = deployment.work / spec.digest()
    left.mkdir(parents=True, exist_ok=True)
    (left / EXPOSURE_FILE).write_text(json.dumps(exposures(rank)))
    store.publish(left, spec.output)
    store.write(f"{spec.output}/result.json", result.model_dump_json().encode())


def test_a_point_that_failed_is_named_and_comes_in_once_it_is_there(tracked: Deployment) -> None:
    Ledger.open(tracked.ledger).register_made_up("notes")
    first, second = (
        sweep_point_steps(SETTINGS, point, tracked.store) for point in SETTINGS.points()
    )
    report = sweep_report(SETTINGS, tracked.store)
    with pytest.raises(BadInput, match="no point has finished"):
        contract.run_step(report, tracked, WHO)
    for task in ("vocabulary", "pretraining", "finetuning", "exposure"):
        _done(tracked, task, first[task])
    _done(tracked, "pretraining", second["pretraining"])  # and its fine-tuning failed
    names = list(report.results)
    page = Path(report.output.removeprefix("file://")) / "report" / "report.html"

    partial = contract.run_step(report, tracked, WHO)
    assert partial.facts["missing"] == names[1:]
    assert f"did not finish: {names[1]}" in page.read_text()
    assert [r.ledger_id for r in partial.releases] == [first["pretraining"].digest()]

    for task in ("finetuning", "exposure"):
        _done(tracked, task, second[task])
    whole = contract.run_step(report, tracked, WHO)
    assert whole.facts["missing"] == [] and "did not finish" not in page.read_text()
    assert [(m.value, m.step) for m in whole.metrics if m.name == "points"] == [(2, 2)]
    assert contract.run_step(report, tracked, WHO) == whole  # done before


def test_seeds_and_folds_are_one_row_with_what_they_cost_together(tracked: Deployment) -> None:
    """Trainings 1 and 2, on folds 1 and 2: F1 of 0.8, 0.6 and 0.7, 0.3 over ten documents each."""
    Ledger.open(tracked.ledger).register_made_up("notes")
    settings = SweepSettings.model_validate(
        SETTINGS.model_dump()
        | {"sweep_noise_multipliers": "1", "sweep_batch_sizes": "20,30", "sweep_seeds": 2}
        | {"entities_folds": 2, "sweep_baselines": "public-training"}
    )
    f1s = iter([0.8, 0.6, 0.7, 0.3] * 2 + [0.2, 0.4])
    for _, task, spec in sweep_steps(settings, tracked.store):
        if isinstance(spec, FinetuneSpec):
            f1 = next(f1s)
            right = [(int(i < 10 * f1), 1, 1) for i in range(10)]
            documents = {f"{spec.fold}-{i}": counts for i, counts in enumerate(right)}
            _done(tracked, task, spec, f1, documents=documents)
        elif task == "public_pretraining":
            _done(tracked, task, spec, shape={"layers": 1, "hidden": 64}, epsilon_training=0.0)
        elif isinstance(spec, PretrainSpec) and spec.mode == "dp":
            plan = {"schedule": [{"steps": spec.updates, "expected_batch": 20}]}
            _done(tracked, task, spec, plan=plan)
        elif task in ("vocabulary", "exposure"):
            _done(tracked, task, spec, rank=256.0)

    done = contract.run_step(sweep_report(settings, tracked.store), tracked, WHO)
    table = done.facts["table"]
    columns = [f"{c['name']} {c['unit']}" for c in table["columns"]]
    assert [row[2]["value"] for row in table["rows"]] == [20, 30, None]
    first, _, public = (dict(zip(columns, row, strict=True)) for row in table["rows"])
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
    # A row costs what both of its trainings cost, and the sweep what all four do.
    event = PoissonGaussian.single(0.3, 1.0, 3, unit=PrivacyUnit.PATIENT)
    both, all_four = (
        total_epsilon([event.stating(PrivacyUnit.PATIENT)] * n, n * 1e-5) for n in (2, 4)
    )
    assert first["ε in total, per patient"]["value"] == pytest.approx(both)
    told = {metric.name: metric.value for metric in done.metrics}
    assert told["epsilon"] == pytest.approx(all_four)
    assert len(done.facts["models"]) == 4 + 1  # one for each training, not for each fold
    report = Path(sweep_report(settings, tracked.store).output.removeprefix("file://")) / "report"
    assert {file.stem for file in report.glob("*.svg")} == {"sweep", "sweep-exposure"}
    drawn = (report / "sweep-exposure.svg").read_text()
    assert "bs=20 step=3 σ=1" in drawn and "bs=30 step=2 σ=1" in drawn


@pytest.mark.parametrize("seeds", [7, 8])
def test_the_three_best_of_eight_seeds_are_shown_and_of_fewer_none(
    tracked: Deployment, seeds: int
) -> None:
    """Accuracy of pairs, as Jagannatha et al. 2021 report MedNLI."""
    Ledger.open(tracked.ledger).register_made_up("notes")
    settings = SweepSettings.model_validate(
        SETTINGS.model_dump()
        | {"sweep_noise_multipliers": "1", "sweep_finetune_seeds": seeds, "head": "pairs"}
    )
    accuracies = iter([0.1, 0.9, 0.2, 0.8, 0.3, 0.4, 0.7, 0.5])
    for _, task, spec in sweep_steps(settings, tracked.store):
        if isinstance(spec, FinetuneSpec):
            accuracy = next(accuracies)
            documents = {str(i): (int(10 * accuracy), 10, 10) for i in range(10)}
            _done(tracked, task, spec, accuracy, score="accuracy", documents=documents)
        elif task in ("vocabulary", "pretraining", "exposure"):
            _done(tracked, task, spec)
    done = contract.run_step(sweep_report(settings, tracked.store), tracked, WHO)
    table = done.facts["table"]
    columns = [f"{c['name']} {c['unit']}" for c in table["columns"]]
    (row,) = (dict(zip(columns, row, strict=True)) for row in table["rows"])
    tried = [0.1, 0.9, 0.2, 0.8, 0.3, 0.4, 0.7, 0.5][:seeds]
    assert row["Accuracy %"]["value"] == pytest.approx(sum(tried) / seeds)
    assert "Entity F1 strict, micro, %" not in columns
    best = row.get("Accuracy three best seeds, %")
    if seeds == 8:
        assert best is not None and best["value"] == pytest.approx(0.8)
        assert any("chosen by the test itself" in note for note in table["notes"])
    else:
        assert best is None
