"""The sweep's page where points failed: it holds the others, says which, and waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from release_examples import record

from dp_core.errors import BadInput
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit
from tasks.protocol import (
    MetricRecord,
    RunContext,
    StepResult,
    StepSpec,
    SweepSettings,
    sweep_point_steps,
    sweep_report,
)
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
    "dp_pretraining": {
        "known_seed": False,
        "epsilon_training": 2.0,
        "shape": {"layers": 1, "hidden": 64},
    },
}


def _done(deployment: Deployment, task: str, spec: StepSpec) -> None:
    """Leave what a step of a point would have left."""
    event = PoissonGaussian.single(0.3, 1.0, 3, unit=PrivacyUnit.PATIENT)
    release = record(spec.digest(), event, delta=1e-5)
    result = StepResult(
        step=spec.step,
        spec_hash=spec.digest(),
        outputs={},
        metrics=[MetricRecord(name="f1", value=0.5, label="dp")],
        releases=[release] if task == "dp_pretraining" else [],
        facts={"made_up": True, **FACTS.get(task, {})},
    )
    store = Store(deployment.store, deployment.cache)
    empty = deployment.work / "empty"
    empty.mkdir(exist_ok=True)
    store.publish(empty, spec.output)
    store.write(f"{spec.output}/result.json", result.model_dump_json().encode())


def test_a_point_that_failed_is_named_and_comes_in_once_it_is_there(tracked: Deployment) -> None:
    Ledger.open(tracked.ledger).register_made_up("notes")
    first, second = (
        sweep_point_steps(SETTINGS, point, tracked.store) for point in SETTINGS.points()
    )
    report = sweep_report(SETTINGS, tracked.store)
    with pytest.raises(BadInput, match="no point has finished"):
        contract.run_step(report, tracked, WHO)
    for task in ("vocabulary", "dp_pretraining", "dp_finetuning", "dp_exposure"):
        _done(tracked, task, first[task])
    _done(tracked, "dp_pretraining", second["dp_pretraining"])  # and its fine-tuning failed
    names = list(report.results)
    page = Path(report.output.removeprefix("file://")) / "report" / "report.html"

    partial = contract.run_step(report, tracked, WHO)
    assert partial.facts["missing"] == names[1:]
    assert f"did not finish: {names[1]}" in page.read_text()
    assert [r.ledger_id for r in partial.releases] == [first["dp_pretraining"].digest()]

    for task in ("dp_finetuning", "dp_exposure"):
        _done(tracked, task, second[task])
    whole = contract.run_step(report, tracked, WHO)
    assert whole.facts["missing"] == [] and "did not finish" not in page.read_text()
    assert [(m.value, m.step) for m in whole.metrics if m.name == "points"] == [(2, 2)]
    assert contract.run_step(report, tracked, WHO) == whole  # done before
