import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from child_processes import program

from tasks.commands import doctor_command, settings_options
from tasks.execution import run_job as process
from tasks.local.airflow_api import AirflowAway, AirflowRefused
from tasks.runtime.deployment import Deployment
from tasks.tracking.event_log import EventLog, Identity, Tag


class Airflow:
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


def findings_by_name(look, deployment):
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
def test_fault_of_airflow_is_reported_with_a_fix(deployment, monkeypatch, airflow, name, words):
    monkeypatch.setattr(doctor_command, "connected", lambda _: airflow)
    finding = findings_by_name(doctor_command.airflow, deployment)[name]
    assert not finding.ok and finding.needed
    assert words in finding.found
    assert finding.fix


def test_healthy_airflow_has_no_fault(deployment, monkeypatch):
    monkeypatch.setattr(doctor_command, "connected", lambda _: Airflow(slots=2))
    findings = findings_by_name(doctor_command.airflow, deployment)
    assert all(finding.ok for finding in findings.values())
    assert findings["pool training"].found.endswith("2 at a time")


def test_airflow_without_a_password_is_a_fault_and_no_airflow_is_none(deployment, monkeypatch):
    assert findings_by_name(doctor_command.airflow, deployment)["Airflow"].ok
    monkeypatch.setenv("CONFIDE_AIRFLOW_API", "http://127.0.0.1:1")
    finding = findings_by_name(doctor_command.airflow, deployment)["Airflow"]
    assert not finding.ok and "CONFIDE_AIRFLOW_PASSWORD" in finding.found


@pytest.mark.parametrize(("launcher", "command"), [("docker", "docker"), ("kubernetes", "kubectl")])
def test_doctor_checks_that_the_launcher_can_start_a_step(tmp_path, monkeypatch, launcher, command):
    name = f"launcher {launcher}"
    environment = {"CONFIDE_HOME": str(tmp_path), "CONFIDE_LAUNCHER": launcher}
    deployment = Deployment.from_environment(environment)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    finding = findings_by_name(doctor_command.launcher, deployment)[name]
    assert f"there is no {command}" in finding.found
    program(tmp_path / "bin" / command, "echo No such image: confide-task >&2; exit 1")
    finding = findings_by_name(doctor_command.launcher, deployment)[name]
    assert not finding.ok and "No such image" in finding.found
    program(tmp_path / "bin" / command, "echo")
    assert findings_by_name(doctor_command.launcher, deployment)[name].ok


@pytest.mark.parametrize("package", ["tensorflow", "tensorflow-cpu"])
def test_either_package_of_tensorflow_is_enough(deployment, monkeypatch, package):
    installed = [SimpleNamespace(name=name, version="1") for name in (package, "numba")]
    monkeypatch.setattr(doctor_command, "distributions", lambda: installed)
    findings = findings_by_name(doctor_command._packages, deployment)
    assert [name for name, finding in findings.items() if finding.ok] == ["tensorflow", "numba"]


def test_store_without_write_access_is_a_fault(deployment):
    deployment.prepare()
    (deployment.home / "store").write_text("in the way")
    assert not findings_by_name(doctor_command.storage, deployment)["store"].ok


def test_undelivered_events_are_counted(deployment, monkeypatch):
    monkeypatch.setattr(doctor_command, "_mlflow", lambda _: "")
    log = EventLog.of(deployment.events, Identity("r", "r", "t", "", "corpus", "a" * 64, True))
    # An empty log is no fault.
    assert findings_by_name(doctor_command.tracking, deployment)["event logs"].ok
    log.append(Tag(name="a", value="b"))
    finding = findings_by_name(doctor_command.tracking, deployment)["event logs"]
    assert not finding.ok and not finding.needed
    assert finding.found.endswith("MLflow: 1")


@pytest.mark.parametrize(("free", "enough"), [(0.9, False), (1.1, True)])
def test_disk_check_needs_the_space_of_the_demo(deployment, monkeypatch, free, enough):
    usage = doctor_command.shutil.disk_usage("/")._replace(free=int(free * 2**30))
    monkeypatch.setattr(doctor_command.shutil, "disk_usage", lambda _: usage)
    assert findings_by_name(doctor_command._machine, deployment)["disk"].ok is enough


def test_seed_readable_by_other_users_is_a_fault(deployment):
    deployment.seeds.mkdir(parents=True, mode=0o700)
    (deployment.seeds / "a.json").write_text("{}")
    (deployment.seeds / "a.json").chmod(0o644)
    finding = findings_by_name(doctor_command._secrets, deployment)["privacy seeds"]
    assert not finding.ok
    assert "1 files that others can read" in finding.found
    (deployment.seeds / "a.json").chmod(0o600)
    assert findings_by_name(doctor_command._secrets, deployment)["privacy seeds"].ok


def test_inaccessible_python_is_a_fault_and_not_an_error(deployment, monkeypatch):
    exists = Path.exists

    def closed(path):
        if path.name in ("python", "airflow"):
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", closed)
    elsewhere = replace(deployment, task_python="/nowhere/bin/python")
    assert not findings_by_name(doctor_command._python, elsewhere)["task environment"].ok
    assert process._python(elsewhere) == sys.executable
    assert not settings_options._processor_only(replace(deployment, task_python="/bin/sh"))
