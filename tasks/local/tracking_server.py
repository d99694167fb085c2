"""MLflow's pages in the local stack: one server on loopback, behind a password of its own.

Steps do not pass through it: they write into the database that it shows.
"""

from __future__ import annotations

import base64
import json
import os
import re
import urllib.request
from pathlib import Path

from tasks.local.configuration import HOST, MLFLOW_USERS, USER, Secrets, write_private
from tasks.runtime.deployment import CHECKOUT, Deployment

# What a server may need of our own environment: where its programs, its home and its temporary
# files are, how it speaks, which libraries it loads. Nothing of Airflow's or Confide's.
_TAKEN_OVER = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|LD_LIBRARY_PATH|OPENBLAS_\w+|OMP_\w+"
)
_REMEMBERED = 60  # seconds for which a password that was right is not hashed again


def command(port: int) -> list[str]:
    """Return the server's command line, which everybody on this machine may read."""
    python = str(CHECKOUT / ".venv" / "task" / "bin" / "python")
    where = ["--host", HOST, "--port", str(port), "--workers", "1"]
    return [python, "-m", "mlflow", "server", "--app-name", "basic-auth", *where]


def environment(deployment: Deployment, folder: Path, secret: Secrets) -> dict[str, str]:
    """Return all that the server is told; writes its settings into the stack's folder.

    It has no part in what Airflow's components and the steps are told: neither their secrets nor
    where seeds and ledger are.
    """
    settings = folder / "mlflow-auth.ini"
    lines = [
        "[mlflow]",
        "default_permission = NO_PERMISSIONS",  # as in the compose stack
        f"database_uri = sqlite:///{folder / MLFLOW_USERS}",
        f"auth_cache_ttl_seconds = {_REMEMBERED}",
    ]
    write_private(settings, "\n".join(lines) + "\n")
    kept = {name: value for name, value in os.environ.items() if _TAKEN_OVER.fullmatch(name)}
    return kept | {
        "MLFLOW_BACKEND_STORE_URI": deployment.tracking,  # may hold a password
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        "MLFLOW_AUTH_ADMIN_USERNAME": USER,
        "MLFLOW_AUTH_ADMIN_PASSWORD": secret.mlflow,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secret.mlflow_session,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def working_folder(deployment: Deployment) -> Path:
    """Return an empty folder for the server to work in: not the checkout, not Airflow's home."""
    folder = deployment.home / "mlflow-server"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def runs_page(server: str, password: str) -> str:
    """Return the page of the runs: MLflow's own first page shows other things."""
    from tasks.tracking.mlflow import PUBLIC

    place = f"{server}/api/2.0/mlflow/experiments/get-by-name?experiment_name={PUBLIC}"
    words = base64.b64encode(f"{USER}:{password}".encode()).decode()
    asked = urllib.request.Request(place, headers={"Authorization": f"Basic {words}"})  # noqa: S310
    try:
        with urllib.request.urlopen(asked, timeout=10) as answer:  # noqa: S310 - our own server
            experiment = json.load(answer)["experiment"]["experiment_id"]
    except (OSError, ValueError, KeyError):
        return server  # nothing has been run yet
    return f"{server}/#/experiments/{experiment}/runs"
