"""What the tests of the running compose stack talk to: Airflow, MLflow, PostgreSQL, the store."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# The whole job, as small as it gets: every step, every release, every model.
TINY: dict[str, Any] = json.loads(Path(__file__).with_name("tiny_job.json").read_text())
TAG = os.environ.get("CONFIDE_TAG") or "local"
PROJECT = os.environ.get("COMPOSE_PROJECT_NAME") or "confide"
LONGEST = float(os.environ.get("CONFIDE_STACK_PATIENCE") or 3600)  # seconds for one run


class Stack:
    """A compose stack that is up, with the secrets in `.env`."""

    def __init__(self) -> None:
        lines = (ROOT / ".env").read_text().splitlines()
        written = dict(line.split("=", 1) for line in lines if "=" in line)
        # As for compose itself, the environment comes before the file.
        self.secrets = {name: os.environ.get(name, value) for name, value in written.items()}
        self.airflow = f"http://127.0.0.1:{self.secrets['AIRFLOW_PORT']}"
        self.mlflow = f"http://127.0.0.1:{self.secrets['MLFLOW_PORT']}"
        password = self.secrets["AIRFLOW_PASSWORD"]
        answer = self.call(
            f"{self.airflow}/auth/token", {"username": "confide", "password": password}
        )
        self._token = f"Bearer {answer['access_token']}"

    def call(self, url: str, body: Any = None, authorization: str = "") -> Any:
        """Return the JSON answer; `urllib.error.HTTPError` for what is refused."""
        headers = {"Content-Type": "application/json", "Authorization": authorization}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {k: v for k, v in headers.items() if v})  # noqa: S310
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - loopback
            return json.load(answer)

    def airflow_api(self, path: str, body: Any = None) -> Any:
        return self.call(f"{self.airflow}/api/v2{path}", body, self._token)

    def mlflow_api(self, path: str, body: Any = None) -> Any:
        words = f"confide:{self.secrets['MLFLOW_PASSWORD']}".encode()
        basic = f"Basic {base64.b64encode(words).decode()}"
        return self.call(f"{self.mlflow}/api/2.0/mlflow{path}", body, basic)

    def tracked(self, run: str, seconds: float = 600) -> list[Any]:
        """Return MLflow's runs of a DAG run, once they are whole: a courier brings the rest."""
        experiment = self.mlflow_api("/experiments/get-by-name?experiment_name=confide")
        body = {
            "experiment_ids": [experiment["experiment"]["experiment_id"]],
            "filter": f"tags.`confide.run_key` = 'dp_bert/{run}'",
            "max_results": 100,
        }
        until = time.monotonic() + seconds
        while True:
            runs: list[Any] = self.mlflow_api("/runs/search", body).get("runs", [])
            whole = {r["info"]["status"] for r in runs} == {"FINISHED"}
            if (whole and len(runs) >= 18) or time.monotonic() > until:
                return runs
            time.sleep(5)

    def trigger(self, dag: str, conf: dict[str, Any]) -> str:
        run = self.airflow_api(f"/dags/{dag}/dagRuns", {"logical_date": None, "conf": conf})
        return str(run["dag_run_id"])

    def runs(self, dag: str) -> list[dict[str, Any]]:
        """Return a DAG's runs: identifier, state and conf, the oldest first."""
        found = self.airflow_api(f"/dags/{dag}/dagRuns?limit=100&order_by=run_after")["dag_runs"]
        return [{name: run[name] for name in ("dag_run_id", "state", "conf")} for run in found]

    def wait(self, dag: str, run: str, seconds: float) -> str:
        """Return the state in which a run ended, or the one in which it still is."""
        path, state = f"/dags/{dag}/dagRuns/{run}", ""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            state = str(self.airflow_api(path)["state"])
            if state in ("success", "failed"):
                break
            time.sleep(3)
        return state

    def tasks(self, dag: str, run: str) -> dict[str, Any]:
        found = self.airflow_api(f"/dags/{dag}/dagRuns/{run}/taskInstances?limit=1000")
        return {task["task_id"]: task for task in found["task_instances"]}

    def log(self, dag: str, run: str, task: str, attempt: int = 1) -> str:
        path = f"/dags/{dag}/dagRuns/{run}/taskInstances/{task}/logs/{attempt}"
        return "\n".join(str(line.get("event")) for line in self.airflow_api(path)["content"])

    def compose(self, *words: str) -> str:
        answer = subprocess.run(
            ["docker", "compose", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    def ledger(self, query: str) -> list[list[str]]:
        words = ["exec", "-T", "postgres", "psql", "-U", "postgres", "-d", "ledger", "-AtqF", "\t"]
        return [line.split("\t") for line in self.compose(*words, "-c", query).splitlines()]

    def objects(self, prefix: str) -> dict[str, int]:
        """Return the store's objects below a prefix, with their sizes."""
        program = (
            "import urllib.request as u; print(u.urlopen("
            f"'http://127.0.0.1:9023/storage/v1/b/confide/o?prefix={prefix}').read().decode())"
        )
        answer = self.compose("exec", "-T", "storage", "python", "-c", program)
        return {item["name"]: int(item["size"]) for item in json.loads(answer).get("items", [])}


def refused(call: Any) -> tuple[int, str]:
    """Return the status and the words with which a call is refused; (200, "") if it is not."""
    try:
        call()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    return 200, ""
