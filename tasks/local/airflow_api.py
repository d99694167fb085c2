"""The few calls of Airflow's REST API that the local stack needs."""

import json
import urllib.error
import urllib.parse
import urllib.request
from datetime import datetime
from typing import Any

from dp_core.errors import BadInput, ConfideError

# These calls stay on this machine: they must not pass through a proxy of the environment.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_TIMEOUT = 30.0


class AirflowRefused(BadInput):
    """Airflow refused a request; the message quotes its reason."""

    def __init__(self, why: str) -> None:
        super().__init__(f"Airflow refused: {why}")


class AirflowAway(ConfideError):
    """Airflow does not answer, has not started yet, or answers with a server error."""

    def __init__(self, why: str) -> None:
        super().__init__(f"Airflow does not answer ({why})")


class AirflowApi:
    """A logged-in client of one Airflow.

    Args:
        url: for example http://127.0.0.1:8080.
    """

    def __init__(self, url: str, user: str, password: str) -> None:
        self._url = url
        self._login = {"username": user, "password": password}
        self._token = ""

    def warm_up(self) -> None:
        """Make the server load its task interface, so that the first task does not wait for it."""
        self._call("GET", "/execution/health", login=False)

    def health(self) -> dict[str, str]:
        """Return each component's status."""
        answer = self._call("GET", "/api/v2/monitor/health", login=False)
        return {name: str(part.get("status")) for name, part in answer.items() if part}

    def ensure_pool(self, name: str, slots: int, description: str) -> None:
        """Create the pool if it does not exist; the size of an existing pool stays unchanged."""
        if self.pool_slots(name) is None:
            body = {"name": name, "slots": slots, "description": description}
            self._call("POST", "/api/v2/pools", body)

    def dag_parsed_at(self, dag: str) -> datetime | None:
        """Return the time of the last parsing of the DAG's file, or None if there is none."""
        try:
            parsed = self._call("GET", f"/api/v2/dags/{dag}").get("last_parsed_time")
        except AirflowRefused:
            return None
        return datetime.fromisoformat(parsed) if parsed else None

    def import_errors(self) -> list[str]:
        """Return one line for each DAG file that could not be read: its name and last line."""
        errors = self._call("GET", "/api/v2/importErrors")["import_errors"]
        return [f"{e['filename']}: {e['stack_trace'].strip().splitlines()[-1]}" for e in errors]

    def trigger(self, dag: str, run_id: str, conf: dict[str, Any]) -> None:
        """Start a run of the DAG.

        Raises:
            AirflowRefused: for example a setting out of range.
        """
        body = {"dag_run_id": run_id, "logical_date": None, "conf": conf}
        self._call("POST", f"/api/v2/dags/{dag}/dagRuns", body)

    def announce(self, asset: str, version: str) -> None:
        """Create an event of an asset, which starts the DAGs that wait for it.

        Raises:
            BadInput: there is no such asset.
        """
        query = urllib.parse.urlencode({"name_pattern": asset, "limit": 100})
        known = self._call("GET", f"/api/v2/assets?{query}")["assets"]
        ids = [a["id"] for a in known if a["name"] == asset]  # the pattern matches parts too
        if not ids:
            raise BadInput(
                "Airflow knows no such asset", where=asset, fix="Is it in CONFIDE_CORPORA?"
            )
        body = {"asset_id": ids[0], "extra": {"data_version": version}}
        self._call("POST", "/api/v2/assets/events", body)

    def pool_slots(self, name: str) -> int | None:
        """Return the number of slots of a pool, or None if the pool does not exist."""
        try:
            return int(self._call("GET", f"/api/v2/pools/{name}")["slots"])
        except AirflowRefused:
            return None

    def unfinished_runs(self, dag: str) -> list[str]:
        """Return the ids of the DAG's runs that are queued or running."""
        query = "?state=running&state=queued&limit=100"
        runs = self._call("GET", f"/api/v2/dags/{dag}/dagRuns{query}")["dag_runs"]
        return [run["dag_run_id"] for run in runs]

    def fail_run(self, dag: str, run_id: str) -> None:
        """Mark a run as failed, which ends its running tasks."""
        self._call("PATCH", self._run(dag, run_id), {"state": "failed"})

    def run_state(self, dag: str, run_id: str) -> str:
        """Return queued, running, success or failed."""
        return str(self._call("GET", self._run(dag, run_id))["state"])

    def task_instances(self, dag: str, run_id: str) -> list[dict[str, Any]]:
        """Return the run's task instances as Airflow describes them."""
        answer = self._call("GET", f"{self._run(dag, run_id)}/taskInstances?limit=1000")
        instances: list[dict[str, Any]] = answer["task_instances"]
        return instances

    @staticmethod
    def _run(dag: str, run_id: str) -> str:
        return f"/api/v2/dags/{dag}/dagRuns/{urllib.parse.quote(run_id, safe='')}"

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, login: bool = True
    ) -> dict[str, Any]:
        if login and not self._token:
            granted = self._call("POST", "/auth/token", self._login, login=False)
            self._token = granted["access_token"]
        headers = {"Content-Type": "application/json"}
        if login:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        url = self._url + path  # http on loopback
        request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310
        try:
            with _OPENER.open(request, timeout=_TIMEOUT) as answer:
                return dict(json.loads(answer.read() or b"{}"))
        except urllib.error.HTTPError as error:
            if error.code == 401 and login and self._token:
                self._token = ""  # the token has expired
                return self._call(method, path, body)
            if error.code >= 500:  # a server error, for example of its database, is no refusal
                raise AirflowAway(_detail(error)) from None
            raise AirflowRefused(_detail(error)) from None
        except (OSError, ValueError) as error:
            raise AirflowAway(str(error)) from None


def _detail(error: urllib.error.HTTPError) -> str:
    """Return Airflow's error text on one line."""
    try:
        detail = json.loads(error.read()).get("detail", "")
    except (OSError, ValueError):
        detail = ""
    words = detail if isinstance(detail, str) else json.dumps(detail)
    return " ".join(words.split()) or f"HTTP {error.code}"
