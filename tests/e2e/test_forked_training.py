"""A training in a process that the fork server forked gives the bits of one started anew."""

from __future__ import annotations

import shutil
import sys

import pytest
from small_job import SIZES, folder_of, run

from dp_core.privacy.ledger import Ledger
from tasks.execution.step_process import Job, run_job
from tasks.protocol import JobSettings, dp_bert_steps
from tasks.protocol.fork_server_client import OFF, SERVER
from tasks.runtime.deployment import Deployment

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # TensorFlow's own
    pytest.mark.skipif(sys.platform != "linux", reason="the fork server is Linux's"),
    pytest.mark.slow,
]


def test_the_second_training_of_a_fork_server_is_that_of_a_process_started_anew(
    untracked: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = dp_bert_steps(JobSettings(**SIZES))
    for name, spec in steps.items():
        if name == "dp_pretraining":
            break
        assert run(spec) == 0

    def trained(*names: str) -> bytes:
        """Train; return the weights of the last, and forget it."""
        job = Job("dp_bert", "run", "run", [("", name, steps[name]) for name in names])
        finished = run_job(job, untracked, lambda *_: None)
        assert finished.exit_code == 0, finished.failed
        logs = "".join(file.read_text() for file in finished.log_folder.glob("*.log"))
        assert "started anew" not in logs
        return forgotten(names[-1])

    def forgotten(name: str) -> bytes:
        content = (folder_of(steps[name]) / "model.safetensors").read_bytes()
        shutil.rmtree(folder_of(steps[name]))
        return content

    ledger = Ledger.open(untracked.ledger)
    monkeypatch.setenv(SERVER, OFF)
    anew = trained("dp_pretraining")
    entries = ledger.history("synthetic-notes")
    forgotten("public_pretraining")
    monkeypatch.delenv(SERVER)
    assert trained("public_pretraining", "dp_pretraining") == anew
    assert ledger.history("synthetic-notes") == entries  # nothing is charged again
