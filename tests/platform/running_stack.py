"""Clients of the running compose stack: Airflow, MLflow, PostgreSQL and the object store."""

import base64
import json
import os
import subprocess
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from child_processes import completed, wait_for

ROOT = Path(__file__).parents[2]
# The smallest whole job, with every step, release and model.
TINY: dict[str, Any] = json.loads(Path(__file__).with_name("tiny_job.json").read_text())
# another version of the data, and so other releases
if os.environ.get("CONFIDE_STACK_DATA_VERSION"):
    TINY["data_version"] = os.environ["CONFIDE_STACK_DATA_VERSION"]
# Checksums and ledger of the disturbed job, which `test_faults.py` writes for `test_stack.py`.
DISTURBED = ROOT / "ci-artifacts" / "disturbed.json"
TAG = os.environ.get("CONFIDE_TAG") or "local"
PROJECT = os.environ.get("COMPOSE_PROJECT_NAME") or "confide"
LONGEST = float(os.environ.get("CONFIDE_STACK_PATIENCE") or 3600)  # seconds for one run
ENDED = ("success", "failed")  # the final states of a run

# This file is also imported where only a browser's packages are installed.
OF_MODEL = ("pretraining", "exposure", "membership", "audit", "finetuning")  # mapped tasks


def on_the_stack(missing_check: str, required: str = "") -> list[pytest.MarkDecorator]:
    """Return the marks of tests that need the stack; a skipped test states the missing check.

    Args:
        missing_check: a description of the skipped check.
        required: the required value of CONFIDE_STACK; any value by default.
    """
    mode = os.environ.get("CONFIDE_STACK")
    reason = f"SKIPPED, {missing_check}: CONFIDE_STACK is {mode or 'unset'} (docker/ci sets it)"
    stack_is_missing = not mode or required not in ("", mode)
    return [pytest.mark.slow, pytest.mark.skipif(stack_is_missing, reason=reason)]


class Services:
    def compose(self, *words: str) -> str:
        answer = completed("docker", "compose", *words, cwd=ROOT)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    def ledger(self, query: str, database: str = "ledger") -> list[list[str]]:
        words = ["exec", "-T", "postgres", "psql", "-U", "postgres", "-d", database, "-AtqF", "\t"]
        return [line.split("\t") for line in self.compose(*words, "-c", query).splitlines()]

    def storage(self, program: str) -> str:
        """Return the output of a Python program inside the object store's container.

        The program can use `call(path, method="GET", data=None)`, because no port of the store is
        published. The emulator stores an object's link with the host of its upload, so programs use
        the host's name in the network of the steps.
        """
        start = (
            "import json, urllib.request as u; from urllib.parse import quote\n"
            "def call(path, method='GET', data=None):\n"
            "    asked = u.Request('http://storage:9023' + path, data, method=method)\n"
            "    return u.urlopen(asked).read()\n"
            "def names(prefix):\n"
            "    found = json.loads(call(f'/storage/v1/b/confide/o?prefix={quote(prefix)}'))\n"
            "    return {o['name']: int(o['size']) for o in found.get('items', [])}\n"
        )
        return self.compose("exec", "-T", "storage", "python", "-c", start + program)

    def objects(self, prefix: str) -> dict[str, int]:
        sizes: dict[str, int] = json.loads(self.storage(f"print(json.dumps(names({prefix!r})))"))
        return sizes

    def read(self, *names: str) -> list[Any]:
        program = (
            f"for name in {list(names)!r}:\n"
            "    path = '/download/storage/v1/b/confide/o/' + quote(name, '') + '?alt=media'\n"
            "    print(json.dumps(json.loads(call(path))))"
        )
        return [json.loads(line) for line in self.storage(program).splitlines()]

    def put(self, uri: str, text: str) -> None:
        """Write an object of the bucket."""
        _, _, name = uri.removeprefix("gs://").partition("/")
        path = f"/upload/storage/v1/b/confide/o?uploadType=media&name={name}"
        self.storage(f"call({path!r}, 'POST', {text!r}.encode())")

    def confide(self, *words: str) -> str:
        """Return the output of a command of the command line, in the image of the steps."""
        command = ("-m", "tasks.cli", *words)
        return self.compose("run", "--rm", "--no-deps", "-T", "prepare", *command)

    def empty_store(self) -> None:
        """Delete every result, so that steps repeat their work."""
        self.storage(
            "for name in names('store/'):\n"
            "    call('/storage/v1/b/confide/o/' + quote(name, ''), 'DELETE')"
        )


class Stack(Services):
    def __init__(self) -> None:
        lines = (ROOT / ".env").read_text().splitlines()
        written = dict(line.split("=", 1) for line in lines if "=" in line)
        # As in compose, environment variables take precedence over the file.
        self.secrets = {name: os.environ.get(name, value) for name, value in written.items()}
        self.airflow = f"http://127.0.0.1:{self.secrets['AIRFLOW_PORT']}"
        self.mlflow = f"http://127.0.0.1:{self.secrets['MLFLOW_PORT']}"
        password = self.secrets["AIRFLOW_PASSWORD"]
        answer = self.call(
            f"{self.airflow}/auth/token", {"username": "confide", "password": password}
        )
        self._token = f"Bearer {answer['access_token']}"

    def call(
        self, url: str, body: Any = None, authorization: str = "", method: str | None = None
    ) -> Any:
        """Return the JSON answer; raise `urllib.error.HTTPError` if the call is refused."""
        headers = {"Content-Type": "application/json", "Authorization": authorization}
        data = None if body is None else json.dumps(body).encode()
        given = {name: value for name, value in headers.items() if value}
        request = urllib.request.Request(url, data, given, method=method)  # noqa: S310
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - loopback
            return json.load(answer)

    def airflow_api(self, path: str, body: Any = None) -> Any:
        return self.call(f"{self.airflow}/api/v2{path}", body, self._token)

    def mlflow_api(self, path: str, body: Any = None) -> Any:
        words = f"confide:{self.secrets['MLFLOW_PASSWORD']}".encode()
        basic = f"Basic {base64.b64encode(words).decode()}"
        return self.call(f"{self.mlflow}/api/2.0/mlflow{path}", body, basic)

    def tracked(self, run: str, seconds: float = 600) -> list[Any]:
        """Return MLflow's runs of a DAG run once they are complete, because events arrive later."""
        experiment = self.mlflow_api("/experiments/get-by-name?experiment_name=confide")
        body = {
            "experiment_ids": [experiment["experiment"]["experiment_id"]],
            "filter": f"tags.`confide.run_key` = 'dp_bert/{run}'",
            "max_results": 100,
        }
        expected = self.expected_runs(run)

        def complete() -> list[Any]:
            runs: list[Any] = self.mlflow_api("/runs/search", body).get("runs", [])
            finished = {r["info"]["status"] for r in runs} == {"FINISHED"}
            return runs if finished and len(runs) >= expected else []

        runs: list[Any] = wait_for(complete, seconds, what=f"{expected} finished runs", pause=5)
        return runs

    def trigger(self, dag: str, conf: dict[str, Any]) -> str:
        wait_for(  # a new stack is still parsing its DAGs
            lambda: refused(lambda: self.airflow_api(f"/dags/{dag}"))[0] != 404,
            120,
            what=f"{dag} is no DAG of this stack",
            pause=2,
        )
        run = self.airflow_api(f"/dags/{dag}/dagRuns", {"logical_date": None, "conf": conf})
        return str(run["dag_run_id"])

    def cancel(self, dag: str, run: str) -> None:
        url = f"{self.airflow}/api/v2/dags/{dag}/dagRuns/{run}"
        self.call(url, {"state": "failed"}, self._token, "PATCH")

    def train_together(self, models: int) -> None:
        """Set the number of models trained at the same time, like CONFIDE_TRAINING_SLOTS."""
        pool = {"pool": "training", "slots": models, "include_deferred": False}
        url = f"{self.airflow}/api/v2/pools/training?update_mask=slots"
        self.call(url, pool, self._token, "PATCH")

    def runs(self, dag: str) -> list[dict[str, Any]]:
        dag_runs = self.airflow_api(f"/dags/{dag}/dagRuns?limit=100&order_by=run_after")["dag_runs"]
        return [{name: run[name] for name in ("dag_run_id", "state", "conf")} for run in dag_runs]

    def wait(self, dag: str, run: str, seconds: float) -> str:
        """Return the state in which a run ended."""
        wait_for(lambda: self.state(dag, run) in ENDED, seconds, what=f"the end of {run}", pause=3)
        return self.state(dag, run)

    def state(self, dag: str, run: str) -> str:
        return str(self.airflow_api(f"/dags/{dag}/dagRuns/{run}")["state"])

    def tasks(self, dag: str, run: str) -> dict[str, Any]:
        """Return the task instances of a run, for example `report` and `exposure · With DP`."""
        answer = self.airflow_api(f"/dags/{dag}/dagRuns/{run}/taskInstances?limit=1000")
        return {
            step_of(task["task_id"], task["rendered_map_index"]): task
            for task in answer["task_instances"]
        }

    def expected_runs(self, run: str) -> int:
        """Return the expected number of MLflow runs: one per job, model and step."""
        steps = self.steps("dp_bert", run)
        return 1 + sum(name.startswith("exposure · ") for name in steps) + len(steps)

    def steps(self, dag: str, run: str) -> dict[str, Any]:
        """Return the tasks of a run that work in containers and are not skipped."""
        return {
            name: task
            for name, task in self.tasks(dag, run).items()
            if task["operator"] == "DockerStep" and task["state"] != "skipped"
        }

    def log(self, dag: str, run: str, name: str) -> str:
        """Return the log of the last attempt of a task instance."""
        task = self.tasks(dag, run)[name]
        path = f"/dags/{dag}/dagRuns/{run}/taskInstances/{task['task_id']}/logs"
        path += f"/{task['try_number']}?map_index={task['map_index']}"
        return "\n".join(str(line.get("event")) for line in self.airflow_api(path)["content"])

    def outputs(self, dag: str, run: str) -> dict[str, str]:
        """Return the outputs of a run's steps by task, as names in the bucket."""
        names = {}
        for name in self.steps(dag, run):
            lines = self.log(dag, run, name).splitlines()
            uris = [x.removeprefix("Output: store://") for x in lines if "Output: store" in x]
            names |= {name: f"store/{uris[-1]}"} if uris else {}
        return names

    def left(self, file: str, outputs: dict[str, str]) -> dict[str, Any]:
        contents = self.read(*(f"{output}/{file}" for output in outputs.values()))
        return dict(zip(outputs, contents, strict=True))

    def points(self, runs: list[Any]) -> dict[str, list[tuple[str, int, float]]]:
        """Return the metrics of MLflow's runs, by the names of `tasks`."""
        names = {run["info"]["run_id"]: tracked_name(run) for run in runs}
        which = ", ".join(f"'{identifier}'" for identifier in names)
        query = f"select run_uuid, key, step, value from metrics where run_uuid in ({which})"  # noqa: S608
        points: dict[str, list[tuple[str, int, float]]] = {name: [] for name in names.values()}
        for identifier, key, step, value in self.ledger(query, database="mlflow"):
            points[names[identifier]].append((key, int(step), float(value)))
        return points

    def tries(self, dag: str, run: str, name: str) -> list[tuple[datetime, datetime]]:
        task = self.tasks(dag, run)[name]
        path = f"/dags/{dag}/dagRuns/{run}/taskInstances/{task['task_id']}"
        path += f"/{task['map_index']}/tries" if task["map_index"] >= 0 else "/tries"
        tries = self.airflow_api(path)["task_instances"]
        begin, end = (
            [datetime.fromisoformat(attempt[moment]) for attempt in tries]
            for moment in ("start_date", "end_date")
        )
        return sorted(zip(begin, end, strict=True))


def step_of(task: str, instance: str | None) -> str:
    """Return the name of the step that an instance of a mapped task runs in the tiny job."""
    if instance is None:
        return task
    if task == "read":
        return instance.lower().replace(" ", "_")
    if task == "measurement":
        task, _, instance = instance.replace("Fine-tuning", "finetuning").partition(" · ")
    return "public_pretraining" if task == "start" else name_of(task.lower(), instance)


def name_of(task: str, model: str | None) -> str:
    """Return the name of a task's instance: the task, and the model of a mapped task."""
    return f"{task} · {model}" if model else task


def tracked_name(run: Any) -> str:
    """Return the name of the task instance whose step MLflow's run records."""
    tags = {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}
    task = run["info"]["run_name"]
    return name_of(task, tags.get("confide.model") if task in OF_MODEL else None)


def step_containers(run: str, task: str = "") -> list[str]:
    """Return the containers of a run's steps, or of one task; normally only running ones exist.

    Args:
        run: the run.
        task: id and map index of a task, for example `vocabulary.-1`.
    """
    labels = [f"--filter=label=confide.run=dp_bert/{run}"]
    if task:
        labels.append(f"--filter=label=confide.task={task}")
    words = ["docker", "ps", "--all", "--quiet", *labels]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


def refused(call: Any) -> tuple[int, str]:
    """Return the status and message of a refused call; (200, "") if it is not refused."""
    try:
        call()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    return 200, ""
