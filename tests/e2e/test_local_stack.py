"""`up`, `demo` and `down` for real: Airflow and MLflow as processes, with steps that only pretend.

(That the steps do their work is tested where they are; here it is what starts and follows them.)
"""

import base64
import io
import json
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from dp_core.errors import BadInput, ConfideError
from tasks.commands.announce_command import command as announce
from tasks.local import demo
from tasks.local import stack as local
from tasks.protocol import JobSettings, dp_bert_steps
from tasks.runtime.deployment import Deployment
from tasks.storage import local_path

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
    """The stack that `up` starts, for all tests of this file."""
    stack = local.start(deployment, local.PAGES, lambda line: None)
    yield stack
    local.stop(deployment)
    assert sessions(stack) == []
    for port in stack.ports.values():
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def sessions(stack) -> list[int]:
    """Return the processes of the stack's sessions that still run."""
    leaders = {process.pid for process in stack.components.values()}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) in leaders and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def listeners(stack) -> set[str]:
    """Return the local addresses (hexadecimal, as the kernel writes them) that it listens on."""
    inodes = set()
    for pid in sessions(stack):
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = str(descriptor.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == LISTENING and row[9] in inodes}


def test_everything_listens_on_loopback_alone(served):
    found = listeners(served)
    assert found
    assert found <= LOOPBACK


def test_what_the_stack_keeps_is_for_its_owner_alone(served, deployment):
    folder = local.airflow_home(deployment)
    for name in ("stack.json", "secrets.json", "passwords.json", "airflow.db", "mlflow-auth.ini"):
        assert (folder / name).stat().st_mode & 0o077 == 0, name


def test_a_wrong_password_opens_nothing(served):
    from tasks.local.airflow_api import AirflowApi, AirflowRefused

    with pytest.raises(AirflowRefused):
        AirflowApi(served.airflow_url, "admin", "wrong").unfinished_runs("dp_bert")


def mlflow(stack, password: str) -> int:
    """Return the status with which MLflow answers; it may still be starting."""
    words = base64.b64encode(f"admin:{password}".encode()).decode()
    place = f"{stack.mlflow_url}/api/2.0/mlflow/experiments/search?max_results=1"
    told = {"Authorization": f"Basic {words}"}
    asked = urllib.request.Request(place, headers=told)  # noqa: S310 - our own server
    deadline = time.monotonic() + 240
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=30) as answer:  # noqa: S310
                return answer.status
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code
        except OSError:
            assert time.monotonic() < deadline, "MLflow does not answer"
            time.sleep(0.5)


def test_mlflow_asks_for_its_password(served):
    assert mlflow(served, served.mlflow_password) == 200
    assert mlflow(served, "wrong") == 401
    assert mlflow(served, served.password) == 401


def test_mlflow_s_processes_hold_nothing_of_airflow_s(served, deployment):
    kept = json.loads((local.airflow_home(deployment) / "secrets.json").read_text())
    airflow_s = [kept[name].encode() for name in ("password", "jwt", "session", "fernet")]
    leader = served.components["mlflow"].pid
    looked_at = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            session = (process / "stat").read_text().rpartition(")")[2].split()[3]
            told = (process / "environ").read_bytes() if int(session) == leader else b""
            works_in = (process / "cwd").readlink() if told else None
        except OSError:  # it has ended meanwhile
            continue
        if told:
            looked_at += 1
            assert not [secret for secret in airflow_s if secret in told]
            assert b"AIRFLOW" not in told
            assert list(works_in.iterdir()) == []
    assert looked_at


def output_folder(deployment, address):
    return local_path(deployment.open_store().location(address))


def test_the_demo_runs_to_its_report_on_the_stack_that_serves(served, deployment):
    written = io.StringIO()
    report = demo.run(deployment, JobSettings(), Console(file=written, width=120))
    result = json.loads((output_folder(deployment, report) / "result.json").read_text())
    assert result["step"] == "report"
    done = [line.split()[2] for line in written.getvalue().splitlines() if "✓" in line]
    steps = dp_bert_steps(JobSettings())
    assert sorted(done) == sorted(["settings", "kept_models", "give_back", *steps])
    assert done[-1] == "report"
    assert local.running(deployment) is not None  # it was not the demo's to stop
    logs = [file.read_text() for file in deployment.logs.glob("airflow/**/*.log")]
    assert any("vocabulary: working" in log for log in logs)
    assert not [log for log in logs if "started anew" in log]  # all by the fork server


def test_a_failing_step_is_told_with_its_reason_and_its_log(served, deployment):
    (deployment.home / "fail").write_text("canaries=2")
    settings = JobSettings(seed=2, canary_rates="0.5")
    with pytest.raises(ConfideError) as failed:
        demo.run(deployment, settings, Console(file=io.StringIO(), width=120))
    (deployment.home / "fail").unlink()
    line = str(failed.value)
    assert line.startswith("canaries: made to fail with 2 (exit code 2)")
    assert Path(line.rpartition("Its log: ")[2]).exists()


def ended(api, dag: str, runs: int) -> list[dict]:
    """Return the DAG's runs once so many have ended; Airflow may take its time under load."""
    deadline = time.monotonic() + 240
    while True:
        found = api._call("GET", f"/api/v2/dags/{dag}/dagRuns?limit=100&order_by=id")["dag_runs"]
        if sum(run["state"] in {"success", "failed"} for run in found) >= runs:
            return found
        assert time.monotonic() < deadline, f"{dag}: {[run['state'] for run in found]}"
        time.sleep(0.5)


def test_a_new_version_of_a_corpus_is_trained_on(served, deployment):
    """An asset event starts `new_corpus`, and that `dp_bert`, with the version as data."""
    api = served.api()
    before = len(ended(api, "dp_bert", 0))
    said = CliRunner().invoke(announce, ["synthetic-notes", "2026-11"])
    assert said.exit_code == 0, said.output
    run = ended(api, "dp_bert", before + 1)[-1]
    assert run["dag_run_id"] == "corpus__synthetic-notes__2026-11"
    assert (run["state"], run["conf"]) == ("success", {"data_version": "2026-11"})
    report = dp_bert_steps(JobSettings(data_version="2026-11"))["report"].output
    assert (output_folder(deployment, report) / "result.json").exists()
    # ... and from the task's page buttons lead to its run and to the report.
    place = f"/api/v2/dags/dp_bert/dagRuns/{run['dag_run_id']}/taskInstances/report/links"
    links = api._call("GET", place)["extra_links"]
    run_page = "http://127.0.0.1:5000/#/experiments/1/runs/report"
    assert links["MLflow run"].partition("?")[0] == run_page
    assert links["Report"].partition("?")[0] == f"{run_page}/artifacts/report/report.html"


def test_what_is_no_version_starts_nothing(served, tmp_path):
    api = served.api()
    before = len(ended(api, "dp_bert", 0))
    answered = len(ended(api, "new_corpus", 0))
    said = CliRunner().invoke(announce, ["synthetic-notes", f"2026; touch {tmp_path}/here"])
    assert said.exit_code == 0
    assert ended(api, "new_corpus", answered + 1)[-1]["state"] == "failed"
    assert len(ended(api, "dp_bert", 0)) == before
    assert list(tmp_path.iterdir()) == []


def test_a_corpus_that_nobody_configured_cannot_be_announced(served):
    with pytest.raises(BadInput, match="CONFIDE_CORPORA"):
        CliRunner().invoke(announce, ["ward-notes", "1"], catch_exceptions=False)


def test_settings_that_airflow_refuses_start_nothing(served, deployment):
    beyond = JobSettings.model_construct(**JobSettings().model_dump() | {"layers": 1000})
    with pytest.raises(BadInput, match="1000 is greater than the maximum of 48"):
        demo.run(deployment, beyond, Console(file=io.StringIO()))
    assert served.api().unfinished_runs("dp_bert") == []
