"""Start, find again and stop the local stack."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from dp_core.errors import BadInput, ConfideError
from tasks.local import processes, tracking_server
from tasks.local.airflow_api import AirflowApi, AirflowAway
from tasks.local.configuration import (
    HOST,
    USER,
    Secrets,
    airflow_home,
    environment,
    free_port,
    write_private,
)
from tasks.local.processes import Started
from tasks.runtime.deployment import CHECKOUT, Deployment

RUNNERS = ("api-server", "scheduler", "dag-processor")  # what it takes to run a DAG
PAGES = (*RUNNERS, "triggerer", "mlflow")  # what it takes to serve everything
DAGS = ("dp_bert", "dp_sweep", "new_corpus")
TRAINING_POOL = ("training", 1, "Steps that use every core: one at a time.")
START_SECONDS = 300.0

_ORCHESTRATOR = CHECKOUT / ".venv" / "orchestrator" / "bin" / "python"
_AIRFLOW = [str(_ORCHESTRATOR), "-m", "airflow"]


@dataclass(frozen=True)
class Stack:
    """A stack that was started: its processes, ports, and how to reach it."""

    components: dict[str, Started]
    ports: dict[str, int]
    password: str
    mlflow_password: str

    @property
    def airflow_url(self) -> str:
        """Address of Airflow's pages."""
        return f"http://{HOST}:{self.ports['airflow']}"

    @property
    def mlflow_url(self) -> str:
        """Address of MLflow's pages."""
        return f"http://{HOST}:{self.ports['mlflow']}"

    def api(self) -> AirflowApi:
        """Return a client of this stack's Airflow."""
        return AirflowApi(self.airflow_url, USER, self.password)

    def dead(self) -> list[str]:
        """Return the components that do not run any more."""
        return [n for n, process in self.components.items() if not processes.is_alive(process)]


def running(deployment: Deployment) -> Stack | None:
    """Return the stack of this deployment if all of it runs."""
    stack = _read(deployment)
    return stack if stack and not stack.dead() else None


def start(
    deployment: Deployment,
    names: Sequence[str],
    say: Callable[[str], None],
    *,
    end_with_us: bool = False,
) -> Stack:
    """Start the named components and wait until they are healthy.

    What is left of an earlier stack is stopped first. With `end_with_us` nothing outlives the
    calling process, however that ends.

    Raises:
        BadInput: the orchestrator's environment is not there, or a port is taken.
        ConfideError: a component ended, or was not up in time; the line names its log.
    """
    if not _ORCHESTRATOR.exists():
        raise BadInput("Airflow's environment is missing", fix="Run `make setup`.")
    os.umask(0o077)  # logs and databases are for their owner alone
    deployment.prepare()
    stop(deployment)
    folder = airflow_home(deployment)
    folder.mkdir(mode=0o700, exist_ok=True)
    secret = Secrets.of(folder)
    ports = {name: free_port(name) for name in ("airflow", "mlflow")}
    variables = environment(deployment, secret, ports)
    _migrate(deployment, variables, say)
    # MLflow's secrets reach no other process, and so no step; nor do Airflow's reach MLflow.
    own = tracking_server.environment(deployment, folder, secret)
    began = datetime.now(UTC).isoformat()
    components: dict[str, Started] = {}
    for name in names:
        log = log_of(deployment, name)
        components[name] = processes.start(
            _command(name, ports),
            own if name == "mlflow" else variables,
            tracking_server.working_folder(deployment) if name == "mlflow" else CHECKOUT,
            log,
            end_with_us=end_with_us,
        )
        stack = Stack(dict(components), ports, secret.password, secret.mlflow)
        _write(deployment, stack)  # after each: a stack killed while starting is found again
    say(f"Starting {', '.join(names)} …")
    try:
        _wait_until_up(deployment, stack, began)
    except BaseException:
        stop(deployment)
        raise
    return stack


def stop(deployment: Deployment) -> bool:
    """Stop what is left of this deployment's stack; return whether there was anything."""
    stack = _read(deployment)
    if stack is None:
        return False
    processes.stop(stack.components.values())
    _state_file(deployment).unlink(missing_ok=True)
    return True


def log_of(deployment: Deployment, component: str) -> Path:
    """Return the file that a component writes its output to."""
    return deployment.logs / f"{component}.log"


def _command(name: str, ports: dict[str, int]) -> list[str]:
    if name == "mlflow":
        return tracking_server.command(ports["mlflow"])
    if name in {"scheduler", "triggerer"}:
        # Their log servers would listen on every interface; the logs are read from the disk here.
        return [*_AIRFLOW, name, "--skip-serve-logs"]
    return [*_AIRFLOW, name]


def _migrate(deployment: Deployment, variables: dict[str, str], say: Callable[[str], None]) -> None:
    """Bring Airflow's database to this Airflow's schema, once for each version of its lock."""
    lock = (CHECKOUT / "requirements" / "orchestrator.txt").read_bytes()
    digest = hashlib.sha256(lock).hexdigest()
    stamp = airflow_home(deployment) / "migrated"
    if stamp.exists() and stamp.read_text() == digest:
        return
    say("Preparing Airflow's database …")
    log = log_of(deployment, "migrate")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        answer = subprocess.run(  # noqa: S603 - fixed words
            [*_AIRFLOW, "db", "migrate"],
            cwd=CHECKOUT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if answer.returncode:
        raise ConfideError("Airflow's database could not be prepared", fix=f"See {log}.")
    stamp.write_text(digest)


def _wait_until_up(deployment: Deployment, stack: Stack, began: str) -> None:
    """Return when all components are healthy and the DAGs have been read anew."""
    api = stack.api()
    deadline = time.monotonic() + START_SECONDS
    waiting = "Airflow"
    pooled = False
    while time.monotonic() < deadline:
        time.sleep(0.5)
        if dead := stack.dead():
            raise ConfideError(f"{dead[0]} ended", fix=f"See {log_of(deployment, dead[0])}.")
        try:
            health = api.health()
            sick = [n for n in ("scheduler", "dag_processor") if health.get(n) != "healthy"]
            if sick:
                waiting = sick[0]
                continue
            if not pooled:
                api.warm_up()
                api.ensure_pool(*TRAINING_POOL)
                pooled = True
            unread = [dag for dag in DAGS if _time(api.dag_parsed_at(dag)) < _time(began)]
            if not unread:
                return
            waiting = f"the DAG {unread[0]}"
            if errors := api.import_errors():
                raise ConfideError(errors[0], where="DAG")
        except AirflowAway:
            waiting = "api-server"
    raise ConfideError(
        f"{waiting} was not up within {START_SECONDS:.0f} s", fix=f"See {deployment.logs}."
    )


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text) if text else datetime.min.replace(tzinfo=UTC)


def _state_file(deployment: Deployment) -> Path:
    return airflow_home(deployment) / "stack.json"


def _write(deployment: Deployment, stack: Stack) -> None:
    write_private(_state_file(deployment), json.dumps(asdict(stack)))


def _read(deployment: Deployment) -> Stack | None:
    try:
        state = json.loads(_state_file(deployment).read_text())
    except FileNotFoundError:
        return None
    components = {name: Started(**process) for name, process in state["components"].items()}
    return Stack(components, state["ports"], state["password"], state.get("mlflow_password", ""))
