import json
import os
import subprocess
import sys

import pytest
from pydantic import ValidationError
from spec_examples import spec_of

from dp_core.errors import BadInput
from tasks.execution.run_job import _run_step
from tasks.protocol import CHECKOUT
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import CorpusSpec, RunContext
from tasks.protocol.step_process import Work
from tasks.runtime.deployment import Deployment
from tasks.storage.backends import read_spec, stage_source


@pytest.mark.cases
@pytest.mark.parametrize("field", ["private_dataset", "data_version"])
def test_names_with_special_characters_are_refused(field, name):
    settings = {"private_format": "jsonl", "private_path": "/data/x", "private_dataset": "notes"}
    with pytest.raises(ValidationError):
        JobSettings.model_validate(settings | {field: name})


@pytest.mark.cases
def test_path_reaches_the_step_unchanged_and_executes_nothing(tmp_path, monkeypatch, path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "$PROGRAM" "$@"\n')
    python.chmod(0o755)
    program = "import sys, json; print(json.dumps(sys.argv))"
    monkeypatch.setenv("PROGRAM", program)
    deployment = Deployment.from_environment(
        {"CONFIDE_HOME": str(tmp_path), "CONFIDE_TASK_PYTHON": str(python)}
    )
    spec = spec_of(CorpusSpec, path=path)
    context = RunContext(run_key="$(touch here)", run_name="a; touch here", task="private_corpus")
    work = Work(spec, context)
    code, _ = _run_step(work, deployment, tmp_path / "step", lambda _: None)
    assert code == 0
    words = json.loads((tmp_path / "step.log").read_text().splitlines()[-1])
    assert words[1:5] == ["-m", "tasks", "corpus", "--spec"]
    assert CorpusSpec.model_validate_json(read_spec(words[5])) == spec
    assert not [folder for folder in (tmp_path, CHECKOUT) if (folder / "here").exists()]


@pytest.mark.parametrize("path", ["relative", "http://elsewhere/x", "ftp://x", "data:,x"])
def test_sources_are_absolute_paths_or_buckets(tmp_path, path):
    with pytest.raises(BadInput):
        stage_source(path, tmp_path, field="private_path")


def test_step_name_cannot_import_another_module(tmp_path):
    for name in ("os", "../corpus; true"):
        process = subprocess.run(
            [sys.executable, "-m", "tasks", name, "--spec", "data:,%7B%22step%22:%22os%22%7D"],
            env={**os.environ, "CONFIDE_HOME": str(tmp_path), "PYTHONPATH": str(CHECKOUT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 2
        assert process.stderr.count("\n") == 1
