"""`confide evidence`: writes the evidence pack with which others can check a model's claim."""

from __future__ import annotations

from pathlib import Path

import click

from dp_core.errors import BadInput
from tasks.commands.export_command import latest_model
from tasks.commands.output import as_json, new_folder, write_json
from tasks.commands.report_command import given
from tasks.runtime.deployment import Deployment
from tasks.storage import sha256_of


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
    from tasks.evidence.pack import write_pack
    from tasks.releases.provenance import origin_of_export

    if model is not None and uri:
        raise BadInput("two models are named", where="evidence", fix="Give MODEL or --uri.")
    statements = _operator_words(words)
    deployment = Deployment.from_environment()
    store = deployment.open_store()
    if model is not None:
        uri = origin_of_export(store, model)
    else:
        uri = given(store, uri) if uri else latest_model(store, "evidence")
    with new_folder(out) as partial:
        write_pack(deployment, store, uri, partial, operator=operator, words=statements)
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
    from dp_core.privacy import check_evidence

    try:
        findings = check_evidence.check(folder, model)
    except check_evidence.NotAPackError as error:
        raise BadInput("no evidence pack", where=str(folder), fix=f"{error}.") from None
    shown = check_evidence.as_json if as_json else check_evidence.as_text
    click.echo(shown(findings), nl=False)
    return findings.code


def _operator_words(file: Path | None) -> dict[str, str]:
    """Return the operator's statements in a JSON file.

    Raises:
        BadInput: it cannot be read, or contains anything else.
    """
    from dp_core.privacy.check_evidence import OPERATOR_WORDS, read_json

    if file is None:
        return {}
    where, fix = f"--words {file}", f"Give JSON with some of: {', '.join(OPERATOR_WORDS)}."
    try:
        statements = read_json(file.read_bytes())
    except OSError:
        raise BadInput("cannot be read", where=where) from None
    except ValueError as error:
        raise BadInput(f"not JSON: {error}", where=where, fix=fix) from None
    if not isinstance(statements, dict):
        raise BadInput("not a JSON object", where=where, fix=fix)
    for name, words in statements.items():
        if name not in OPERATOR_WORDS or not isinstance(words, str):
            raise BadInput(f"{name!r} is not a statement in words", where=where, fix=fix)
    return statements
