"""`confide doctor` asks a deployment's services, and names what is wrong and what to do."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.commands import doctor, doctor_services, settings
from tasks.execution import step_process as process
from tasks.local.airflow_api import AirflowAway, AirflowRefused
from tasks.runtime.deployment import Deployment
from tasks.tracking.event_log import EventLog, Identity, Tag


class Airflow:
    """An Airflow that answers as it is told to."""

    def __init__(self, slots=1, health=None, errors=(), away=False, refuses=False):
        self.slots, self.sick, self.errors = slots, health or {}, list(errors)
        self.away, self.refuses = away, refuses

    def health(self):
        if self.away:
            raise AirflowAway("connection refused")
        return {"scheduler": "healthy", **self.sick}

    def import_errors(self):
        if self.refuses:
            raise AirflowRefused("Invalid credentials")
        return self.errors

    def pool_slots(self, name):
        assert name == "training"
        return self.slots


@pytest.fixture
def deployment(tmp_path, monkeypatch):
    for name in ("CONFIDE_AIRFLOW_API", "CONFIDE_AIRFLOW_PASSWORD", "CONFIDE_TASK_IMAGE"):
        monkeypatch.delenv(name, raising=False)
    return Deployment.from_environment({"CONFIDE_HOME": str(tmp_path)})


def found(look, deployment):
    return {finding.name: finding for finding in look(deployment)}


@pytest.mark.parametrize(
    ("airflow", "name", "words"),
    [
        (Airflow(slots=None), "pool training", "there is no such pool"),
        (Airflow(health={"triggerer": "unhealthy"}), "Airflow", "not healthy: triggerer"),
        (Airflow(errors=["dp_bert.py: boom"]), "Airflow", "a DAG cannot be read: dp_bert.py: boom"),
        (Airflow(away=True), "Airflow", "does not answer"),
        (Airflow(refuses=True), "Airflow", "refused: Invalid credentials"),
    ],
)
def test_what_is_wrong_with_airflow_is_named(deployment, monkeypatch, airflow, name, words):
    monkeypatch.setattr(doctor_services, "connected", lambda _: airflow)
    finding = found(doctor_services.airflow, deployment)[name]
    assert not finding.ok and finding.needed
    assert words in finding.found
    assert finding.fix


def test_a_healthy_airflow_is_found_healthy(deployment, monkeypatch):
    monkeypatch.setattr(doctor_services, "connected", lambda _: Airflow(slots=2))
    findings = found(doctor_services.airflow, deployment)
    assert all(finding.ok for finding in findings.values())
    assert findings["pool training"].found.endswith("2 at a time")


def test_no_airflow_is_no_fault_and_one_without_its_password_is(deployment, monkeypatch):
    assert found(doctor_services.airflow, deployment)["Airflow"].ok
    monkeypatch.setenv("CONFIDE_AIRFLOW_API", "http://127.0.0.1:1")
    finding = found(doctor_services.airflow, deployment)["Airflow"]
    assert not finding.ok
    assert "CONFIDE_AIRFLOW_PASSWORD" in finding.found


def program(folder: Path, name: str, says: str, code: int) -> None:
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit {code}\n")
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("launcher", "command", "name"),
    [
        ("docker", "docker", "launcher docker"),
        ("kubernetes", "kubectl", "launcher kubernetes"),
    ],
)
def test_a_launcher_is_asked_whether_it_can_start_a_step(
    tmp_path, monkeypatch, launcher, command, name
):
    told = {"CONFIDE_HOME": str(tmp_path), "CONFIDE_LAUNCHER": launcher}
    deployment = Deployment.from_environment(told)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert f"there is no {command}" in found(doctor_services.launcher, deployment)[name].found
    program(tmp_path / "bin", command, "No such image: confide-task", 1)
    finding = found(doctor_services.launcher, deployment)[name]
    assert not finding.ok
    assert "No such image" in finding.found
    program(tmp_path / "bin", command, "", 0)
    assert found(doctor_services.launcher, deployment)[name].ok


def test_the_ledger_tells_its_schema(deployment):
    finding = found(doctor_services.ledger, deployment)["ledger"]
    assert finding.ok
    assert "schema " in finding.found


def test_a_store_that_cannot_be_written_is_found(deployment):
    deployment.prepare()
    (deployment.home / "store").write_text("in the way")
    assert not found(doctor_services.storage, deployment)["store"].ok


def test_numbers_that_wait_for_mlflow_are_counted(deployment, monkeypatch):
    monkeypatch.setattr(doctor_services, "_mlflow", lambda _: "")
    log = EventLog.of(deployment.events, Identity("r", "r", "t", "", "corpus", "a" * 64, True))
    assert found(doctor_services.tracking, deployment)["event logs"].ok  # one that is empty
    log.append(Tag(name="a", value="b"))
    finding = found(doctor_services.tracking, deployment)["event logs"]
    assert not finding.ok and not finding.needed
    assert finding.found.endswith("MLflow: 1")


@pytest.mark.parametrize(("free", "enough"), [(0.9, False), (1.1, True)])
def test_a_disk_with_room_for_the_demo_is_enough(deployment, monkeypatch, free, enough):
    usage = doctor.shutil.disk_usage("/")._replace(free=int(free * 2**30))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    assert found(doctor._machine, deployment)["disk"].ok is enough


def test_what_makes_the_noise_is_asked_for(deployment):
    assert found(doctor._packages, deployment)["numba"].ok


def test_a_seed_that_others_can_read_is_found(deployment):
    deployment.seeds.mkdir(parents=True, mode=0o700)
    (deployment.seeds / "a.json").write_text("{}")
    (deployment.seeds / "a.json").chmod(0o644)
    finding = found(doctor._secrets, deployment)["privacy seeds"]
    assert not finding.ok
    assert "1 files that others can read" in finding.found
    (deployment.seeds / "a.json").chmod(0o600)
    assert found(doctor._secrets, deployment)["privacy seeds"].ok


def test_python_of_another_user_is_a_finding_and_no_error(deployment, monkeypatch):
    exists = Path.exists

    def closed(path):
        if path.name in ("python", "airflow"):
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", closed)
    elsewhere = replace(deployment, task_python="/nowhere/bin/python")
    assert not found(doctor._python, elsewhere)["task environment"].ok
    assert process._python(elsewhere) == sys.executable
    assert not settings._processor_only(replace(deployment, task_python="/bin/sh"))
