"""`confide errors`: lists a fine-tuned model's errors with their words, for the operator only."""

from __future__ import annotations

import json

import click

from dp_core.errors import BadInput
from tasks.commands.output import as_json, write_answer, write_table
from tasks.commands.report_command import given, latest
from tasks.protocol.points import DP_MODEL
from tasks.protocol.specs import FinetuneSpec
from tasks.results import FINETUNED, Input, read_result
from tasks.runtime.deployment import Deployment
from tasks.storage.store import Store

_COLUMNS = ("document", "error", "expected", "predicted", "context")


@click.command("errors")
@click.option("--uri", default="", help="A fine-tuning's output; of the DP model otherwise.")
@as_json
def command(uri: str) -> None:
    """List a fine-tuned model's errors on its test part, with the surrounding words.

    The step's own list holds places and labels alone; the words are looked up in the labelled text,
    which the operator may read anyway. Nothing here is for publication.

    Example:
      confide errors
    """
    store = Deployment.from_environment().open_store()
    uri = given(store, uri) if uri else _latest(store)
    counts, rows = _errors(store, uri)
    write_answer({"uri": uri, "counts": counts, "errors": rows}, lambda: _show(uri, counts, rows))


def _show(uri: str, counts: dict[str, dict[str, int]], rows: list[dict[str, str]]) -> None:
    kinds = sorted({kind for by_kind in counts.values() for kind in by_kind})
    table = [
        [label, *(by_kind.get(kind, 0) for kind in kinds)] for label, by_kind in counts.items()
    ]
    write_table(f"Errors of {uri}, for the operator alone", ["label", *kinds], table)
    write_table("One by one", _COLUMNS, [[row[c] for c in _COLUMNS] for row in rows])


def _latest(store: Store) -> str:
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
