"""The commands `up`, `demo` and `down` with real Airflow and MLflow, and simulated steps."""

import base64
import io
import json
import socket
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from dp_core.errors import BadInput, ConfideError
from tasks.commands.local_stack import announce
from tasks.local import demo
from tasks.local import stack as local
from tasks.local.airflow_configuration import airflow_home
from tasks.protocol.job import job_steps
from tasks.protocol.settings import JobSettings
from tasks.runtime.deployment import Deployment
from tasks.storage.backends import local_path

CHECKOUT = Path(__file__).resolve().parents[2]
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
LISTENING = "0A"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="sockets and sessions are read from /proc"),
    pytest.mark.skipif(
        not (CHECKOUT / ".venv/orchestrator/bin/python").exists(),
        reason="Airflow's environment is missing: make setup-dev",
    ),
]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    python = home / "fake-python"
    fake = CHECKOUT / "tests" / "dags"
    python.write_text(
        f'#!/bin/sh\n[ "$2" = tasks ] && exec "{sys.executable}" "{fake}/fake_step.py" "$@"\n'
        f'exec "{sys.executable}" "{fake}/fake_fork_server.py" "$3"\n'
    )
    python.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONFIDE_HOME", str(home))
        patch.setenv("CONFIDE_TASK_PYTHON", str(python))
        for name in ("CONFIDE_STORE", "CONFIDE_LEDGER", "CONFIDE_TRACKING", "CONFIDE_LAUNCHER"):
            patch.delenv(name, raising=False)
        yield Deployment.from_environment()


@pytest.fixture(scope="module")
def served(deployment):
    stack = local.start(deployment, local.PAGES, lambda line: None)
    yield stack
    local.stop(deployment)
    assert sessions(stack) == []
    for port in stack.ports.values():
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def sessions(stack, *components) -> list[Path]:
    """Return the running processes of the sessions of the stack, or of some of its components."""
    leaders = {stack.components[name].pid for name in components or stack.components}
    processes = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended meanwhile
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) in leaders and fields[0] not in "ZX":
                processes.append(entry)
    return processes


def listeners(stack) -> set[str]:
    """Return the local addresses (hexadecimal, as in /proc/net) on which the stack listens."""
    inodes = set()
    for process in sessions(stack):
        for descriptor in (process / "fd").glob("*"):
            with suppress(OSError):
                inodes.add(str(descriptor.readlink()).removeprefix("socket:[")[:-1])
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENING and row[9] in inodes}


def test_stack_listens_on_loopback_only(served):
    addresses = listeners(served)
    assert addresses
    assert addresses <= LOOPBACK


def test_files_of_the_stack_are_readable_by_their_owner_only(served, deployment):
    folder = airflow_home(deployment)
    for name in ("stack.json", "secrets.json", "passwords.json", "airflow.db", "mlflow-auth.ini"):
        assert (folder / name).stat().st_mode & 0o077 == 0, name


def test_airflow_refuses_a_wrong_password(served):
    from tasks.local.airflow_api import AirflowApi, AirflowRefused

    with pytest.raises(AirflowRefused):
        AirflowApi(served.airflow_url, "admin", "wrong").unfinished_runs("dp_bert")


def mlflow(stack, password: str) -> int:
    """Return the HTTP status of MLflow's answer; wait while MLflow starts."""
    credentials = base64.b64encode(f"admin:{password}".encode()).decode()
    place = f"{stack.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=1"
    headers = {"Authorization": f"Basic {credentials}"}
    request = urllib.request.Request(place, headers=headers)  # noqa: S310 - the test's server
    deadline = time.monotonic() + 240
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
                return answer.status
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code
        except OSError:
            assert time.monotonic() < deadline, "MLflow does not answer"
            time.sleep(0.5)


def test_mlflow_accepts_only_the_mlflow_password(served):
    assert mlflow(served, served.mlflow_password) == 200
    assert mlflow(served, "wrong") == 401
    assert mlflow(served, served.password) == 401


def test_mlflow_processes_receive_no_secret_of_airflow(served, deployment):
    kept = json.loads((airflow_home(deployment) / "secrets.json").read_text())
    airflow_secrets = [kept[name].encode() for name in ("password", "jwt", "session", "fernet")]
    inspected = 0
    for process in sessions(served, "mlflow"):
        with suppress(OSError):  # the process has ended meanwhile
            environment, works_in = (process / "environ").read_bytes(), (process / "cwd").readlink()
            assert not [secret for secret in airflow_secrets if secret in environment]
            assert b"AIRFLOW" not in environment
            assert list(works_in.iterdir()) == []
            inspected += bool(environment)
    assert inspected


def output_folder(deployment, address):
    return local_path(deployment.open_store().location(address))


def test_demo_runs_to_its_report_on_the_running_stack(served, deployment):
    written = io.StringIO()
    report = demo.run(deployment, JobSettings(), Console(file=written, width=120))
    result = json.loads((output_folder(deployment, report) / "result.json").read_text())
    assert result["step"] == "report"
    done = [line.split()[2] for line in written.getvalue().splitlines() if "✓" in line]
    others = ["settings", "starts", "trainings", "measurements", "give_back", "outcome"]
    assert len(done) == len(job_steps(JobSettings())) + len(others)
    assert set(others) <= set(done)
    assert done[-3:] == ["report", "give_back", "outcome"]
    # the demo did not start the stack, so it does not stop it
    assert local.running(deployment) is not None
    logs = [file.read_text() for file in deployment.logs.glob("airflow/**/*.log")]
    assert any("vocabulary: working" in log for log in logs)
    assert not [log for log in logs if "started anew" in log]  # the fork server ran every step


def test_failed_step_is_reported_with_its_reason_and_its_log(served, deployment):
    (deployment.home / "fail").write_text("canaries=2")
    settings = JobSettings(seed=2, canary_rates="0.5")
    with pytest.raises(ConfideError) as failed:
        demo.run(deployment, settings, Console(file=io.StringIO(), width=120))
    (deployment.home / "fail").unlink()
    line = str(failed.value)
    assert line.startswith("canaries: made to fail with 2 (exit code 2)")
    assert Path(line.rpartition("Its log: ")[2]).exists()


def ended(api, dag: str, runs: int) -> list[dict]:
    """Return the runs of a DAG after `runs` of them have ended; Airflow may be slow under load."""
    deadline = time.monotonic() + 240
    while True:
        dag_runs = api._call("GET", f"/api/v2/dags/{dag}/dagRuns?limit=100&order_by=id")["dag_runs"]
        if sum(run["state"] in {"success", "failed"} for run in dag_runs) >= runs:
            return dag_runs
        assert time.monotonic() < deadline, f"{dag}: {[run['state'] for run in dag_runs]}"
        time.sleep(0.5)


def test_announced_corpus_version_starts_a_training(served, deployment):
    """An asset event starts `new_corpus`, which starts `dp_bert` with the version as data."""
    api = served.api()
    before = len(ended(api, "dp_bert", 0))
    answer = CliRunner().invoke(announce, ["synthetic-notes", "2026-11"])
    assert answer.exit_code == 0, answer.output
    run = ended(api, "dp_bert", before + 1)[-1]
    assert run["dag_run_id"] == "corpus__synthetic-notes__2026-11"
    conf = {"private_dataset": "synthetic-notes", "data_version": "2026-11"}
    assert (run["state"], run["conf"]) == ("success", conf)
    report = job_steps(JobSettings(data_version="2026-11"))["report"].output
    assert (output_folder(deployment, report) / "result.json").exists()
    # The task's page links to its MLflow run and to the report.
    place = f"/api/v2/dags/dp_bert/dagRuns/{run['dag_run_id']}/taskInstances/report/links"
    links = api._call("GET", place)["extra_links"]
    run_page = "http://127.0.0.1:5000/#/experiments/1/runs/report"
    assert links["MLflow run"].partition("?")[0] == run_page
    assert links["Report"].partition("?")[0] == f"{run_page}/artifacts/report/report.html"


def test_invalid_corpus_version_starts_no_training(served, tmp_path):
    api = served.api()
    before = len(ended(api, "dp_bert", 0))
    answered = len(ended(api, "new_corpus", 0))
    answer = CliRunner().invoke(announce, ["synthetic-notes", f"2026; touch {tmp_path}/here"])
    assert answer.exit_code == 0
    assert ended(api, "new_corpus", answered + 1)[-1]["state"] == "failed"
    assert len(ended(api, "dp_bert", 0)) == before
    assert list(tmp_path.iterdir()) == []


def test_unconfigured_corpus_cannot_be_announced(served):
    with pytest.raises(BadInput, match="CONFIDE_CORPORA"):
        CliRunner().invoke(announce, ["ward-notes", "1"], catch_exceptions=False)


def test_settings_refused_by_airflow_start_no_run(served, deployment):
    beyond = JobSettings.model_construct(**JobSettings().model_dump() | {"layers": 1000})
    with pytest.raises(BadInput, match="1000 is greater than the maximum of 48"):
        demo.run(deployment, beyond, Console(file=io.StringIO()))
    assert served.api().unfinished_runs("dp_bert") == []
