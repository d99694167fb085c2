"""`confide doctor`: checks this machine and this deployment, and suggests fixes."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import click

from tasks.commands import doctor_services
from tasks.commands.doctor_services import Finding
from tasks.commands.output import as_json, write_json
from tasks.runtime.deployment import CHECKOUT, Deployment, is_executable

_ROOM = 1 << 30  # bytes that a job needs, without its environments


@click.command("doctor")
@as_json
def command(as_json: bool) -> None:
    """Check this machine and this deployment; exit code 1 if something needed is missing."""
    deployment = Deployment.from_environment()
    findings = [finding for look in LOOKS for finding in look(deployment)]
    healthy = all(f.ok for f in findings if f.needed)
    if as_json:
        write_json({"ok": healthy, "findings": [asdict(f) for f in findings]})
    else:
        for f in findings:
            mark = "✓" if f.ok else "✗" if f.needed else "–"
            click.echo(f"{mark} {f.name}: {f.found}" + (f"\n    {f.fix}" if not f.ok else ""))
    if not healthy:
        click.get_current_context().exit(1)


def _python(deployment: Deployment) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("Python", sys.version_info[:2] == (3, 11), True, version, "Install Python 3.11.")
    task = Path(deployment.task_python)
    yield Finding("task environment", is_executable(task), True, str(task), "Run: make setup")
    if (CHECKOUT / "Makefile").exists():  # absent from a step's image, which needs no Airflow
        airflow = CHECKOUT / ".venv" / "orchestrator" / "bin" / "airflow"
        yield Finding(
            "orchestrator environment",
            is_executable(airflow),
            False,
            str(airflow),
            "Run: make setup",
        )


def _packages(deployment: Deployment) -> Iterator[Finding]:
    for name in ("tensorflow-cpu", "numba", "dp-accounting", "mlflow", "tokenizers", "sqlalchemy"):
        try:
            yield Finding(name, True, True, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, False, True, "not installed", "Run: make setup")


def _machine(deployment: Deployment) -> Iterator[Finding]:
    cores = os.cpu_count() or 1
    yield Finding("cores", cores >= 2, False, str(cores), "Two make the demo comfortable.")
    folder = next(p for p in (deployment.home, *deployment.home.parents) if os.access(p, os.F_OK))
    free = shutil.disk_usage(folder).free
    yield Finding(
        "disk", free >= _ROOM, True, f"{free >> 30} GiB free at {folder}", "Free some, or set "
        "CONFIDE_HOME to a larger disk."
    )  # fmt: skip
    writable = os.access(folder, os.W_OK)
    yield Finding("home", writable, True, str(deployment.home), "Set CONFIDE_HOME.")


def _secrets(deployment: Deployment) -> Iterator[Finding]:
    if not deployment.seeds.exists():
        yield Finding("privacy seeds", True, True, "there are none yet")
        return
    mode = stat.S_IMODE(deployment.seeds.stat().st_mode)
    open_ones = [f.name for f in deployment.seeds.iterdir() if f.stat().st_mode & 0o077]
    folder = deployment.seeds
    fix = f"chmod 700 {folder}; chmod 600 {folder}/*: who reads a seed can subtract the noise."
    closed = not mode & 0o077 and not open_ones
    words = f"mode {mode:o}" + (f", {len(open_ones)} files that others can read" * bool(open_ones))
    yield Finding("privacy seeds", closed, True, words, fix)


LOOKS: tuple[Callable[[Deployment], Iterator[Finding]], ...] = (
    _python,
    _packages,
    _machine,
    _secrets,
    doctor_services.storage,
    doctor_services.ledger,
    doctor_services.tracking,
    doctor_services.airflow,
    doctor_services.launcher,
)
