"""`confide report`: shows the latest report's closing table and the path of its page."""

from __future__ import annotations

from typing import Any

import click

from dp_core.errors import BadInput
from tasks.commands.output import as_json, write_answer
from tasks.protocol.messages import StepResult
from tasks.results import read_result
from tasks.runtime.deployment import Deployment
from tasks.storage.store import Store


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
