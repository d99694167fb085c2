"""The local stack: start it, find it again, connect to it, stop it.

Commands talk to the Airflow that the environment names, or to this machine's own:
`CONFIDE_AIRFLOW_API`       its address, for example http://127.0.0.1:8080
`CONFIDE_AIRFLOW_USER`      (default `confide`)
`CONFIDE_AIRFLOW_PASSWORD`
"""

import fcntl
import hashlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from dp_core.errors import BadInput, ConfideError
from tasks.local import airflow_configuration
from tasks.local.airflow_api import AirflowApi, AirflowAway
from tasks.protocol import CHECKOUT, fork_server, supervisor
from tasks.protocol.least_privilege import without_orchestrator
from tasks.protocol.supervisor import STACK_GRACE, Process
from tasks.runtime.deployment import Deployment, is_executable, write_private

FORK_SERVER = "fork-server"
RUNNERS = ("api-server", "scheduler", "dag-processor", FORK_SERVER)  # components that run a DAG
PAGES = (*RUNNERS, "triggerer", "mlflow")  # all components
DAGS = ("dp_bert", "dp_sweep", "new_corpus", "privacy_audit")
TRAINING_POOL = ("training", 1, "Steps that use every core: one at a time.")
START_SECONDS = 300.0

_ORCHESTRATOR = CHECKOUT / ".venv" / "orchestrator" / "bin" / "python"
_AIRFLOW = [str(_ORCHESTRATOR), "-m", "airflow"]


@dataclass(frozen=True)
class Stack:
    """A started stack: its processes, ports and passwords."""

    components: dict[str, Process]
    ports: dict[str, int]
    password: str
    mlflow_password: str

    @property
    def airflow_url(self) -> str:
        """Address of Airflow's pages."""
        return f"http://{airflow_configuration.HOST}:{self.ports['airflow']}"

    @property
    def mlflow_url(self) -> str:
        """Address of MLflow's pages."""
        return f"http://{airflow_configuration.HOST}:{self.ports['mlflow']}"

    def api(self) -> AirflowApi:
        """Return a client of this stack's Airflow."""
        return AirflowApi(self.airflow_url, airflow_configuration.USER, self.password)

    def dead(self) -> list[str]:
        """Return the components that have ended; steps do not need the fork server."""
        return [
            name
            for name, process in self.components.items()
            if name != FORK_SERVER and not process.is_alive()
        ]

    def confirm_alive(self, deployment: Deployment) -> None:
        """Refuse a stack of which a component has ended.

        Raises:
            ConfideError: names the component and its log.
        """
        if dead := self.dead():
            raise ConfideError(f"{dead[0]} ended", fix=f"See {log_of(deployment, dead[0])}.")


def running(deployment: Deployment) -> Stack | None:
    """Return the stack of this deployment if all its components run."""
    stack = _read(deployment)
    return stack if stack and not stack.dead() else None


def start(
    deployment: Deployment,
    names: Sequence[str],
    log: Callable[[str], None],
    *,
    end_with_us: bool = False,
) -> Stack:
    """Start the named components and wait until they are healthy.

    The remaining components of an earlier stack are stopped first. With `end_with_us` no component
    outlives the calling process, even if that is killed.

    Raises:
        BadInput: the orchestrator's environment is missing, a port is taken, or another command
            is starting this stack.
        ConfideError: a component ended, or was not up in time; the line names its log.
    """
    if not is_executable(_ORCHESTRATOR):
        raise BadInput("Airflow's environment is missing", fix="Run `make setup` in a checkout.")
    os.umask(0o077)  # logs and databases are for their owner alone
    deployment.prepare()
    folder = airflow_configuration.airflow_home(deployment)
    folder.mkdir(mode=0o700, exist_ok=True)
    deployment.logs.mkdir(exist_ok=True)
    # Two commands that start a stack at the same time would stop each other's components.
    with (folder / "starting.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(
                "another command is starting it",
                where=f"the stack of {folder.parent}",
                fix="Wait until it is up.",
            ) from None
        stop(deployment)  # the components of an earlier stack
        # The ports are reserved until the servers bind them.
        with airflow_configuration.free_ports(("airflow", "mlflow")) as ports:
            return _start_on(ports, deployment, names, log, end_with_us)


def _start_on(
    ports: dict[str, int],
    deployment: Deployment,
    names: Sequence[str],
    log: Callable[[str], None],
    end_with_us: bool,
) -> Stack:
    """Start the components on these ports and wait until they are healthy."""
    folder = airflow_configuration.airflow_home(deployment)
    secret = airflow_configuration.Secrets.of(folder)
    variables = airflow_configuration.environment(deployment, secret, ports)
    _migrate(deployment, variables, log)
    # MLflow's secrets reach no other process and no step; Airflow's secrets do not reach MLflow.
    for_mlflow = airflow_configuration.mlflow_environment(deployment, folder, secret)
    shared = fork_server.shared_environment(without_orchestrator(variables))  # by all steps
    for_steps = shared | {"PYTHONUNBUFFERED": "1"}
    environments = {"mlflow": for_mlflow, FORK_SERVER: for_steps}
    began = datetime.now(UTC)
    components: dict[str, Process] = {}
    for name in names:
        with log_of(deployment, name).open("ab") as output:
            process = supervisor.start(
                _command(name, ports, deployment),
                environments.get(name, variables),
                airflow_configuration.mlflow_folder(deployment) if name == "mlflow" else CHECKOUT,
                output,
                end_with_us=end_with_us,
            )
        components[name] = supervisor.released(process)
        stack = Stack(dict(components), ports, secret.password, secret.mlflow)
        # After each start, so that a killed start can be cleaned up.
        write_private(_state_file(deployment), json.dumps(asdict(stack)))
    log(f"Starting {', '.join(names)} …")
    try:
        _wait_until_up(deployment, stack, began)
    except BaseException:
        stop(deployment)
        raise
    return stack


def stop(deployment: Deployment) -> bool:
    """Stop this deployment's stack; return whether there was one."""
    stack = _read(deployment)
    if stack is None:
        return False
    supervisor.stop(stack.components.values(), STACK_GRACE, for_the_rest=2.0)
    _state_file(deployment).unlink(missing_ok=True)
    return True


def log_of(deployment: Deployment, component: str) -> Path:
    """Return the file that a component writes its output to."""
    return deployment.logs / f"{component}.log"


def named_airflow() -> str:
    """Return the address that the environment names, or ''."""
    return (os.environ.get("CONFIDE_AIRFLOW_API") or "").rstrip("/")


def connected(deployment: Deployment) -> AirflowApi | None:
    """Return a client of this deployment's Airflow, or None if none is named or running.

    Raises:
        BadInput: the address has no password, or is not an http address.
    """
    if not named_airflow():
        stack = running(deployment)
        return stack.api() if stack else None
    if not named_airflow().startswith(("http://", "https://")):
        raise BadInput("not an http address", where="CONFIDE_AIRFLOW_API")
    password = os.environ.get("CONFIDE_AIRFLOW_PASSWORD", "")
    if not password:
        raise BadInput(
            "an Airflow is named, but no password for it",
            where="CONFIDE_AIRFLOW_PASSWORD",
            fix="In a compose stack, .env sets it as AIRFLOW_PASSWORD.",
        )
    return AirflowApi(
        named_airflow(), os.environ.get("CONFIDE_AIRFLOW_USER") or "confide", password
    )


def _command(name: str, ports: dict[str, int], deployment: Deployment) -> list[str]:
    if name == "mlflow":
        return airflow_configuration.mlflow_command(ports["mlflow"])
    if name == FORK_SERVER:
        return fork_server.command(
            deployment.task_python, airflow_configuration.fork_server_socket(deployment)
        )
    if name in {"scheduler", "triggerer"}:
        # Their log servers would listen on every interface; the logs are read from the disk here.
        return [*_AIRFLOW, name, "--skip-serve-logs"]
    return [*_AIRFLOW, name]


def _migrate(deployment: Deployment, variables: dict[str, str], log: Callable[[str], None]) -> None:
    """Bring Airflow's database to this Airflow's schema, once for each version of its lock."""
    lock = (CHECKOUT / "requirements" / "orchestrator.txt").read_bytes()
    digest = hashlib.sha256(lock).hexdigest()
    stamp = airflow_configuration.airflow_home(deployment) / "migrated"
    if stamp.exists() and stamp.read_text() == digest:
        return
    log("Preparing Airflow's database …")
    file = log_of(deployment, "migrate")
    with file.open("ab") as output:
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
        raise ConfideError("Airflow's database could not be prepared", fix=f"See {file}.")
    stamp.write_text(digest)


def _wait_until_up(deployment: Deployment, stack: Stack, began: datetime) -> None:
    """Wait until all components are healthy and the DAGs have been parsed again."""
    api = stack.api()
    deadline = time.monotonic() + START_SECONDS
    waiting = "Airflow"
    pooled = False
    while time.monotonic() < deadline:
        time.sleep(0.5)
        stack.confirm_alive(deployment)
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
            if "mlflow" in stack.components and not _is_bound(stack.ports["mlflow"]):
                waiting = "mlflow"
                continue
            unread = [dag for dag in DAGS if (at := api.dag_parsed_at(dag)) is None or at < began]
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


def _is_bound(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((airflow_configuration.HOST, port)) == 0


def _state_file(deployment: Deployment) -> Path:
    return airflow_configuration.airflow_home(deployment) / "stack.json"


def _read(deployment: Deployment) -> Stack | None:
    try:
        state = json.loads(_state_file(deployment).read_text())
    except FileNotFoundError:
        return None
    components = {name: Process(**process) for name, process in state["components"].items()}
    return Stack(**state | {"components": components})
