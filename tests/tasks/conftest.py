"""What the tests of the steps share: a deployment of their own, and places to keep files."""

from __future__ import annotations

import shutil
import socket
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.runtime.deployment import Deployment


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    """A deployment in a folder of its own, with nothing in it."""
    found = Deployment.from_environment({"CONFIDE_HOME": str(tmp_path / "home")})
    found.prepare()
    return found


@pytest.fixture
def registered(deployment: Deployment) -> Deployment:
    """A deployment with the data set `notes`: patients, ε = 2, δ = 1e-5."""
    ledger = Ledger.open(deployment.ledger)
    ledger.register_dataset("notes", PrivacyUnit.PATIENT, 2.0, 1e-5)
    return deployment


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch, deployment: Deployment) -> None:
    """The command line's own deployment is the test's."""
    monkeypatch.setenv("CONFIDE_HOME", str(deployment.home))
    for name in ("CONFIDE_DEBUG", "CONFIDE_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs: making its tables takes longer than any test here."""
    from tasks.tracking.mlflow import reachable

    home = tmp_path_factory.mktemp("mlflow")
    deployment = Deployment.from_environment({"CONFIDE_HOME": str(home)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's own, while it makes its tables
        assert reachable(deployment)
    return home / "mlflow.db"


@pytest.fixture
def tracked(deployment: Deployment, empty_mlflow: Path) -> Deployment:
    """A deployment whose MLflow is ready."""
    shutil.copyfile(empty_mlflow, deployment.home / "mlflow.db")
    return deployment


@pytest.fixture
def untracked(deployment: Deployment) -> Deployment:
    """A deployment whose MLflow does not answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return replace(deployment, tracking=f"http://127.0.0.1:{port}")


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """A bucket of an emulator that the real google-cloud-storage client talks to."""
    module = pytest.importorskip(
        "gcp_storage_emulator.server", reason="needs the package gcp-storage-emulator"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = module.create_server("127.0.0.1", port, in_memory=True)
    server.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
            from tasks.storage.gcs import _client

            _client().create_bucket("confide-test")
            yield "confide-test"
    finally:
        server.stop()  # its thread would keep the interpreter alive
