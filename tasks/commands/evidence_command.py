"""`confide evidence`: writes the evidence pack with which others can check a model's claim."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from dp_core.errors import BadInput
from tasks.commands.export_command import latest_model
from tasks.commands.output import as_json, new_folder, write_json
from tasks.commands.report_command import given
from tasks.runtime.deployment import Deployment
from tasks.storage import sha256_of

if TYPE_CHECKING:
    from tasks.evidence.pack_contents import OperatorWords


@click.command("evidence")
@click.argument("model", required=False, type=click.Path(path_type=Path))
@click.option("--uri", default="", help="A training step's output, in place of MODEL.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("evidence"),
    show_default=True,
    help="A new folder for the pack.",
)
@click.option(
    "--operator", is_flag=True, help="Include figures without noise; keep such a pack private."
)
@click.option(
    "--words",
    type=click.Path(path_type=Path),
    help="JSON with what you state yourself: license, language, intended_use, data_collection …",
)
@click.option(
    "--check",
    type=click.Path(path_type=Path),
    help="Check an existing pack, and MODEL's files if given, instead of writing one.",
)
@as_json
def command(
    model: Path | None,
    uri: str,
    out: Path,
    operator: bool,
    words: Path | None,
    check: Path | None,
    as_json: bool,
) -> int:
    """Write the evidence pack of a model: claim, ledger, audits, and a script that checks them.

    MODEL is a folder written by `confide export`. Without MODEL and --uri, the model of the latest
    report is used. The pack is for a data-protection officer, an ethics board or an auditor:
    evidence.html is for people; evidence.json and check_evidence.py check it without Confide.
    """
    if check is not None:
        return _check(check, model, as_json)
    from tasks.evidence.find_model import origin_of_export
    from tasks.evidence.gather import gather
    from tasks.evidence.pack import write_pack

    if model is not None and uri:
        raise BadInput("two models are named", where="evidence", fix="Give MODEL or --uri.")
    said = _operator_words(words)
    deployment = Deployment.from_environment()
    store = deployment.open_store()
    if model is not None:
        uri = origin_of_export(store, model)
    else:
        uri = given(store, uri) if uri else latest_model(store, "evidence")
    with new_folder(out) as partial:
        write_pack(gather(deployment, store, uri, operator=operator, words=said), partial)
    digest = sha256_of(out / "evidence.json")
    if as_json:
        write_json({"folder": str(out), "uri": uri, "sha256": digest})
    else:
        click.echo(f"{out / 'evidence.html'}: the page. Anyone checks it: {out}/check_evidence.py")
        click.echo(f"SHA-256 of evidence.json, to be sent by another channel: {digest}")
        if operator:
            click.echo("Operator edition: do not hand it on.")
    return 0


def _check(folder: Path, model: Path | None, as_json: bool) -> int:
    """Check a pack by the installed copy of its script; the pack's copy may have been changed."""
    from tasks.evidence import check_evidence

    try:
        found = check_evidence.check(folder, model)
    except check_evidence.NotAPackError as error:
        raise BadInput("no evidence pack", where=str(folder), fix=f"{error}.") from None
    if not found.faults:
        found.faults += _refused_by_the_models(folder)
    click.echo(
        check_evidence.as_json(found) if as_json else check_evidence.as_text(found), nl=False
    )
    return found.code


def _refused_by_the_models(folder: Path) -> list[str]:
    """Return errors that the models of evidence and ledger find in addition to the schema."""
    from pydantic import ValidationError

    from dp_core.config.fields import one_line
    from tasks.evidence.pack import read_pack

    try:
        read_pack(folder)
    except ValidationError as error:
        return [one_line(error)]
    return []


def _operator_words(file: Path | None) -> OperatorWords:
    from pydantic import ValidationError

    from dp_core.config.fields import one_line
    from tasks.evidence.pack_contents import OperatorWords

    if file is None:
        return OperatorWords()
    try:
        return OperatorWords.model_validate_json(file.read_text())
    except OSError:
        raise BadInput("cannot be read", where=f"--words {file}") from None
    except ValidationError as error:
        fields = ", ".join(OperatorWords.model_fields)
        raise BadInput(
            one_line(error), where=f"--words {file}", fix=f"Give JSON with some of: {fields}."
        ) from None
