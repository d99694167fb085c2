"""`confide demo`, `up`, `down`, `announce` and `backup`: this machine, without Docker."""

import os
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dp_core.errors import BadInput, ConfideError
from tasks.commands.output import as_json, write_answer
from tasks.commands.settings_options import settings_from, settings_of_options, settings_options
from tasks.runtime.deployment import Deployment, sqlite_file


@click.command()
@settings_options
def demo(**options: Any) -> None:
    """Run the preset `demo` (or another job) through Airflow and show its report.

    Example:
      confide demo
    """
    from tasks.commands.export_command import show_next
    from tasks.commands.report_command import show
    from tasks.local.demo import run
    from tasks.protocol.settings import JobSettings

    if not (options["preset"] or options["file"]):
        options["preset"] = "demo"
    started = time.monotonic()
    console = Console()
    deployment = Deployment.from_environment()
    # The files and devices of containers cannot be checked from this machine.
    read = settings_from if deployment.launcher == "process" else settings_of_options
    settings = read(JobSettings, **options)
    report = run(deployment, settings, console)
    show(report)
    show_next(report, settings.private_dataset)
    console.print(f"Took {time.monotonic() - started:.0f} s.")


@click.command()
def up() -> None:
    """Serve the Airflow and MLflow pages on this machine, until `confide down`.

    Example:
      confide up
    """
    from tasks.local import stack as local
    from tasks.local.airflow_configuration import USER, airflow_home, runs_page

    console = Console(highlight=False, soft_wrap=True)  # a broken address cannot be opened
    deployment = Deployment.from_environment()
    stack = local.running(deployment)
    if stack is None or set(stack.components) != set(local.PAGES):
        stack = local.start(deployment, local.PAGES, console.print)
    console.print(f"Airflow  {stack.airflow_url}   user {USER}, password {stack.password}")
    runs = runs_page(stack.mlflow_url, stack.mlflow_password)
    console.print(f"MLflow   {runs}   user {USER}, password {stack.mlflow_password}")
    console.print(f"The passwords are kept in {airflow_home(deployment) / 'secrets.json'}")
    console.print("Both answer on this machine only. Stop them with `confide down`.")


@click.command()
def down() -> None:
    """Stop the services that `up` started, and remains of an earlier command.

    Example:
      confide down
    """
    from tasks.local.stack import stop

    stopped = stop(Deployment.from_environment())
    click.echo("Stopped." if stopped else "Nothing was running.")


@click.command()
@click.argument("corpus")
@click.argument("version")
@as_json
def announce(corpus: str, version: str) -> None:
    """Announce a new VERSION of the private data set CORPUS to Airflow.

    The DAG `new_corpus` then checks both values and starts `dp_bert` with the data set's settings
    (`CONFIDE_CORPORA`).

    Example:
      confide announce ward-notes 2026-11
    """
    from tasks.local.stack import connected

    api = connected(Deployment.from_environment())
    if api is None:
        raise BadInput(
            "no Airflow runs here", fix="Run `make up`, or set CONFIDE_AIRFLOW_API to one."
        )
    api.announce(corpus, version)
    said = f"Announced {corpus} {version}: follow the DAG new_corpus in Airflow."
    answer = {"corpus": corpus, "data_version": version, "announced": True}
    write_answer(answer, lambda: click.echo(said))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@as_json
def backup(folder: Path) -> None:
    """Copy the privacy ledger, the secret seeds and MLflow's database into a new FOLDER.

    The databases may be in use; each copy is a consistent snapshot. Keep the copy as safe as your
    keys: a reader of a seed can subtract the noise of its release.

    Example:
      confide backup /backups/confide
    """
    deployment = Deployment.from_environment()
    if folder.exists():
        raise BadInput("there is something already", where=str(folder), fix="Name a new folder.")
    if {deployment.seeds, deployment.keys} & {*folder.resolve().parents}:
        raise BadInput("it is in a folder that is copied", where=str(folder), fix="Name another.")
    os.umask(0o077)
    kept = copied(deployment, folder)
    lines = [f"{name}: {place}" for name, place in kept.items()]
    lines.append("To restore, see docs/operate.md. Keep this where you keep keys.")
    write_answer({"folder": str(folder), "kept": kept}, lambda: click.echo("\n".join(lines)))


def copied(deployment: Deployment, folder: Path) -> dict[str, str]:
    """Copy the deployment's state; return the path or the server of each part.

    Raises:
        ConfideError: a database cannot be read, or the copy cannot be written.
    """
    kept = {}
    try:
        folder.mkdir(parents=True, mode=0o700)
        # The seeds come first: an entry without its seed would be charged again, while a seed
        # without its entry is harmless.
        for name, store in (("seeds", deployment.seeds), ("keys", deployment.keys)):
            if store.is_dir():  # files that are being written are left out
                shutil.copytree(store, folder / name, ignore=shutil.ignore_patterns(".*"))
                (folder / name).chmod(0o700)
                kept[name] = str(folder / name)
        for name, url in (("ledger", deployment.ledger), ("mlflow", deployment.tracking)):
            kept[name] = _database(url, folder / f"{name}.db")
    except (OSError, sqlite3.Error) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else ""
        raise ConfideError(
            f"the backup is not complete ({reason or type(error).__name__})",
            where=str(folder),
            fix="Delete it and try again.",
        ) from error
    return kept


def _database(url: str, copy: Path) -> str:
    source = sqlite_file(url)
    if source is None:
        return "kept by a server: pg_dump, docs/operate.md"
    if not source.exists():
        return "none yet"
    with (
        closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as whole,
        closing(sqlite3.connect(copy)) as target,
    ):
        whole.backup(target)
        if target.execute("PRAGMA integrity_check").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("damaged")
    copy.chmod(0o600)
    return str(copy)
