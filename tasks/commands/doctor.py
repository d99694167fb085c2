"""`confide doctor`: what this machine and this deployment lack, and how to get it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from dp_core.errors import ConfideError
from tasks.commands.output import as_json, write_json
from tasks.deployment import CHECKOUT, Deployment

_ROOM = 5 << 30  # bytes that a job should have free


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    needed: bool  # False: good to have
    found: str
    fix: str = ""


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
    yield Finding("task environment", task.exists(), True, str(task), "Run: make setup")
    airflow = CHECKOUT / ".venv" / "orchestrator" / "bin" / "airflow"
    yield Finding("orchestrator environment", airflow.exists(), False, str(airflow), "make setup")


def _packages(deployment: Deployment) -> Iterator[Finding]:
    for name in ("tensorflow-cpu", "dp-accounting", "mlflow", "tokenizers", "sqlalchemy"):
        try:
            yield Finding(name, True, True, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, False, True, "not installed", "Run: make setup")


def _machine(deployment: Deployment) -> Iterator[Finding]:
    cores = os.cpu_count() or 1
    yield Finding("cores", cores >= 2, False, str(cores), "Two make the demo comfortable.")
    place = next(p for p in (deployment.home, *deployment.home.parents) if p.exists())
    free = shutil.disk_usage(place).free
    yield Finding(
        "disk", free >= _ROOM, True, f"{free >> 30} GiB free at {place}", "Free some, or set "
        "CONFIDE_HOME to a larger disk."
    )  # fmt: skip
    writable = os.access(place, os.W_OK)
    yield Finding("home", writable, True, str(deployment.home), "Set CONFIDE_HOME.")
    docker = shutil.which("docker")
    needed = deployment.launcher == "docker"
    yield Finding("docker", docker is not None, needed, docker or "none", "Install Docker.")


def _secrets(deployment: Deployment) -> Iterator[Finding]:
    if not deployment.seeds.exists():
        yield Finding("privacy seeds", True, True, "none drawn yet")
        return
    mode = stat.S_IMODE(deployment.seeds.stat().st_mode)
    fix = f"chmod 700 {deployment.seeds}: who reads the seeds can subtract the noise."
    yield Finding("privacy seeds", not mode & 0o077, True, f"mode {mode:o}", fix)


def _services(deployment: Deployment) -> Iterator[Finding]:
    yield _answers("store", deployment.store, lambda: _store(deployment), "Check CONFIDE_STORE.")
    fix = "Check CONFIDE_LEDGER."
    yield _answers("ledger", _place(deployment.ledger), lambda: _ledger(deployment), fix)
    fix = "Check CONFIDE_TRACKING; runs keep their metrics on disk meanwhile."
    yield _answers("MLflow", _place(deployment.tracking), lambda: _mlflow(deployment), fix)


def _answers(name: str, place: str, ask: Callable[[], None], fix: str) -> Finding:
    try:
        ask()
    except (ConfideError, OSError, ImportError) as error:
        said = str(error) if isinstance(error, ConfideError) else type(error).__name__
        return Finding(name, False, name != "MLflow", f"{place}: {said}", fix)
    return Finding(name, True, True, place)


def _place(url: str) -> str:
    """Return a URL without the password that it may hold."""
    head, at, tail = url.rpartition("@")
    return f"{head.split('//')[0]}//…@{tail}" if at else url


def _store(deployment: Deployment) -> None:
    from tasks.storage import Store

    deployment.prepare()
    probe = f"{deployment.store}/doctor/probe"
    store = Store(deployment.store, deployment.cache)
    store.write(probe, b"here")
    if store.read(probe) != b"here":
        raise ConfideError("what was written is not what is read")
    store.remove(probe)


def _ledger(deployment: Deployment) -> None:
    from dp_core.privacy.ledger import Ledger

    Ledger.open(deployment.ledger).datasets()


def _mlflow(deployment: Deployment) -> None:
    from tasks.tracking import reachable

    if not reachable(deployment):
        raise ConfideError("does not answer")


LOOKS: tuple[Callable[[Deployment], Iterator[Finding]], ...] = (
    _python,
    _packages,
    _machine,
    _secrets,
    _services,
)
