"""The pre-training step: killed, timed out, its output lost; one charge, one model."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from spec_examples import spec_of
from step_outputs import publish, rows_in, vocabulary_in

from dp_core.errors import Unfinished
from dp_core.privacy.ledger import Ledger, State
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.protocol import PretrainSpec
from tasks.runtime import step as contract
from tasks.runtime.deployment import CHECKOUT, Deployment
from tasks.storage import Store, is_remote
from tasks.storage.local import backend_for

UPDATES = 300  # kept after 1, and after every 100 more; a kill has the time of 200 to arrive


@dataclass(frozen=True)
class Prepared:
    """A deployment with all that a pre-training needs, and its spec."""

    deployment: Deployment
    spec: PretrainSpec
    capture: pytest.CaptureFixture[str]

    def _file(self, **changes: object) -> Path:
        file = self.deployment.home / "spec.json"
        training = self.spec.training.model_copy(update=changes)
        file.write_text(self.spec.model_copy(update={"training": training}).model_dump_json())
        return file

    def start(self) -> subprocess.Popen[bytes]:
        """Start the step in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "tasks", "pretrain", "--spec", str(self._file())],
            cwd=CHECKOUT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def run(self, **changes: object) -> tuple[int, str]:
        """Run the step here, with changes of how its run is kept; return exit code and words."""
        code = contract.main("pretrain", str(self._file(**changes)))
        return code, self.capture.readouterr().err

    def store(self) -> Store:
        return Store(self.deployment.store, self.deployment.home / "look")

    def checkpoints(self) -> list[str]:
        if is_remote(self.deployment.store):
            found = backend_for(self.deployment.store).sizes("unfinished")
            return sorted(name for name in found if "/update-" in name)
        return sorted(map(str, self.deployment.work.glob("pretrain-*/checkpoints-*/update-*")))

    def to_another_machine(self) -> None:
        """Where the store is shared, nothing else of a machine is needed to go on."""
        if is_remote(self.deployment.store):
            shutil.rmtree(self.deployment.work)
            shutil.rmtree(self.deployment.cache)

    def weights(self) -> bytes:
        found = self.store().read(f"{self.spec.output}/model.safetensors")
        assert found is not None
        return found

    def lose_output(self) -> None:
        self.store().clear(self.spec.output)


@pytest.fixture(params=["local", "gs"])
def prepared(
    request: pytest.FixtureRequest,
    untracked: Deployment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    as_in_a_process: None,
) -> Prepared:
    """Rows and a vocabulary, as the steps before would have left them."""
    if request.param == "gs":
        root = f"gs://{request.getfixturevalue('bucket')}/{tmp_path.name}"
        untracked = replace(untracked, store=root)
    store = Store(untracked.store, untracked.cache)
    rows, public, words = (
        f"{untracked.store}/{name}" for name in ("token_store/0", "token_store/1", "vocabulary/0")
    )
    Ledger.open(untracked.ledger).register_dataset("notes", PrivacyUnit.PATIENT, 50.0, 1e-3)
    made = untracked.home / "made"
    size = vocabulary_in(made / "vocabulary")
    digest = rows_in(untracked, made / "rows", size, "train")
    publish(
        store, rows, made / "rows", role="private", dataset="notes", unit="patient",
        declared_units=40, max_examples_per_unit=1, vocabulary_digest="public", digest=digest,
    )  # fmt: skip
    publish(
        store, public, made / "rows", role="public", dataset="public", vocabulary_digest="public"
    )
    publish(store, words, made / "vocabulary", vocabulary_size=size, digest="public")
    spec = spec_of(
        PretrainSpec, untracked.store, store_uri=rows, public_store_uri=public,
        private_store_uri=rows, vocabulary_uri=words, updates=UPDATES,
    )  # fmt: skip
    monkeypatch.setenv("CONFIDE_HOME", str(untracked.home))
    monkeypatch.setenv("CONFIDE_STORE", untracked.store)
    monkeypatch.setenv("CONFIDE_TRACKING", untracked.tracking)
    return Prepared(untracked, spec, capfd)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's, SQLAlchemy's and TensorFlow's own
def test_killed_timed_out_and_done_again_it_is_one_charge_and_one_model(
    prepared: Prepared,
) -> None:
    ledger = Ledger.open(prepared.deployment.ledger)
    # Its time is up at once: stopped in good order, reserved, not failed.
    code, said = prepared.run(time_box_minutes=1e-6)
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
    # It goes on from what was kept, not from the beginning.
    prepared.to_another_machine()
    code, said = prepared.run(time_box_minutes=1e-6)
    assert code == Unfinished.exit_code, said
    reached = re.search(rf"time is up after (\d+) of {UPDATES} updates", said.splitlines()[-1])
    assert reached is not None, said
    assert int(reached[1]) in range(102, UPDATES, 100)  # one more than was kept last
    # And to its end.
    code, said = prepared.run()
    assert code == 0, said
    assert prepared.checkpoints() == []
    resumed = prepared.weights()
    entries = ledger.history("notes")
    assert [e.state for e in entries] == [State.SETTLED]
    spent = ledger.remaining("notes")
    # The output is lost: undisturbed this time, and the same model bit for bit, for nothing.
    prepared.lose_output()
    code, said = prepared.run()
    assert code == 0, said
    assert prepared.weights() == resumed
    assert ledger.history("notes") == entries
    assert ledger.remaining("notes") == spent
