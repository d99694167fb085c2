"""Configuration of the local stack: ports, secrets, and the environments of Airflow and MLflow."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import tomllib
import urllib.request
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dp_core.errors import BadInput
from tasks.protocol import CHECKOUT, TASK_PYTHON
from tasks.protocol.fork_server import SERVER
from tasks.protocol.least_privilege import without_orchestrator
from tasks.runtime.deployment import Deployment, sqlite_url, write_private

USER = "admin"
MLFLOW_USERS = "mlflow-users.db"  # holds the password of MLflow's first start
HOST = "127.0.0.1"
PORTS = {"airflow": ("CONFIDE_AIRFLOW_PORT", 8080), "mlflow": ("CONFIDE_MLFLOW_PORT", 5000)}
_FIXED = tomllib.loads(Path(__file__).with_name("environment.toml").read_text(encoding="utf-8"))
_TRIES = 20  # proposals of the kernel; other stacks may have reserved some of them

# Variables of this process that MLflow's server may need: paths, home, temporary files, language,
# libraries. No variable of Airflow or Confide is among them.
_FOR_MLFLOW = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|OPENBLAS_\w+|OMP_\w+"
)
_PASSWORD_SECONDS = 60  # seconds for which a password that was right is not hashed again


@dataclass(frozen=True)
class Secrets:
    """The stack's secrets, drawn on first use and kept in a file that only its owner may read."""

    password: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    jwt: str = field(default_factory=lambda: secrets.token_urlsafe(48))
    session: str = field(default_factory=lambda: secrets.token_urlsafe(48))
    fernet: str = field(default_factory=lambda: urlsafe_b64encode(os.urandom(32)).decode())
    mlflow: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    mlflow_session: str = field(default_factory=lambda: secrets.token_urlsafe(48))

    @classmethod
    def of(cls, folder: Path) -> Secrets:
        """Return the folder's secrets; draw them on first use."""
        file = folder / "secrets.json"
        if not file.exists():
            (folder / MLFLOW_USERS).unlink(missing_ok=True)  # it holds an earlier password
            write_private(file, json.dumps(asdict(cls())))
        kept = cls(**json.loads(file.read_text()))
        write_private(folder / "passwords.json", json.dumps({USER: kept.password}) + "\n")
        return kept


@contextmanager
def free_ports(services: Iterable[str]) -> Iterator[dict[str, int]]:
    """Reserve a free port for each service until the context ends.

    A server binds its port seconds after the port is chosen. Until the context ends, a Unix socket
    with an abstract name reserves the port among all starting stacks. The kernel releases the name
    when the process ends. Like ports, abstract names are scoped to the network namespace.

    Raises:
        BadInput: the environment names a port that is taken.
    """
    with ExitStack() as reserved:
        yield {service: _free_port(service, reserved) for service in services}


def _free_port(service: str, reserved: ExitStack) -> int:
    """Return the port that the environment names, the usual one, or any free port."""
    variable, usual = PORTS[service]
    named = os.environ.get(variable, "")
    if named and not named.isdigit():
        raise BadInput(f"{named!r} is not a port", where=variable, fix="Give a number.")
    for wanted in (int(named),) if named else (usual, *[0] * _TRIES):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError, OverflowError):  # taken, reserved, or beyond 65535
                probe.bind((HOST, wanted))
                port = int(probe.getsockname()[1])
                name = socket.socket(socket.AF_UNIX)
                reserved.enter_context(name)
                name.bind(f"\0confide-port-{port}")
                return port
    raise BadInput(f"port {named or usual} is taken", where=variable, fix="Name another, or none.")


def environment(
    deployment: Deployment, secret: Secrets, ports: Mapping[str, int]
) -> dict[str, str]:
    """Return the variables of the stack's processes.

    Three settings contain Airflow's port and must agree; with only the first, every task fails.
    """
    airflow = f"http://{HOST}:{ports['airflow']}"
    folder = airflow_home(deployment)
    logs = str(deployment.logs / "airflow")
    kept = without_orchestrator(os.environ) | _FIXED
    for name in ("NO_PROXY", "no_proxy"):
        kept[name] = ",".join(filter(None, [kept.get(name), HOST, "localhost"]))
    return kept | {
        "PYTHONPATH": str(CHECKOUT),
        "CONFIDE_HOME": str(deployment.home),
        "CONFIDE_STORE": deployment.store,
        "CONFIDE_TRACKING_UI": f"http://{HOST}:{ports['mlflow']}",
        "AIRFLOW_HOME": str(folder),
        "AIRFLOW__API__HOST": HOST,
        "AIRFLOW__API__PORT": str(ports["airflow"]),
        "AIRFLOW__API__BASE_URL": airflow,
        "AIRFLOW__API__SECRET_KEY": secret.session,
        "AIRFLOW__API_AUTH__JWT_SECRET": secret.jwt,
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{airflow}/execution/",
        "AIRFLOW__CORE__FERNET_KEY": secret.fernet,
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(folder / "passwords.json"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(CHECKOUT / "dags"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": sqlite_url(folder / "airflow.db"),
        "AIRFLOW__LOGGING__BASE_LOG_FOLDER": logs,
        "AIRFLOW__LOGGING__DAG_PROCESSOR_CHILD_PROCESS_LOG_DIRECTORY": f"{logs}/dags",
        SERVER: os.environ.get(SERVER) or str(fork_server_socket(deployment)),
    }


def fork_server_socket(deployment: Deployment) -> Path:
    """Return the socket of the stack's fork server."""
    return airflow_home(deployment) / "fork-server.socket"


def airflow_home(deployment: Deployment) -> Path:
    """Return the folder of Airflow's database and of the stack's secrets and state."""
    return deployment.home / "airflow"


def mlflow_command(port: int) -> list[str]:
    """Return MLflow's command line, which every user of this machine may read."""
    where = ["--host", HOST, "--port", str(port), "--workers", "1"]
    return [str(TASK_PYTHON), "-m", "mlflow", "server", "--app-name", "basic-auth", *where]


def mlflow_environment(deployment: Deployment, folder: Path, secret: Secrets) -> dict[str, str]:
    """Return the environment of MLflow's server; write its settings into the stack's folder.

    Steps do not use the server: they write into the database that it shows.

    The environment contains neither the secrets of Airflow and the steps nor the places of seeds
    and ledger.
    """
    settings = folder / "mlflow-auth.ini"
    lines = [
        "[mlflow]",
        "default_permission = NO_PERMISSIONS",  # as in the compose stack
        f"database_uri = {sqlite_url(folder / MLFLOW_USERS).replace('%', '%%')}",  # as configparser
        f"auth_cache_ttl_seconds = {_PASSWORD_SECONDS}",
    ]
    write_private(settings, "\n".join(lines) + "\n")
    kept = {name: value for name, value in os.environ.items() if _FOR_MLFLOW.fullmatch(name)}
    return kept | {
        "MLFLOW_BACKEND_STORE_URI": deployment.tracking,  # may hold a password
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        "MLFLOW_AUTH_ADMIN_USERNAME": USER,
        "MLFLOW_AUTH_ADMIN_PASSWORD": secret.mlflow,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secret.mlflow_session,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def mlflow_folder(deployment: Deployment) -> Path:
    """Return an empty working folder for the server, apart from checkout and Airflow's home."""
    folder = deployment.home / "mlflow-server"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def runs_page(server: str, password: str) -> str:
    """Return the page of the runs with ε, F1 and exposure, instead of MLflow's default columns."""
    from tasks.tracking.mlflow import PUBLIC, TRAINING_VIEW, VIEW

    address = f"{server}/api/2.0/mlflow/experiments/get-by-name?experiment_name={PUBLIC}"
    words = b64encode(f"{USER}:{password}".encode()).decode()
    asked = urllib.request.Request(address, headers={"Authorization": f"Basic {words}"})  # noqa: S310
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:  # noqa: S310 - our own server
            experiment = json.load(answer)["experiment"]["experiment_id"]
    except (OSError, ValueError, KeyError):
        return f"{server}/#/experiments?{TRAINING_VIEW}"  # nothing has been run yet
    return f"{server}/#/experiments/{experiment}/runs?{TRAINING_VIEW}&viewStateShareKey={VIEW}"
