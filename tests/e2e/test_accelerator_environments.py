"""Whole jobs in the environments of the images for TPUs and GPUs, without these devices.

`make test-tpu` and `make test-gpu` make the environments.
"""

import os
import sys
from pathlib import Path

import pytest
from child_processes import completed
from small_job import SIZES

ENVIRONMENTS = Path(__file__).parents[2] / ".venv"


@pytest.mark.slow
@pytest.mark.cases
def test_job_runs_with_the_packages_for_an_accelerator(tmp_path, name, device, package):
    environment = ENVIRONMENTS / f"task-{name}"
    python = environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"its environment is made by make test-{name}")
    assert list(environment.glob(f"lib/*/site-packages/{package.replace('-', '_')}-*"))
    sizes = {key: size for key, size in SIZES.items() if not key.startswith("finetune_")}
    settings = sizes | {"device": device, "entities_format": "none"}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    deployment = {"CONFIDE_HOME": str(tmp_path), "CONFIDE_TASK_PYTHON": str(python)}
    answer = completed(
        sys.executable, "-m", "tasks.cli", "run", *words, env=os.environ | deployment
    )
    assert answer.returncode == 0, answer.stderr
    assert len(list(tmp_path.glob("store/pretrain/*/result.json"))) == 2
