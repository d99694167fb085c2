"""A whole job in the environment of the image for TPUs, on a mocked TPU: `make test-tpu`."""

import os
import sys
from pathlib import Path

import pytest
from child_processes import completed
from small_job import SIZES

PYTHON = Path(__file__).parents[2] / ".venv" / "task-tpu" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="its environment is made by make test-tpu")
def test_job_on_a_mocked_tpu_runs_with_tensorflow_for_tpus(tmp_path):
    settings = SIZES | {"device": "mock-tpu:2", "entities_format": "none"}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    deployment = {"CONFIDE_HOME": str(tmp_path), "CONFIDE_TASK_PYTHON": str(PYTHON)}
    answer = completed(
        sys.executable, "-m", "tasks.cli", "run", *words, env=os.environ | deployment
    )
    assert answer.returncode == 0, answer.stderr
    trainings = list(tmp_path.glob("store/pretrain/*/result.json"))
    assert len(trainings) == 2
    assert all('"tensorflow-tpu"' in result.read_text() for result in trainings)
