"""`confide errors`: lists a fine-tuned model's errors with their words, for the operator only."""

from __future__ import annotations

import json
from typing import Any

import click

from dp_core.errors import BadInput
from tasks.commands.output import as_json, write_json, write_table
from tasks.commands.report_command import given, latest
from tasks.protocol import MODEL_NAMES, FinetuneSpec
from tasks.results import FINETUNED, Input, read_result
from tasks.runtime.deployment import Deployment
from tasks.storage.store import Store

_COLUMNS = ("document", "error", "expected", "predicted", "context")


@click.command("errors")
@click.option("--uri", default="", help="A fine-tuning's output; of the DP model otherwise.")
@as_json
def command(uri: str, as_json: bool) -> None:
    """List a fine-tuned model's errors on its test part, with the surrounding words.

    The step's own list holds places and labels alone; the words are looked up in the labelled text,
    which the operator may read anyway. Nothing here is for publication.
    """
    deployment = Deployment.from_environment()
    store = Store(deployment.store, deployment.cache)
    uri = given(store, uri) if uri else _latest(store)
    told, rows = _errors(store, uri)
    if as_json:
        write_json({"uri": uri, "counts": told["counts"], "errors": rows})
        return
    kinds = sorted({kind for own in told["counts"].values() for kind in own})
    counts = [[label, *(own.get(k, 0) for k in kinds)] for label, own in told["counts"].items()]
    write_table(f"Errors of {uri}, for the operator alone", ["label", *kinds], counts)
    write_table("One by one", list(_COLUMNS), [[row[c] for c in _COLUMNS] for row in rows])


def _latest(store: Store) -> str:
    tuned = latest(store)[1].facts.get(FINETUNED, {}).get(MODEL_NAMES["dp"])
    if not tuned:
        raise BadInput(
            "the latest report has no fine-tuned DP model",
            where="errors",
            fix="Choose by --uri: store://finetune/…",
        )
    return str(tuned[0]["uri"])


def _errors(store: Store, uri: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    from tasks.steps.finetune_step import ERRORS, items_of, task_of

    result = read_result(store, uri)
    if result is None or ERRORS not in result.operator_files:
        raise BadInput("no list of errors there", where=uri, fix="Give a fine-tuning's output.")
    told: dict[str, Any] = json.loads((store.local_copy(uri) / ERRORS).read_text())
    spec = FinetuneSpec.model_validate(told["spec"])
    labelled = read_result(store, spec.entities_uri)
    if labelled is None:
        raise BadInput("the labelled text is no longer there", where=spec.entities_uri)
    task = task_of(spec)
    entities = Input(labelled, store.local_copy(spec.entities_uri))
    items = task.learned(items_of(spec, entities, "test"))
    return told, [task.in_words(items, error) for error in told["errors"]]
