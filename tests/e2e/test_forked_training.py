import shutil
import sys

import pytest
from small_job import SIZES, folder_of, run

from dp_core.privacy.ledger import Ledger
from tasks.execution.run_job import Job, run_job
from tasks.protocol.fork_server import OFF, SERVER
from tasks.protocol.job import job_steps, point_and_task
from tasks.protocol.settings import JobSettings

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Warnings of TensorFlow.
    pytest.mark.skipif(sys.platform != "linux", reason="the fork server is Linux's"),
    pytest.mark.slow,
]


def test_second_training_of_a_fork_server_equals_training_in_a_new_process(untracked, monkeypatch):
    steps = job_steps(JobSettings(**SIZES))
    for name, spec in steps.items():
        if name == "With DP / pretraining":
            break
        assert point_and_task(name)[1] in ("exposure", "finetuning") or run(spec) == 0

    def trained(*names: str) -> bytes:
        """Run these steps, delete the output of the last step and return its weights."""
        job = Job("dp_bert", "run", "run", [(*point_and_task(name), steps[name]) for name in names])
        finished = run_job(job, untracked, lambda *_: None)
        assert finished.exit_code == 0, finished.failed
        logs = "".join(file.read_text() for file in finished.log_folder.glob("*.log"))
        assert "started anew" not in logs
        return delete_output(names[-1])

    def delete_output(name: str) -> bytes:
        content = (folder_of(steps[name]) / "model.safetensors").read_bytes()
        shutil.rmtree(folder_of(steps[name]))
        return content

    ledger = Ledger.open(untracked.ledger)
    monkeypatch.setenv(SERVER, OFF)
    expected = trained("With DP / pretraining")
    entries = ledger.history("synthetic-notes")
    delete_output("Public text only / pretraining")
    monkeypatch.delenv(SERVER)
    assert trained("Public text only / pretraining", "With DP / pretraining") == expected
    assert ledger.history("synthetic-notes") == entries  # nothing is charged again
