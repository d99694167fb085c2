"""`confide backup`: copies this machine's ledger, seeds and MLflow database."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import click

from dp_core.errors import BadInput, ConfideError
from tasks.commands.output import as_json, write_json
from tasks.runtime.deployment import Deployment, sqlite_file


@click.command("backup")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@as_json
def command(folder: Path, as_json: bool) -> None:
    """Copy the privacy ledger, the secret seeds and MLflow's database into a new FOLDER.

    The databases may be in use; each copy is a consistent snapshot. Keep the copy as safe as your
    keys: a reader of a seed can subtract the noise of its release.
    """
    deployment = Deployment.from_environment()
    if folder.exists():
        raise BadInput("there is something already", where=str(folder), fix="Name a new folder.")
    os.umask(0o077)
    kept = copied(deployment, folder)
    if as_json:
        write_json({"folder": str(folder), "kept": kept})
        return
    for name, place in kept.items():
        click.echo(f"{name}: {place}")
    click.echo("To restore, see docs/operate.md. Keep this where you keep keys.")


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
