import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pretrain_example import CHECKPOINT_EVERY, UPDATES, Prepared, prepare

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
    if request.param == "gs":
        root = f"gs://{request.getfixturevalue('bucket')}/{tmp_path.name}"
        untracked = replace(untracked, store=root)
    monkeypatch.setenv("CONFIDE_HOME", str(untracked.home))
    monkeypatch.setenv("CONFIDE_STORE", untracked.store)
    monkeypatch.setenv("CONFIDE_TRACKING", untracked.tracking)
    return prepare(untracked)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Warnings of MLflow, SQLAlchemy and TensorFlow.
def test_interrupted_training_has_one_charge_and_the_same_bits(prepared, capfd):
    def run(**changes: object) -> tuple[int, str]:
        code = step.main("pretrain", str(prepared.file(**changes)))
        return code, capfd.readouterr().err

    ledger = Ledger.open(prepared.deployment.ledger)
    # The time box ends after one update; the step stops with a reserved release and without
    # failure.
    code, errors = run(time_box_minutes=1e-6)
    assert code == Unfinished.exit_code == 75, errors
    assert f"time is up after 1 of {UPDATES} updates" in errors.splitlines()[-1]
    assert [e.state for e in ledger.history("notes")] == [State.RESERVED]
    # The step is killed after it has resumed (on another machine if the store is a bucket).
    prepared.to_another_machine()
    process = prepared.start()
    while not any("0000000001." not in name for name in prepared.checkpoints()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stderr.close()
    # The step resumes from the last checkpoint, not from the beginning.
    prepared.to_another_machine()
    code, errors = run(time_box_minutes=1e-6)
    assert code == Unfinished.exit_code, errors
    reached = re.search(rf"time is up after (\d+) of {UPDATES} updates", errors.splitlines()[-1])
    assert reached is not None, errors
    # one update more than the last checkpoint, after the first checkpoint's one update
    assert int(reached[1]) in range(CHECKPOINT_EVERY + 2, UPDATES, CHECKPOINT_EVERY)
    # The step continues to its end.
    code, errors = run()
    assert code == 0, errors
    assert prepared.checkpoints() == []
    resumed = prepared.weights()
    entries = ledger.history("notes")
    assert [e.state for e in entries] == [State.SETTLED]
    spent = ledger.remaining("notes")
    # After a lost output, an undisturbed run yields the same bits without a charge.
    prepared.store().clear(prepared.spec.output)
    code, errors = run()
    assert code == 0, errors
    assert prepared.weights() == resumed
    assert ledger.history("notes") == entries
    assert ledger.remaining("notes") == spent
