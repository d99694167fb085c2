"""`confide doctor`: checks this machine, this deployment and its services, and suggests fixes."""

import os
import shlex
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path

import click

from dp_core.errors import BadInput, ConfideError, without_password
from tasks.commands.output import as_json, write_answer
from tasks.local.airflow_api import AirflowApi
from tasks.local.stack import TRAINING_POOL, connected, named_airflow
from tasks.protocol import CHECKOUT, SETUP
from tasks.runtime.deployment import Deployment, is_executable, sqlite_file

_ROOM = 1 << 30  # bytes that a job needs, without its environments
RESTORE_BOTH = "Restore ledger and seeds from one backup (docs/operate.md)."
_SKEW = 5.0  # seconds: entries of the ledger and of the logs are compared by people
_PATIENCE = 20  # seconds for a command that asks another program


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    ok: bool
    needed: bool  # False: good to have
    found: str
    fix: str = ""


def answers(
    name: str, address: str, ask: Callable[[], str], fix: str, *, needed: bool = True
) -> Check:
    """Return the result of a check: `ask` returns details, or raises an error."""
    try:
        words = ask()
    except Exception as error:  # noqa: BLE001 - every error is a finding
        said = str(error) if isinstance(error, ConfideError) else type(error).__name__
        return Check(name, False, needed, f"{address}: {said}", fix)
    return Check(name, True, needed, f"{address}{': ' if words else ''}{words}")


@click.command("doctor")
@as_json
def command() -> int:
    """Check this machine and this deployment; exit code 1 if something needed is missing.

    Example:
      confide doctor
    """
    deployment = Deployment.from_environment()
    findings = [finding for look in LOOKS for finding in look(deployment)]
    healthy = all(f.ok for f in findings if f.needed)
    write_answer(
        {"ok": healthy, "findings": [asdict(f) for f in findings]},
        lambda: click.echo("\n".join(map(_line, findings))),
    )
    return 0 if healthy else 1


def _line(finding: Check) -> str:
    mark = "✓" if finding.ok else "✗" if finding.needed else "–"
    fix = "" if finding.ok else f"\n    {finding.fix}"
    return f"{mark} {finding.name}: {finding.found}{fix}"


# --- this machine


def _python(deployment: Deployment) -> Iterator[Check]:
    task = Path(deployment.task_python)
    yield Check("task environment", is_executable(task), True, str(task), f"Run: {SETUP}")
    if (CHECKOUT / "Makefile").exists():  # absent from a step's image, which needs no Airflow
        airflow = CHECKOUT / ".venv" / "orchestrator" / "bin" / "airflow"
        there, fix = is_executable(airflow), "Run: make setup"
        yield Check("orchestrator environment", there, False, str(airflow), fix)


def _packages(deployment: Deployment) -> Iterator[Check]:
    versions = {d.name.replace("_", "-").lower(): d.version for d in distributions()}
    other_build = versions.get("tensorflow-cpu") or versions.get("tensorflow-tpu", "")
    versions.setdefault("tensorflow", other_build)
    for name in ("tensorflow", "numba", "dp-accounting", "mlflow", "tokenizers", "sqlalchemy"):
        version = versions.get(name, "")
        yield Check(name, bool(version), True, version or "not installed", f"Run: {SETUP}")


def _machine(deployment: Deployment) -> Iterator[Check]:
    cores = os.cpu_count() or 1
    yield Check("cores", cores >= 2, False, str(cores), "Two make the demo comfortable.")
    folder = next(p for p in (deployment.home, *deployment.home.parents) if os.access(p, os.F_OK))
    free = shutil.disk_usage(folder).free
    words = f"{free >> 30} GiB free at {folder}"
    fix = "Free some, or set CONFIDE_HOME to a larger disk."
    yield Check("disk", free >= _ROOM, True, words, fix)
    writable = os.access(folder, os.W_OK)
    yield Check("home", writable, True, str(deployment.home), "Set CONFIDE_HOME.")


def _secrets(deployment: Deployment) -> Iterator[Check]:
    if not deployment.seeds.exists():
        yield Check("privacy seeds", True, True, "there are none yet")
        return
    mode = stat.S_IMODE(deployment.seeds.stat().st_mode)
    open_ones = [f.name for f in deployment.seeds.iterdir() if f.stat().st_mode & 0o077]
    folder = deployment.seeds
    fix = f"chmod 700 {folder}; chmod 600 {folder}/*: who reads a seed can subtract the noise."
    closed = not mode & 0o077 and not open_ones
    words = f"mode {mode:o}" + (f", {len(open_ones)} files that others can read" * bool(open_ones))
    yield Check("privacy seeds", closed, True, words, fix)


# --- its services


def storage(deployment: Deployment) -> Iterator[Check]:
    """Write, read and remove an object where the steps write."""
    yield answers("store", deployment.store, lambda: _store(deployment), "Check CONFIDE_STORE.")


def ledger(deployment: Deployment) -> Iterator[Check]:
    """Ask the privacy ledger for its accounts, schema, integrity and clock.

    The ledger is also compared with the seeds and with the outputs in the store.
    """
    fix, place = "Check CONFIDE_LEDGER.", deployment.ledger_place
    answer = answers("ledger", place, lambda: _ledger(deployment), fix)
    yield answer
    if not answer.ok:
        return
    file = sqlite_file(deployment.ledger)
    if file is not None:
        mode = stat.S_IMODE(file.stat().st_mode)
        fix = f"chmod 600 {shlex.quote(str(file))}"
        yield Check("ledger's file", not mode & 0o077, True, f"{file}: mode {mode:o}", fix)
    yield answers("ledger's integrity", place, lambda: _integrity(deployment), RESTORE_BOTH)
    yield answers("seeds of releases", place, lambda: _seeds_of_releases(deployment), RESTORE_BOTH)
    yield from _releases(deployment)
    if file is None:  # the database of another machine
        fix = "Synchronise both by NTP."
        yield answers("clock", place, lambda: _clock(deployment), fix, needed=False)


def _releases(deployment: Deployment) -> Iterator[Check]:
    """Compare the releases in the ledger with the outputs in the store, both ways."""
    from tasks.releases.deployment_ledger import compare, open_ledger

    try:
        faults, without_output = compare(open_ledger(deployment), deployment.open_store())
    except (ConfideError, OSError) as error:
        yield Check("releases in the store", False, True, str(error), RESTORE_BOTH)
        return
    words = _first(faults) or "the ledger holds each of them"
    yield Check("releases in the store", not faults, True, words, RESTORE_BOTH)
    if without_output:
        words = f"{len(without_output)} settled releases have no output in the store"
        fix = "Were outputs deleted, or does CONFIDE_STORE name another store?"
        yield Check("outputs of releases", False, False, words, fix)


def _first(faults: Sequence[str]) -> str:
    """Return the first of several faults, and the number of the others."""
    return f"{faults[0]} (and {len(faults) - 1} more)" if len(faults) > 1 else "".join(faults)


def tracking(deployment: Deployment) -> Iterator[Check]:
    """Check MLflow; without it, the steps keep their metrics on disk."""
    from tasks.tracking.mlflow import unsent

    fix = "Check CONFIDE_TRACKING; runs keep their metrics on disk meanwhile."
    file = sqlite_file(deployment.tracking)
    address = str(file) if file else without_password(deployment.tracking)
    yield answers("MLflow", address, lambda: _mlflow(deployment), fix, needed=False)
    waiting = unsent(deployment)
    words = f"steps whose numbers wait for MLflow: {waiting}" if waiting else "nothing waits"
    fix = "They are sent by the next step that ends while MLflow answers, or by the MLflow sync."
    yield Check("event logs", not waiting, False, words, fix)


def airflow(deployment: Deployment) -> Iterator[Check]:
    """Check Airflow's components, its DAGs, and the pool of the trainings."""
    address = without_password(named_airflow()) or "this machine's own"
    fix = "Check CONFIDE_AIRFLOW_API and CONFIDE_AIRFLOW_PASSWORD, and Airflow's own logs."
    try:
        api = connected(deployment)
    except BadInput as error:
        yield Check("Airflow", False, True, str(error), fix)
        return
    if api is None:
        yield Check("Airflow", True, False, "none runs here, and CONFIDE_AIRFLOW_API names none")
        return
    yield answers("Airflow", address, lambda: _healthy(api), fix)
    pool, slots, _ = TRAINING_POOL
    fix = f"Without it trainings wait for ever: airflow pools set {pool} {slots} 'Trainings'"
    yield answers(f"pool {pool}", address, lambda: _pool(api, pool), fix)


def launcher(deployment: Deployment) -> Iterator[Check]:
    """Check whether the launcher can start steps."""
    image = os.environ.get("CONFIDE_TASK_IMAGE") or "confide-task"
    place, command, fix = {
        "process": (deployment.task_python, [deployment.task_python, "-c", "import tasks"], SETUP),
        "docker": (
            image,
            ["docker", "image", "inspect", "--format", "{{.Id}}", image],
            f"Start the engine; build or pull {image}.",
        ),
        "kubernetes": (
            "may start pods in the namespace confide",
            ["kubectl", "auth", "can-i", "create", "pods", "--namespace", "confide"],
            "Check kubectl's context and the role that starts pods (docs/cloud.md).",
        ),
    }[deployment.launcher]
    yield answers(f"launcher {deployment.launcher}", place, lambda: _output(command)[:19], fix)
    if deployment.launcher == "kubernetes":
        folder = os.environ.get("CONFIDE_POD_TEMPLATES") or CHECKOUT / "dags/launcher/pods"
        there = all((Path(folder) / f"{name}.yaml").is_file() for name in ("cpu", "tpu"))
        yield Check("pod templates", there, True, str(folder), "Set CONFIDE_POD_TEMPLATES.")


def _store(deployment: Deployment) -> str:
    deployment.prepare()
    probe, content = f"{deployment.store}/doctor/probe-{os.getpid()}", os.urandom(64)
    store = deployment.open_store()
    store.write(probe, content)
    try:
        if store.read(probe) != content:
            raise ConfideError("the content read differs from the content written")
    finally:
        store.remove(probe)
    return ""


def _ledger(deployment: Deployment) -> str:
    from dp_core.privacy.ledger import Ledger
    from dp_core.privacy.ledger.models import SCHEMA_VERSION

    deployment.prepare()
    known = len(Ledger.open(deployment.ledger).datasets())
    return f"schema {SCHEMA_VERSION}, {known} data sets"


def _integrity(deployment: Deployment) -> str:
    from dp_core.privacy.seed_store import SeedStore
    from tasks.releases.deployment_ledger import confirm_store, open_ledger

    ledger = open_ledger(deployment)
    if faults := ledger.faults(SeedStore(deployment.seeds)):
        raise ConfideError(_first(faults))
    confirm_store(deployment.open_store(), ledger.identity())
    return "every entry can be read; seeds and store belong to it"


def _seeds_of_releases(deployment: Deployment) -> str:
    from dp_core.privacy.seed_store import SeedStore
    from tasks.releases.deployment_ledger import lost_seeds, open_ledger

    lost = lost_seeds(open_ledger(deployment), SeedStore(deployment.seeds))
    if lost:
        raise ConfideError(f"the seeds of {len(lost)} releases are missing (entry {lost[0]})")
    return "every seed that was drawn is there"


def _clock(deployment: Deployment) -> str:
    """Compare the clocks of this machine and of the ledger's PostgreSQL server."""
    from sqlalchemy import text

    from dp_core.privacy.ledger.database import Database

    with Database(deployment.ledger).transaction() as db:
        asked = time.time()
        answer = db.execute(text("SELECT extract(epoch FROM clock_timestamp())"))
        theirs = float(answer.scalar_one())
    skew = max(0.0, abs(theirs - asked) - (time.time() - asked))
    words = f"{skew:.1f} s between this machine and the ledger's database"
    if skew > _SKEW:
        raise ConfideError(words)
    return words


def _mlflow(deployment: Deployment) -> str:
    from tasks.tracking.mlflow import reachable

    if not reachable(deployment):
        raise ConfideError("does not answer")
    return ""


def _healthy(api: AirflowApi) -> str:
    if sick := [name for name, status in api.health().items() if status != "healthy"]:
        raise ConfideError(f"not healthy: {', '.join(sick)}")
    if errors := api.import_errors():
        raise ConfideError(f"a DAG cannot be read: {errors[0]}")
    return ""


def _pool(api: AirflowApi, pool: str) -> str:
    slots = api.pool_slots(pool)
    if slots is None:
        raise ConfideError("there is no such pool")
    return f"{slots} at a time"


def _output(words: list[str]) -> str:
    """Return the output of a command that runs in the checkout.

    Raises:
        ConfideError: the command is missing, fails or does not end; with its last line of output.
    """
    command = shutil.which(words[0])
    if command is None:
        raise ConfideError(f"there is no {words[0]} here")
    try:
        done = subprocess.run(  # noqa: S603 - a list of words; no shell
            [command, *words[1:]],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            cwd=CHECKOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfideError(f"{words[0]} does not answer") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
        raise ConfideError(said.splitlines()[-1][:200])
    return done.stdout.strip()


LOOKS: tuple[Callable[[Deployment], Iterator[Check]], ...] = (
    _python,
    _packages,
    _machine,
    _secrets,
    storage,
    ledger,
    tracking,
    airflow,
    launcher,
)
