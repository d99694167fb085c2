"""`confide export`: a released model in a folder of its own, fit to be handed on."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from dp_core.errors import BadInput
from tasks.commands.output import as_json, write_json
from tasks.commands.report import latest
from tasks.deployment import Deployment
from tasks.statements import WORDS
from tasks.storage import Store
from tasks.workbench import read_result

_MODEL = "dp_pretraining"


@click.command("export")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--uri", default="", help="A training step's output; of the latest run otherwise.")
@as_json
def command(folder: Path, uri: str, as_json: bool) -> None:
    """Copy a released model to FOLDER: in Hugging Face's layout, with its privacy statement.

    Nothing else goes with it. The folder in the store holds the operator's numbers too: hand on
    the copy. A model without a guarantee is refused.
    """
    deployment = Deployment.from_environment()
    store = Store(deployment.store, deployment.cache)
    uri = uri.rstrip("/") or _latest_model(store)
    names = _released_files(store, uri)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput("it is there, and not empty", where=str(folder), fix="Name a new folder.")
    source = store.local_copy(uri)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder / name)
    if as_json:
        write_json({"model": str(folder), "uri": uri, "files": names})
    else:
        click.echo(f"{folder}: {len(names)} files. What it promises: {folder / WORDS}")


def _latest_model(store: Store) -> str:
    report = latest(store)
    models: dict[str, str] = report.facts.get("models", {})
    if _MODEL in models:
        return models[_MODEL]
    if not models:
        raise BadInput("the latest report names no model", where="export", fix="Name it by --uri.")
    raise BadInput(
        "the latest run is a sweep",
        where="export",
        fix=f"Choose by --uri: {', '.join(f'{name} {uri}' for name, uri in models.items())}",
    )


def _released_files(store: Store, uri: str) -> list[str]:
    result = read_result(store, uri)
    if result is None or "operator_only" not in result.facts:
        raise BadInput("no model there", where=uri, fix="Give a training step's output.")
    if result.facts["operator_only"]:
        raise BadInput(
            "trained on private text without privacy: the operator's alone",
            where=uri,
            fix="Give the output of dp_pretraining.",
        )
    return store.published(uri)
