"""The running compose stack: a whole job in task containers, started by Airflow's API.

`docker/ci` starts the stack and sets CONFIDE_STACK; without it these tests are skipped.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from child_processes import completed, wait_for
from running_stack import (
    DISTURBED,
    LONGEST,
    PROJECT,
    ROOT,
    TAG,
    TINY,
    Stack,
    on_the_stack,
    refused,
    step_containers,
)

pytestmark = on_the_stack("compose is NOT tried")

COURIER = 60  # seconds between deliveries


@pytest.fixture(scope="module")
def before(stack: Stack) -> list[list[str]]:
    return stack.ledger("select * from entries order by 1")


@pytest.fixture(scope="module", autouse=True)
def started(stack: Stack, before: list[list[str]]) -> str:
    """Return a run of dp_bert, which continues while the first tests check things without a run."""
    stack.train_together(2)
    return stack.trigger("dp_bert", TINY)


@pytest.fixture(scope="module")
def run(stack: Stack, started: str) -> str:
    state = stack.wait("dp_bert", started, LONGEST)
    tasks = stack.tasks("dp_bert", started)
    bad = [n for n, t in tasks.items() if t["state"] == "failed"]
    logs = "\n".join(stack.log("dp_bert", started, name) for name in bad)
    assert state == "success", f"{state}: {bad}\n{logs}"
    return started


# --- during the run


def test_airflow_and_mlflow_refuse_access_without_a_password(stack):
    assert refused(lambda: stack.call(f"{stack.airflow}/api/v2/dags"))[0] == 401
    search = f"{stack.mlflow}/api/2.0/mlflow/experiments/search"
    assert refused(lambda: stack.call(search, {"max_results": 1}))[0] == 401


def test_mlflow_refuses_foreign_host_names(stack):
    request = urllib.request.Request(stack.mlflow, headers={"Host": "evil.example"})  # noqa: S310
    assert refused(lambda: urllib.request.urlopen(request, timeout=30))[0] == 403  # noqa: S310


@pytest.mark.cases
def test_invalid_value_is_refused_with_its_reason(stack, setting, value):
    status, words = refused(lambda: stack.trigger("dp_bert", {**TINY, setting: value}))
    assert status == 400
    assert setting in words


def test_network_of_the_steps_has_no_internet_access(stack):
    program = "import socket; socket.create_connection(('1.1.1.1', 443), timeout=3)"
    words = ["run", "--rm", f"--network={PROJECT}_steps", f"confide-task:{TAG}", "-c", program]
    answer = completed("docker", *words)
    assert answer.returncode == 1
    assert "OSError" in answer.stderr or "timed out" in answer.stderr


def test_step_cannot_reach_airflow_or_its_database(stack):
    program = """
import os, socket, sqlalchemy
try:
    socket.create_connection(("api-server", 8080), timeout=3)
    print("reached the API")
except OSError:
    pass
url = sqlalchemy.make_url(os.environ["CONFIDE_LEDGER"])
for database in ("airflow", "mlflow"):
    try:
        sqlalchemy.create_engine(url.set(database=database)).connect()
        print("reached", database)
    except sqlalchemy.exc.OperationalError as error:
        assert "permission denied" in str(error), error
sqlalchemy.create_engine(url).connect()
print("reached the ledger")
"""
    answer = stack.compose("run", "--rm", "--no-deps", "-T", "prepare", "-c", program)
    assert answer.split("\n")[:-1] == ["reached the ledger"]


# --- results of the run


def test_undisturbed_job_has_identical_results_without_a_charge(stack, before, run):
    """The job after the faults made every result again, with identical bits."""
    if not DISTURBED.exists():
        pytest.skip("SKIPPED: no job was disturbed before this one")
    disturbed = json.loads(DISTURBED.read_text())
    undisturbed = stack.runs("dp_bert")[1]["dag_run_id"]
    assert "done before" not in stack.log("dp_bert", undisturbed, "pretraining · With DP")
    checksums = stack.left("checksums.json", stack.outputs("dp_bert", undisturbed))
    assert checksums.keys() == disturbed["checksums"].keys()
    for task in checksums.keys() - {"report"}:  # the report names its run and its date
        assert checksums[task] == disturbed["checksums"][task], task
    paid = [entry for entry in before if "station-5" not in entry]  # the browser's second corpus
    assert paid == disturbed["paid"]


def test_every_requested_step_ran_in_a_container(stack, run):
    tasks = stack.tasks("dp_bert", run)
    assert {task["state"] for task in tasks.values()} == {"success"}
    others = {"settings", "starts", "trainings", "measurements", "outcome"}
    assert tasks.keys() - stack.steps("dp_bert", run).keys() == others
    assert step_containers(run) == []


def test_results_are_in_the_bucket_and_releases_in_the_ledger(stack, run):
    assert int(stack.ledger("select count(*) from entries")[0][0]) >= 2
    output = stack.outputs("dp_bert", run)["report"]
    objects = stack.objects(output)
    assert f"{output}/result.json" in objects
    assert [name for name in objects if name.endswith(".html")]


def test_repeated_job_costs_nothing(stack, run, before):
    """`docker/ci` has run the browser's job with the same settings before."""
    others = [r for r in stack.runs("dp_bert") if r["dag_run_id"] != run]
    if not others[DISTURBED.exists() :]:  # the results of the disturbed job were deleted
        pytest.skip("SKIPPED: this job found no results, and had to make its own")
    assert "done before" in stack.log("dp_bert", run, "pretraining · With DP")
    assert stack.ledger("select * from entries order by 1") == before


def test_unknown_setting_is_refused_by_the_first_task(stack):
    """Airflow accepts unknown keys of a run's conf."""
    run = stack.trigger("dp_bert", {**TINY, "noise_multiplyer": 2.0})
    assert stack.wait("dp_bert", run, LONGEST) == "failed"
    tasks = stack.tasks("dp_bert", run)
    assert tasks["settings"]["state"] == "failed"
    assert tasks["settings"]["try_number"] == 1
    assert "noise_multiplyer" in stack.log("dp_bert", run, "settings")
    decided = ("settings", "outcome")
    assert {t["state"] for n, t in tasks.items() if n not in decided} == {"upstream_failed"}


def test_cancelled_run_leaves_no_container_running(stack):
    """The button "mark as failed" does the same."""
    run = stack.trigger("dp_bert", {**TINY, "data_version": "cancelled"})
    wait_for(lambda: step_containers(run), LONGEST, pause=0.5)
    stack.cancel("dp_bert", run)
    assert stack.wait("dp_bert", run, 600) == "failed"  # its last task runs first
    wait_for(lambda: not step_containers(run), pause=0.5)


def test_mlflow_has_the_run_with_its_epsilon(stack, run):
    runs = stack.tracked(run)
    assert len(runs) == stack.expected_runs(run)
    metrics = {
        r["info"]["run_name"]: {m["key"] for m in r["data"].get("metrics", [])} for r in runs
    }
    (row,) = (shown for name, shown in metrics.items() if name.startswith("With DP · ε "))
    assert row >= {"epsilon", "delta", "f1", "exposure"}, sorted(row)
    assert {r["info"]["status"] for r in runs} == {"FINISHED"}


# The container that the scheduler would start for a step, with a probe in place of the step.
AS_STEP = """
import os, sys
from unittest.mock import patch
from dags.launcher.docker_step import (DockerStep)
from tasks.protocol.step_process import (Work)
from tasks.protocol.job import (job_steps)
from tasks.protocol.settings import (JobSettings)
from tasks.protocol.specs import (RunContext)
spec = job_steps(JobSettings())[sys.argv[1]]
work = Work(spec, RunContext(run_key="look", run_name="look", task=sys.argv[1]))
step = DockerStep(task_id=sys.argv[1], plan=lambda *_: {})
step.labels = {}
with patch.object(Work, "arguments", lambda _: ["-c", sys.argv[2]]):
    container = step.create(work)["Id"]
os.environ.pop("CONFIDE_LEASE", None)
lease = step.cli.attach_socket(container, params={"stdin": 1, "stream": 1})
try:
    step.cli.start(container)
    step.cli.wait(container)
    print(step.cli.logs(container, stderr=True).decode())
finally:
    lease.close()
    step.cli.remove_container(container, force=True)
"""
LOOK = """
import os, pathlib, socket, urllib.request as u, base64, json
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from dp_core.privacy.ledger import (Ledger)
from tasks.runtime.deployment import (Deployment)
from tasks.context import (content_key)
here = Deployment.from_environment()
content_key(here, "content-digest")
print("digests")
def tried(name, what):
    try:
        print(name, what())
    except (OSError, SQLAlchemyError) as error:
        print(name, "refused", type(error).__name__)
tried("seeds", lambda: len(list(pathlib.Path("/var/lib/confide-seeds").iterdir())) > 0)
tried("key", lambda: (here.keys / "mine").write_text("x"))
tried("ledger", lambda: bool(Ledger.open(here.ledger).datasets()))
def write(*before):
    with create_engine(make_url(here.ledger)).begin() as db:
        for words in (*before, "update budgets set id = id"):
            db.execute(text(words))
    return "done"
tried("write", write)
tried("write-anyway", lambda: write("set transaction read write"))
def mlflow(path, body=None):
    words = os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"]
    basic = base64.b64encode(":".join(words).encode()).decode()
    told = {"Authorization": "Basic " + basic, "Content-Type": "application/json"}
    asked = u.Request(here.tracking + path, body and json.dumps(body).encode(), told)
    return u.urlopen(asked, timeout=30).status
tried("mlflow", lambda: mlflow("/api/2.0/mlflow/experiments/get-by-name?experiment_name=confide"))
somebody = {"username": "somebody", "password": "a long password"}
tried("users", lambda: mlflow("/api/2.0/mlflow/users/create", somebody))
"""


def probe(stack: Stack, task: str) -> dict[str, str]:
    """Return the abilities of a step's container, as the probe LOOK prints them."""
    output = stack.compose("exec", "-T", "scheduler", "python", "-c", AS_STEP, task, LOOK)
    lines = [line.partition(" ") for line in output.splitlines() if line.strip()]
    return {name: rest for name, _, rest in lines}


def test_step_that_reads_files_has_no_seed_and_cannot_write_the_ledger(stack, run):
    abilities = probe(stack, "private_corpus")
    assert "digests" in abilities
    assert abilities["seeds"] == "False"  # the empty folder of the image
    assert abilities["key"].startswith("refused")
    assert abilities["ledger"] == "True"
    assert abilities["write"] == "refused InternalError"  # a read-only transaction
    assert abilities["write-anyway"] == "refused ProgrammingError"  # permission denied
    assert abilities["mlflow"] == "200"
    assert abilities["users"] == "refused HTTPError"


def test_probe_detects_seeds_and_ledger_access_of_a_charging_step(stack, run):
    abilities = probe(stack, "vocabulary")
    assert (abilities["seeds"], abilities["ledger"], abilities["write"]) == ("True", "True", "done")
    assert abilities["users"] == "refused HTTPError"  # no step is an admin of MLflow


# --- last: the events of the cancelled run have been delivered meanwhile


def doctor_as_a_step(stack: Stack) -> dict[str, dict[str, Any]]:
    words = ("-m", "tasks.cli", "doctor", "--json")
    return by_name(stack.compose("run", "--rm", "--no-deps", "-T", "prepare", *words))


def by_name(findings: str) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in json.loads(findings)["findings"]}


def test_doctor_finds_no_fault(stack: Stack, run: str, tmp_path: Path) -> None:
    # The MLflow sync delivers the events of the cancelled run once a minute.
    wait_for(lambda: doctor_as_a_step(stack)["event logs"]["ok"], 3 * COURIER, pause=5)
    as_a_step = doctor_as_a_step(stack)
    environment = os.environ | {
        "CONFIDE_HOME": str(tmp_path),
        "CONFIDE_AIRFLOW_API": stack.airflow,
        "CONFIDE_AIRFLOW_PASSWORD": stack.secrets["AIRFLOW_PASSWORD"],
    }
    words = (sys.executable, "-m", "tasks.cli", "doctor", "--json")
    from_outside = completed(*words, cwd=ROOT, env=environment)
    assert from_outside.returncode == 0, from_outside.stderr
    for findings, expected in (
        (as_a_step, {"ledger", "store", "MLflow", "event logs", "privacy seeds", "clock"}),
        (by_name(from_outside.stdout), {"Airflow", "pool training"}),
    ):
        assert findings.keys() >= expected
        assert [finding for finding in findings.values() if not finding["ok"]] == []
