import configparser
import json
import os
import socket
import stat
import subprocess
import sys
from dataclasses import asdict

import pytest
from sqlalchemy.engine import make_url

from dp_core.errors import BadInput
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.commands import advise_command, doctor_command
from tasks.commands.local_stack import copied
from tasks.local import airflow_configuration, stack
from tasks.local.airflow_configuration import Secrets
from tasks.protocol import CHECKOUT
from tasks.protocol.settings import JobSettings
from tasks.runtime.deployment import Deployment


@pytest.fixture
def deployment(tmp_path):
    return Deployment.from_environment({"CONFIDE_HOME": str(tmp_path)})


@pytest.fixture
def secret():
    return Secrets(password="p", jwt="j", session="s", fernet="f", mlflow="m", mlflow_session="n")


def test_secrets_are_made_once_and_readable_by_their_owner_alone(tmp_path):
    users = tmp_path / airflow_configuration.MLFLOW_USERS
    users.write_text("with an unknown password")
    made = Secrets.of(tmp_path)
    assert not users.exists()
    users.write_text("with the password")
    assert Secrets.of(tmp_path) == made and users.exists()
    assert len(set(asdict(made).values())) == 6
    for file in ("secrets.json", "passwords.json"):
        assert (tmp_path / file).stat().st_mode & 0o077 == 0
    assert json.loads((tmp_path / "passwords.json").read_text()) == {"admin": made.password}


def test_only_mlflow_receives_its_secrets(deployment, secret, tmp_path, monkeypatch):
    planted = {
        "AIRFLOW__CORE__FERNET_KEY": "planted",
        "CONFIDE_LEDGER": "postgresql://ledger:planted@db/ledger",
        "CONFIDE_AIRFLOW_PASSWORD": "planted",
        "MLFLOW_TRACKING_PASSWORD": "planted",
        "GOOGLE_APPLICATION_CREDENTIALS": "/planted",
    }
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    to_all = airflow_configuration.environment(deployment, secret, {"airflow": 1, "mlflow": 2})
    env = airflow_configuration.mlflow_environment(deployment, tmp_path, secret)
    assert env["MLFLOW_AUTH_ADMIN_PASSWORD"] == "m"
    assert env["MLFLOW_BACKEND_STORE_URI"] == deployment.tracking
    assert deployment.tracking not in airflow_configuration.mlflow_command(
        2
    )  # every user may read the command line
    assert not [name for name in env if name.startswith(("AIRFLOW", "CONFIDE", "_AIRFLOW"))]
    assert not set(asdict(secret).values()) & set(env.values()) - {"m", "n"}  # Airflow's secrets
    assert "planted" not in str(env)
    assert all(env[name] == to_all[name] for name in env.keys() & to_all.keys())  # PATH, HOME, …
    working = airflow_configuration.mlflow_folder(deployment)
    assert list(working.iterdir()) == []  # its working folder contains no settings
    assert working.stat().st_mode & 0o077 == 0
    assert not {"m", "n"} & set(to_all.values())
    assert (tmp_path / "mlflow-auth.ini").stat().st_mode & 0o077 == 0


def test_port_agrees_in_all_settings_and_settings_from_outside_are_dropped(
    deployment, secret, monkeypatch
):
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    monkeypatch.setenv("AIRFLOW__API__SSL_CERT", "x")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("NO_PROXY", "internal.example")
    stack = airflow_configuration.environment(deployment, secret, {"airflow": 1234, "mlflow": 2})
    assert stack["AIRFLOW__API__PORT"] == "1234"
    assert stack["AIRFLOW__API__BASE_URL"] == "http://127.0.0.1:1234"
    assert stack["AIRFLOW__CORE__EXECUTION_API_SERVER_URL"] == "http://127.0.0.1:1234/execution/"
    assert stack["AIRFLOW__API__HOST"] == "127.0.0.1"
    assert stack["AIRFLOW__CORE__EXECUTOR"] == "LocalExecutor"
    assert stack["NO_PROXY"] == "internal.example,127.0.0.1,localhost"
    assert not {"AIRFLOW__API__SSL_CERT", "PYTHONDONTWRITEBYTECODE"} & stack.keys()


@pytest.fixture
def taken():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_two_commands_do_not_start_one_stack_at_once(deployment, monkeypatch, tmp_path):
    """Each command would stop the other's services, or take their port."""
    began = []

    def start_meanwhile(*_):
        began.append(1)
        with pytest.raises(BadInput, match="another command is starting it"):
            stack.start(deployment, (), print)

    monkeypatch.setattr(stack, "_ORCHESTRATOR", tmp_path)
    monkeypatch.setattr(stack, "_start_on", start_meanwhile)
    stack.start(deployment, (), print)
    stack.start(deployment, (), print)  # the first command has ended
    assert began == [1, 1]


def chosen(service: str = "airflow") -> int:
    with airflow_configuration.free_ports([service]) as ports:
        return ports[service]


def test_taken_port_is_not_chosen(taken, monkeypatch):
    monkeypatch.setitem(airflow_configuration.PORTS, "airflow", ("CONFIDE_AIRFLOW_PORT", taken))
    assert chosen() != taken


def test_named_port_is_never_replaced(taken, monkeypatch):
    for port, fault in (
        (str(taken), "is taken"),
        ("99999", "is taken"),
        ("eighty", "is not a port"),
    ):
        monkeypatch.setenv("CONFIDE_AIRFLOW_PORT", port)
        with pytest.raises(BadInput, match=f"{port}.* {fault}"):
            chosen()


CHOOSE = """
import sys
from tasks.local import airflow_configuration
with airflow_configuration.free_ports(("airflow", "mlflow")) as ports:
    print(*ports.values(), flush=True)
    sys.stdin.read()
"""


def test_stacks_that_start_at_the_same_time_choose_different_ports():
    """Each process reserves its ports without binding them, as a starting stack does."""
    words = [sys.executable, "-c", CHOOSE]
    pipe = subprocess.PIPE
    starting = [
        subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, cwd=CHECKOUT) for _ in range(6)
    ]
    try:
        ports = [port for process in starting for port in process.stdout.readline().split()]
    finally:
        for process in starting:
            process.communicate()
    assert len(ports) == 12 and len(set(ports)) == 12
    with airflow_configuration.free_ports(["airflow"]) as first:
        assert chosen() != first["airflow"]
    assert {process.returncode for process in starting} == {0}


@pytest.mark.cases
def test_every_database_is_in_its_home_whatever_the_name_of_the_folder(name, tmp_path, monkeypatch):
    home = tmp_path / name / "home"
    deployment = Deployment.from_environment({"CONFIDE_HOME": str(home)})
    deployment.prepare()
    folder = airflow_configuration.airflow_home(deployment)
    folder.mkdir()
    secret = airflow_configuration.Secrets.of(folder)
    airflow = airflow_configuration.environment(deployment, secret, {"airflow": 1, "mlflow": 2})
    steps = Deployment.from_environment(airflow)
    for place in ("store", "ledger", "tracking"):  # the same as for the command line
        assert getattr(steps, place) == getattr(deployment, place)
    mlflow = airflow_configuration.mlflow_environment(deployment, folder, secret)
    users = configparser.ConfigParser()  # MLflow reads the file with this parser
    users.read(mlflow["MLFLOW_AUTH_CONFIG_PATH"])
    urls = {
        deployment.ledger: home / "ledger.db",
        deployment.tracking: home / "mlflow.db",
        mlflow["MLFLOW_BACKEND_STORE_URI"]: home / "mlflow.db",
        users["mlflow"]["database_uri"]: folder / airflow_configuration.MLFLOW_USERS,
        airflow["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"]: folder / "airflow.db",
    }
    for url, file in urls.items():
        assert make_url(url).database == str(file)
    Ledger.open(deployment.ledger).register_dataset("ward", PrivacyUnit.PATIENT, 8.0, 1e-5)
    monkeypatch.setenv("CONFIDE_HOME", str(home))
    ward = JobSettings(private_format="text", private_path="/ward", private_dataset="ward")
    assert advise_command._ledger_with_budget(ward) is not None
    assert stat.S_IMODE((home / "ledger.db").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [name]  # noqa: PTH208 - the names in the file system
    findings = {f.name: f for f in doctor_command.ledger(deployment)}
    assert findings["ledger's file"].ok
    assert findings["ledger's file"].found == f"{home / 'ledger.db'}: mode 600"
    copied(deployment, tmp_path / "backup")
    assert (tmp_path / "backup" / "ledger.db").stat().st_size > 0
