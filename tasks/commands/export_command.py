"""`confide export`: copies a released model into a new folder for others."""

import json
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click

from dp_core.errors import BadInput, ConfideError, Contradicted
from dp_core.models.hugging_face import ADAPTER_FOLDER, CONFIG, WEIGHTS
from tasks.commands.command_options import options_of
from tasks.commands.output import as_json, new_folder, write_answer
from tasks.commands.report_command import given, latest
from tasks.protocol.job import names_of
from tasks.protocol.messages import StepResult
from tasks.protocol.points import DP_MODEL
from tasks.releases.provenance import releasable_model
from tasks.results import STATEMENT_DATA, STATEMENT_WORDS, kept_folder, of_last_model, read_result
from tasks.runtime.deployment import Deployment
from tasks.storage.store import Store

_CARD = "README.md"
_MODEL = names_of(DP_MODEL)["pretraining"]


@click.command("export")
@click.argument("folder", type=click.Path(path_type=Path))
@options_of("export")
@as_json
def command(
    folder: Path, uri: str, adapter: bool, after: int | None, push: str | None, **words: str
) -> None:
    """Copy a released model to FOLDER in Hugging Face's layout, with card and privacy statement.

    A LoRA adapter is merged into the model, or exported without it by --adapter. Share this copy
    and not the folder in the store, which also holds the operator's metrics. A model without a
    guarantee, or whose guarantee an audit contradicts, is refused.

    Example:
      confide export ward-model
    """
    if push:
        _confirm_hub()
    store = Deployment.from_environment().open_store()
    uri = chosen_model(store, uri, "export")
    files = export(store, uri, folder, adapter=adapter, after=after, words=words)
    if push:
        _upload(folder, push)
    said = f"{folder}: {len(files)} files. Privacy statement: {folder / STATEMENT_WORDS}"
    answer = {"model": str(folder), "uri": uri, "files": files}
    write_answer(answer, lambda: click.echo(said))


def export(
    store: Store,
    uri: str,
    folder: Path,
    *,
    adapter: bool = False,
    after: int | None = None,
    words: dict[str, str] | None = None,
) -> list[str]:
    """Copy a released model to a new folder with its card; return the sorted names of its files.

    Raises:
        BadInput: there is no such model, it has no guarantee, or the folder is not empty.
        Contradicted: an audit refutes the model's claim.
    """
    from tasks.evidence.pack import model_card

    result = releasable_model(store, uri)
    released, inside = _of_updates(_released_files(store, uri, result), after, uri)
    names = _of_form(released, adapter, uri)
    source = store.local_copy(uri) / inside
    with new_folder(folder) as partial:
        for name, new in names.items():
            (partial / new).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, partial / new)
        statement = json.loads((partial / STATEMENT_DATA).read_text())
        title = (words or {}) | {"model_name": folder.resolve().name}
        card = model_card(result, statement, words=title, measured=after is None)
        (partial / _CARD).write_text(card, encoding="utf-8")
    return sorted([*names.values(), _CARD])


def _confirm_hub() -> None:
    """Raise `BadInput` if the hub's client is missing."""
    if find_spec("huggingface_hub") is None:
        raise BadInput("huggingface_hub is missing", where="--push", fix="Install it by pip.")


def _upload(folder: Path, repository: str) -> None:
    """Upload an exported folder to a hub.

    Raises:
        ConfideError: the hub does not accept it; the exported folder stays.
    """
    from huggingface_hub import HfApi

    try:
        HfApi().create_repo(repository, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # noqa: BLE001 - the client has many kinds of errors
        raise ConfideError(
            f"not uploaded ({type(error).__name__}); the copy is in {folder}",
            where=repository,
            fix="Check the name, HF_ENDPOINT and HF_TOKEN.",
        ) from None


def show_next(uri: str, dataset: str) -> None:
    """Print the commands that follow a run, with the names of its models."""
    report = read_result(Deployment.from_environment().open_store(), uri)
    assert report is not None  # noqa: S101 - it has just been shown
    model, commands = f"{dataset}-model", ["confide report", "confide up"]
    if _MODEL in report.facts["models"]:
        evidence = f"confide evidence {model} --out {dataset}-evidence"
        commands = [f"confide export {model}", evidence, *commands]
    click.echo("\n  ".join(["\nNext:", *commands]))


def _of_updates(names: Sequence[str], after: int | None, uri: str) -> tuple[list[str], str]:
    """Return the files and the folder of the last model, or of an earlier model that was kept.

    Raises:
        BadInput: no such model was kept.
    """
    if after is None:
        return of_last_model(names), ""
    inside = kept_folder(after)
    files = [n.removeprefix(f"{inside}/") for n in names if n.startswith(f"{inside}/")]
    if not files:
        kept = sorted({int(n.split("/")[1]) for n in names if n not in of_last_model(names)})
        listed = ", ".join(map(str, kept))
        raise BadInput(
            f"no model was kept after {after} updates",
            where=uri,
            fix=f"There are those after {listed}."
            if kept
            else "Leave out --after, or train with kept_epochs.",
        )
    return files, inside


def _of_form(names: Sequence[str], adapter: bool, uri: str) -> dict[str, str]:
    """Return the exported name of each file in the store: the model's files or the adapter's.

    One folder never has both, because loading a merged model next to its adapter would apply the
    adapter twice.

    Raises:
        BadInput: the model has no adapter.
    """
    inside = f"{ADAPTER_FOLDER}/"
    alone = {name: name.removeprefix(inside) for name in names if name.startswith(inside)}
    if not adapter:
        return {name: name for name in names if name not in alone}
    if not alone:
        raise BadInput(
            "the model has no adapter",
            where=uri,
            fix="Leave out --adapter, or train with trained_parameters=lora.",
        )
    return alone | {name: name for name in names if name not in (CONFIG, WEIGHTS, *alone)}


def chosen_model(store: Store, uri: str, command: str) -> str:
    """Return the address that --uri names; without it, the DP model that the latest report names.

    Raises:
        BadInput: the URI is not an address of the store; the report names no model, or several.
    """
    if uri:
        return given(store, uri)
    models: dict[str, str] = latest(store)[1].facts.get("models", {})
    if _MODEL in models:
        return models[_MODEL]
    if not models:
        raise BadInput(
            "the latest report names no model that may leave the operator",
            where=command,
            fix="If its training with DP did not finish, run the job again (nothing is charged "
            "twice), or choose by --uri: store://pretrain/…",
        )
    raise BadInput(
        "the latest run is a sweep",
        where=command,
        fix=f"Choose by --uri: {', '.join(f'{name} {uri}' for name, uri in models.items())}",
    )


def _released_files(store: Store, uri: str, result: StepResult) -> list[str]:
    from tasks.evidence.audits import verdict_on

    verdict = verdict_on(store, uri, result)
    if verdict.word == "contradicted":
        raise Contradicted(verdict.sentence, where=uri, fix="Do not share the model.")
    return [name for name in store.digests(uri) if name not in result.operator_files]
