"""The pre-training step: killed, timed out, its output lost; one charge, one model."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pretrain_example import UPDATES, Prepared, prepare

from dp_core.errors import Unfinished
from dp_core.privacy.ledger import Ledger, State
from tasks.execution import contract as step
from tasks.runtime.deployment import Deployment


@pytest.fixture(params=["local", "gs"])
def prepared(
    request: pytest.FixtureRequest,
    untracked: Deployment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    as_in_a_process: None,
) -> Prepared:
    """Rows and a vocabulary, as the steps before would have left them."""
    if request.param == "gs":
        root = f"gs://{request.getfixturevalue('bucket')}/{tmp_path.name}"
        untracked = replace(untracked, store=root)
    monkeypatch.setenv("CONFIDE_HOME", str(untracked.home))
    monkeypatch.setenv("CONFIDE_STORE", untracked.store)
    monkeypatch.setenv("CONFIDE_TRACKING", untracked.tracking)
    return prepare(untracked)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's, SQLAlchemy's and TensorFlow's own
def test_killed_timed_out_and_done_again_it_is_one_charge_and_one_model(
    prepared: Prepared, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(**changes: object) -> tuple[int, str]:
        """Run the step in this process; return its exit code and words."""
        code = step.main("pretrain", str(prepared.file(**changes)))
        return code, capfd.readouterr().err

    ledger = Ledger.open(prepared.deployment.ledger)
    # Its time is up at once: stopped in good order, reserved, not failed.
    code, said = run(time_box_minutes=1e-6)
    assert code == Unfinished.exit_code == 75, said
    assert f"time is up after 1 of {UPDATES} updates" in said.splitlines()[-1]
    assert [e.state for e in ledger.history("notes")] == [State.RESERVED]
    # kill -9, once it has gone on from there (on another machine, where the store is a bucket).
    prepared.to_another_machine()
    process = prepared.start()
    while not any("0000000001." not in name for name in prepared.checkpoints()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert process.stderr is not None
    process.stderr.close()
    # It goes on from what was kept, not from the beginning.
    prepared.to_another_machine()
    code, said = run(time_box_minutes=1e-6)
    assert code == Unfinished.exit_code, said
    reached = re.search(rf"time is up after (\d+) of {UPDATES} updates", said.splitlines()[-1])
    assert reached is not None, said
    assert int(reached[1]) in range(102, UPDATES, 100)  # one more than was kept last
    # And to its end.
    code, said = run()
    assert code == 0, said
    assert prepared.checkpoints() == []
    resumed = prepared.weights()
    entries = ledger.history("notes")
    assert [e.state for e in entries] == [State.SETTLED]
    spent = ledger.remaining("notes")
    # The output is lost: undisturbed this time, and the same model bit for bit, for nothing.
    prepared.lose_output()
    code, said = run()
    assert code == 0, said
    assert prepared.weights() == resumed
    assert ledger.history("notes") == entries
    assert ledger.remaining("notes") == spent
