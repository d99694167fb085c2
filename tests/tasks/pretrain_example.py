"""A pre-training step with all its inputs."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from spec_examples import spec_of
from step_outputs import publish, rows_in, vocabulary_in

from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.protocol import CHECKOUT
from tasks.protocol.specs import PretrainSpec
from tasks.runtime.deployment import Deployment
from tasks.storage.backends import backend_for, is_remote
from tasks.storage.store import Store

# checkpoints after update 1 and then every 25; a kill has the time of 200 updates to arrive
UPDATES, CHECKPOINT_EVERY = 225, 25


@dataclass(frozen=True)
class Prepared:
    deployment: Deployment
    spec: PretrainSpec

    def file(self, **changes: object) -> Path:
        file = self.deployment.home / "spec.json"
        training = self.spec.training.model_copy(update=changes)
        file.write_text(self.spec.model_copy(update={"training": training}).model_dump_json())
        return file

    def start(self, *, hosts: int = 0, **changes: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tasks", "pretrain", "--spec", str(self.file(**changes))],
            cwd=CHECKOUT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "CONFIDE_HOME": str(self.deployment.home),
                "CONFIDE_STORE": self.deployment.store,
                "CONFIDE_TRACKING": self.deployment.tracking,
                "CONFIDE_CLUSTER": f"local:{hosts}" if hosts else "pool",
                "CONFIDE_HOSTS": str(hosts),
                "TF_CPP_MIN_LOG_LEVEL": "3",
            },
        )

    def run(self, *, hosts: int = 0, **changes: object) -> tuple[int, str]:
        process = self.start(hosts=hosts, **changes)
        _, errors = process.communicate()
        return process.returncode, errors

    def store(self) -> Store:
        return Store(self.deployment.store, self.deployment.home / "look")

    def checkpoints(self) -> list[str]:
        if is_remote(self.deployment.store):
            names = backend_for(self.deployment.store).sizes("unfinished")
            return sorted(name for name in names if "/update-" in name)
        return sorted(map(str, self.deployment.work.glob("pretrain-*/checkpoints-*/update-*")))

    def to_another_machine(self) -> None:
        """Delete the local folders; a training with a shared store resumes without them."""
        if is_remote(self.deployment.store):
            shutil.rmtree(self.deployment.work)
            shutil.rmtree(self.deployment.cache)

    def weights(self) -> bytes:
        content = self.store().read(f"{self.spec.output}/model.safetensors")
        assert content is not None
        return content


def prepare(untracked: Deployment, updates: int = UPDATES) -> Prepared:
    """Publish rows and a vocabulary, as earlier steps would; return a pre-training."""
    store = Store(untracked.store, untracked.cache)
    rows, public, words = "store://token_store/0", "store://token_store/1", "store://vocabulary/0"
    Ledger.open(untracked.ledger).register_dataset("notes", PrivacyUnit.PATIENT, 50.0, 1e-3)
    made = untracked.home / "made"
    size = vocabulary_in(made / "vocabulary")
    digest = rows_in(untracked, made / "rows", size, "train")
    publish(
        store, rows, made / "rows", role="private", dataset="notes", unit="patient",
        example="", declared_units=40, max_examples_per_unit=1, vocabulary_digest="public",
        digest=digest,
    )  # fmt: skip
    publish(
        store, public, made / "rows", role="public", dataset="public", vocabulary_digest="public"
    )
    publish(store, words, made / "vocabulary", vocabulary_size=size, digest="public")
    spec = spec_of(
        PretrainSpec, store_uri=rows, public_store_uri=public,
        private_store_uri=rows, vocabulary_uri=words, updates=updates,
        training={"learning_rate": 0.001, "checkpoint_every": CHECKPOINT_EVERY},
    )  # fmt: skip
    return Prepared(untracked, spec)
