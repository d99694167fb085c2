import os
import re
import runpy
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from child_processes import free_port, wait_for
from mlflow.exceptions import MlflowException  # noqa: TID251 - uses the server as a step does
from mlflow.tracking import MlflowClient  # noqa: TID251

from dp_core.labels import Operator, Public
from tasks.runtime.deployment import Deployment
from tasks.tracking.event_log import Begun, EventLog, Identity, LoggedModel, metric
from tasks.tracking.mlflow import KEY_TAG, OPERATOR, PUBLIC, Delivery
from tasks.tracking.mlflow import PUBLIC as SHOWN

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docker" / "mlflow-users"
ADMIN, STEPS = ("confide", "the admin's password"), ("steps", "the steps' password")
IDENTITY = Identity("run-1", "dp_bert today", "pretraining", "", "pretrain", "a" * 64, False)


def make_users(address: str) -> str:
    """Run the script as its container does; return the reason of an early end, or nothing."""
    with pytest.MonkeyPatch.context() as patch:
        speak_as(ADMIN, patch)
        patch.setenv("MLFLOW_TRACKING_URI", address)
        patch.setenv("CONFIDE_STEPS_USERNAME", STEPS[0])
        patch.setenv("CONFIDE_STEPS_PASSWORD", STEPS[1])
        try:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        except SystemExit as ended:
            return str(ended.code)
    return ""


def users_of(address: str) -> Any:
    """Return the client of the server's users; its import prints warnings."""
    from mlflow.server import get_app_client  # noqa: TID251

    return get_app_client("basic-auth", address)


def speak_as(user: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user[0])
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", user[1])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server as docker/mlflow-server starts it, with SQLite."""
    folder = tmp_path_factory.mktemp("mlflow")
    port = free_port()
    settings = folder / "auth.ini"
    starter = (ROOT / "docker" / "mlflow-server").read_text()
    (ini,) = re.findall(r"<<INI\n(.+)^INI$", starter, re.M | re.S)
    users = f"sqlite:///{folder}/users.db"
    settings.write_text(ini.replace("${CONFIDE_MLFLOW_AUTH_DATABASE:?}", users))
    environment = os.environ | {
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder}/mlflow.db",
        "MLFLOW_AUTH_ADMIN_USERNAME": ADMIN[0],
        "MLFLOW_AUTH_ADMIN_PASSWORD": ADMIN[1],
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "a key",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    words = [sys.executable, "-m", "mlflow", "server", "--app-name", "basic-auth", "--workers", "1"]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    words += ["--artifacts-destination", str(folder / "artifacts")]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            words, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    health = f"{address}/health"

    def answers() -> bool:
        assert server.poll() is None, (folder / "log").read_text()[-2000:]
        with suppress(OSError), urllib.request.urlopen(health, timeout=10):  # noqa: S310
            return True
        return False

    try:
        wait_for(answers, 240, what="MLflow's answer", pause=0.5)
        yield address
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)


@pytest.fixture(scope="module")
def served(address: str) -> str:
    """The address after the user was created; the admin has registered a model before."""
    with pytest.MonkeyPatch.context() as patch:
        speak_as(ADMIN, patch)
        admin = MlflowClient(address)
        admin.create_experiment("somebody else's")
        admin.create_registered_model("an-earlier-one")
    assert make_users(address) == ""
    assert make_users(address) == ""  # every `up` runs it
    return address


@pytest.fixture
def here(served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """A deployment that logs to the server as the steps' user."""
    speak_as(STEPS, monkeypatch)
    home = {"CONFIDE_HOME": str(tmp_path), "CONFIDE_TRACKING": served}
    deployment = Deployment.from_environment(home)
    deployment.prepare()
    return deployment


def test_step_user_can_log_and_register_models(served, here, tmp_path):
    weights = tmp_path / "weights"
    weights.write_text("w")
    log = EventLog.of(here.events, IDENTITY)
    kept = [log.keep(weights)]
    log.append(Begun(), metric("ε", Public(1.0), 1), metric("ε", Operator(1.0), 1))
    tags = {"confide.spec_hash": IDENTITY.spec_hash}
    for name in ("a-new-one", "an-earlier-one"):
        log.append(LoggedModel(name=name, files=kept, tags=tags, description=""))
    assert Delivery(here).deliver(log)
    client = MlflowClient(served)
    for name in ("a-new-one", "an-earlier-one"):
        assert len(client.search_model_versions(f"name = '{name}'")) == 1
    shown = client.get_experiment_by_name(SHOWN).experiment_id
    (run,) = client.search_runs([shown], f"tags.`{KEY_TAG}` = '{IDENTITY.key('step')}'")
    assert len(client.list_artifacts(run.info.run_id, "model")) == 1


def test_duplicate_run_that_cannot_be_deleted_is_ignored(served, here):
    client = MlflowClient(served)
    experiment = client.get_experiment_by_name(OPERATOR).experiment_id
    key = IDENTITY.key("parent")
    for later in (0, 1):
        client.create_run(experiment, start_time=1000 + later, tags={KEY_TAG: key})
    log = EventLog.of(here.events, IDENTITY)
    log.append(metric("x", Operator(1.0), 1, target="parent"))
    assert Delivery(here).deliver(log)
    runs = client.search_runs([experiment], f"tags.`{KEY_TAG}` = '{key}'")
    assert len(runs) == 1


def test_step_user_is_no_admin(served, monkeypatch):
    speak_as(STEPS, monkeypatch)
    client, users = MlflowClient(served), users_of(served)
    assert {e.name for e in client.search_experiments()} == {PUBLIC, OPERATOR}
    shown = client.get_experiment_by_name(SHOWN).experiment_id
    refused = [
        lambda: users.create_user("somebody", "a long password"),
        lambda: users.update_user_admin(STEPS[0], True),
        lambda: users.update_user_password(ADMIN[0], "a long password"),
        lambda: users.grant_user_permission(STEPS[0], "experiment", shown, "MANAGE"),
        lambda: client.delete_experiment(shown),
        lambda: client.get_experiment_by_name("somebody else's").experiment_id,
    ]
    for attempt in refused:
        with pytest.raises((MlflowException, AttributeError)):
            attempt()


def test_admin_is_refused_as_step_user(served, monkeypatch):
    speak_as(ADMIN, monkeypatch)
    users = users_of(served)
    users.update_user_admin(STEPS[0], True)
    try:
        answer = make_users(served)
    finally:
        users.update_user_admin(STEPS[0], False)
    assert "is an admin" in answer
