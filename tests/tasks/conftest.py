"""Fixtures of the step tests: deployments, a tracker and storage."""

import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from child_processes import free_port, wait_for
from command_line import Confide

from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.runtime.deployment import Deployment

EMULATOR = """
import sys
from gcp_storage_emulator.server import create_server
create_server("127.0.0.1", int(sys.argv[1]), in_memory=True, default_bucket="confide-test").run()
"""


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    empty = Deployment.from_environment({"CONFIDE_HOME": str(tmp_path / "home")})
    empty.prepare()
    return empty


@pytest.fixture
def registered(deployment: Deployment) -> Deployment:
    """A deployment with the data set `notes`: patients, ε = 2, δ = 1e-5."""
    ledger = Ledger.open(deployment.ledger)
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, 2.0, 1e-5)
    return deployment


@pytest.fixture
def ledger(deployment: Deployment) -> Ledger:
    """The ledger of a deployment with data sets of patients' notes and of labelled documents."""
    ledger = Ledger.open(deployment.ledger)
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, 20.0, 1e-4)
    ledger.register_dataset("labels", PrivacyUnit.DOCUMENT, 500.0, 1e-3)
    return ledger


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch, deployment: Deployment) -> None:
    monkeypatch.setenv("CONFIDE_HOME", str(deployment.home))
    for name in ("CONFIDE_DEBUG", "CONFIDE_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def confide(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Confide:
    return Confide(monkeypatch, capsys)


@pytest.fixture(scope="session")
def honest_pack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An evidence pack that holds, and the folder of its model."""
    from evidence_examples import EARLIER, TRAINING, pack_of, released_model, settled
    from step_outputs import output_folder

    home = tmp_path_factory.mktemp("evidence")
    deployment = Deployment.from_environment({"CONFIDE_HOME": str(home / "home")})
    deployment.prepare()
    uri = released_model(deployment, settled(deployment, EARLIER, TRAINING))
    model = home / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "PRIVACY.md", "privacy_statement.json"):
        shutil.copyfile(output_folder(deployment, uri) / name, model / name)
    return pack_of(deployment, uri, home / "pack"), model


@pytest.fixture
def pack(honest_pack: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest_pack[0], tmp_path / "pack"))


@pytest.fixture
def released(honest_pack: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest_pack[1], tmp_path / "model"))


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs; creating its tables takes longer than any test."""
    from tasks.tracking.mlflow import reachable

    home = tmp_path_factory.mktemp("mlflow")
    deployment = Deployment.from_environment({"CONFIDE_HOME": str(home)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of MLflow while it creates its tables
        assert reachable(deployment)
    return home / "mlflow.db"


@pytest.fixture
def tracked(deployment: Deployment, empty_mlflow: Path) -> Deployment:
    shutil.copyfile(empty_mlflow, deployment.home / "mlflow.db")
    return deployment


@pytest.fixture
def untracked(deployment: Deployment) -> Deployment:
    """A deployment whose MLflow does not answer."""
    return replace(deployment, tracking=f"http://127.0.0.1:{free_port()}")


@pytest.fixture
def no_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write event logs without delivering them to MLflow."""
    from tasks.tracking.mlflow import Delivery

    monkeypatch.setattr(Delivery, "deliver", lambda *_: True)
    monkeypatch.setattr(Delivery, "url", lambda *_: "")


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """A bucket of an emulator that the real google-cloud-storage client accesses.

    The emulator runs in a separate process, so it survives the death of its clients.
    """
    pytest.importorskip("gcp_storage_emulator.server", reason="needs gcp-storage-emulator")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", EMULATOR, str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: _answers(port), what="the bucket's emulator", pause=0.1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
            yield "confide-test"
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0
