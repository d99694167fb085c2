"""`confide report` and `errors`: the latest report, and the errors of its fine-tuned model."""

from __future__ import annotations

import json
from typing import Any

import click

from dp_core.errors import BadInput
from tasks.commands.output import as_json, write_answer, write_table
from tasks.protocol.messages import StepResult
from tasks.protocol.points import DP_MODEL
from tasks.protocol.specs import FinetuneSpec
from tasks.results import FINETUNED, Input, read_result
from tasks.runtime.deployment import Deployment
from tasks.storage.store import Store

_COLUMNS = ("document", "error", "expected", "predicted", "context")


@click.command("report")
@click.option("--uri", default="", help="A report step's output; the latest one by default.")
@as_json
def command(uri: str) -> None:
    """Show the closing table of the latest report (or another) and the path of its page.

    Example:
      confide report
    """
    store = Deployment.from_environment().open_store()
    uri = given(store, uri) if uri else latest(store)[0]
    write_answer(_content(store, uri), lambda: show(uri))


def show(uri: str) -> None:
    """Print the closing table of a report step's output and the paths of its pages."""
    from rich.console import Console

    from tasks.report.tables import TABLE, rich_table

    content = _content(Deployment.from_environment().open_store(), uri)
    console = Console()
    console.print(rich_table(TABLE.validate_python(content["table"])))
    for name, page in content["pages"].items():
        console.print(f"{name}: {page}", highlight=False, soft_wrap=True)


def given(store: Store, uri: str) -> str:
    """Return the store's address of an output that --uri names.

    Raises:
        BadInput: the URI is not an address of the store.
    """
    try:
        return store.address(uri)
    except BadInput as error:
        raise BadInput(error.what, where=f"--uri {uri}", fix=error.fix) from None


def latest(store: Store) -> tuple[str, StepResult]:
    """Return the output and the result of the latest report step.

    Raises:
        BadInput: there is no report.
    """
    if not (known := reports(store)):
        raise BadInput("there is no report yet", where="report", fix="Run: confide run")
    return known[-1]


def reports(store: Store) -> list[tuple[str, StepResult]]:
    """Return output and result of every report step, the latest last."""
    results = [
        (uri, result)
        for uri in store.outputs("report")
        if (result := read_result(store, uri)) is not None
    ]
    return sorted(results, key=lambda report: (report[1].facts["created"], report[0]))


def _content(store: Store, uri: str) -> dict[str, Any]:
    result = read_result(store, uri)
    if result is None:
        raise BadInput("no report there", where=uri, fix="Run: confide run")
    folder = store.local_copy(uri)
    pages = {name: str(folder / name / "report.html") for name in result.outputs}
    return {"uri": uri, "pages": pages, "table": result.facts["table"], "facts": result.facts}


# --- errors of a fine-tuned model


@click.command("errors")
@click.option("--uri", default="", help="A fine-tuning's output; of the DP model otherwise.")
@as_json
def errors(uri: str) -> None:
    """List a fine-tuned model's errors on its test part, with the surrounding words.

    The step's own list holds places and labels alone; the words are looked up in the labelled text,
    which the operator may read anyway. Nothing here is for publication.

    Example:
      confide errors
    """
    store = Deployment.from_environment().open_store()
    uri = given(store, uri) if uri else _latest_fine_tuning(store)
    counts, rows = _errors(store, uri)
    write_answer(
        {"uri": uri, "counts": counts, "errors": rows}, lambda: _show_errors(uri, counts, rows)
    )


def _show_errors(uri: str, counts: dict[str, dict[str, int]], rows: list[dict[str, str]]) -> None:
    kinds = sorted({kind for by_kind in counts.values() for kind in by_kind})
    table = [
        [label, *(by_kind.get(kind, 0) for kind in kinds)] for label, by_kind in counts.items()
    ]
    write_table(f"Errors of {uri}, for the operator alone", ["label", *kinds], table)
    write_table("One by one", _COLUMNS, [[row[c] for c in _COLUMNS] for row in rows])


def _latest_fine_tuning(store: Store) -> str:
    tuned = latest(store)[1].facts.get(FINETUNED, {}).get(DP_MODEL.name)
    if not tuned:
        raise BadInput(
            "the latest report has no fine-tuned DP model",
            where="errors",
            fix="Choose by --uri: store://finetune/…",
        )
    return str(tuned[0]["uri"])


def _errors(store: Store, uri: str) -> tuple[dict[str, dict[str, int]], list[dict[str, str]]]:
    """Return the numbers of errors by label and kind, and each error with its words."""
    from tasks.steps.finetune_step import ERRORS, items_of, task_of

    result = read_result(store, uri)
    if result is None or ERRORS not in result.operator_files:
        raise BadInput("no list of errors there", where=uri, fix="Give a fine-tuning's output.")
    content = json.loads((store.local_copy(uri) / ERRORS).read_text())
    spec = FinetuneSpec.model_validate(content["spec"])
    labelled = read_result(store, spec.entities_uri)
    if labelled is None:
        raise BadInput("the labelled text is no longer there", where=spec.entities_uri)
    task = task_of(spec)
    entities = Input(labelled, store.local_copy(spec.entities_uri))
    items = task.learned(items_of(spec, entities, "test"))
    return content["counts"], [task.in_words(items, error) for error in content["errors"]]
