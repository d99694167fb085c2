"""What a DAG must know of its deployment, from the `CONFIDE_*` variables. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def home() -> Path:
    """Return the folder for everything that this deployment writes on this machine."""
    return Path(os.environ.get("CONFIDE_HOME") or CHECKOUT / ".confide").expanduser().resolve()


def store() -> str:
    """Return the URI under which every step has its own output folder."""
    return (os.environ.get("CONFIDE_STORE") or (home() / "store").as_uri()).rstrip("/")


def task_python() -> str:
    """Return the interpreter of the task environment."""
    default = CHECKOUT / ".venv" / "task" / "bin" / "python"
    return os.environ.get("CONFIDE_TASK_PYTHON") or str(default)


def launcher() -> str:
    """Return how steps are started: process, docker or kubernetes.

    Raises:
        ValueError: another word; Airflow shows it as the DAG's import error.
    """
    name = os.environ.get("CONFIDE_LAUNCHER") or "process"
    if name not in {"process", "docker", "kubernetes"}:
        raise ValueError(f"CONFIDE_LAUNCHER is {name!r}: use process, docker or kubernetes")
    return name
