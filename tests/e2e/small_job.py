"""The smallest job, and functions that run its steps as the launchers do."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.execution import contract
from tasks.protocol.messages import StepResult
from tasks.protocol.specs import RunContext, StepSpec
from tasks.protocol.step_process import data_uri
from tasks.runtime.deployment import Deployment
from tasks.storage.backends import local_path

SIZES: dict[str, Any] = {
    "declared_units": 80, "words_per_unit": 64, "vocabulary_epsilon": 50.0,
    "vocabulary_size": 300, "layers": 1, "hidden": 64, "sequence_length": 16, "batch_size": 20,
    "epochs": 0.5, "public_steps": 2, "public_batch_size": 8, "synthetic_patients": 60,
    "max_examples_per_unit": 2, "nonprivate": False, "device": "cpu", "canary_patterns": "HS",
    "canary_rates": "0.2", "canaries_per_group": 1, "finetune_epochs": 1,
    "finetune_batch_size": 512,
}  # fmt: skip


def run(spec: StepSpec) -> int:
    context = RunContext(run_key="e2e", run_name="e2e", task=spec.step).model_dump_json()
    return contract.main(spec.step, data_uri(spec.model_dump_json().encode()), context=context)


def run_all(
    deployment: Deployment, steps: Iterable[StepSpec], capture: pytest.CaptureFixture[str]
) -> Ledger:
    """Run the steps of a job on made-up notes, each of which must succeed; return the ledger."""
    ledger = Ledger.open(deployment.ledger)
    ledger.register_dataset("synthetic-notes", PrivacyUnit.PATIENT, 500.0, 1e-4)
    for spec in steps:
        assert run(spec) == 0, (spec.step, "".join(capture.readouterr()))
    return ledger


def result_of(spec: StepSpec) -> StepResult:
    return StepResult.model_validate_json((folder_of(spec) / "result.json").read_bytes())


def folder_of(spec: StepSpec) -> Path:
    return local_path(Deployment.from_environment().open_store().location(spec.output))
