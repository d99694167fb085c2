"""`confide compare`: compares settings and results of runs, and tests differences in scores."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dp_core.errors import BadInput
from dp_core.labels import Label
from tasks.commands.output import as_json, write_json, write_table
from tasks.commands.report_command import given, reports
from tasks.runtime.deployment import Deployment
from tasks.storage import Store

if TYPE_CHECKING:
    from tasks.report.comparison import Compared, Run

_PERCENT = ("f1", "accuracy", "mlm_accuracy_public", "mlm_accuracy_private")
_HEADS = {
    "epsilon": "ε",
    "delta": "δ",
    "f1": "F1, %",
    "accuracy": "accuracy, %",
    "mlm_accuracy_public": "MLM, public, %",
    "mlm_accuracy_private": "MLM, private, %",
    "perplexity_public": "perplexity, public",
    "perplexity_private": "perplexity, private",
    "exposure": "exposure, mean",
    "exposure_largest": "largest",
}
_WHOLE_NAME = 20  # characters of a model's name that fit into a terminal's line with the figures
_PAIRED = (
    "Difference in F1 or accuracy, second minus first, in points, by a paired bootstrap over the "
    "documents that both were tested on and over several seeds. p tests the hypothesis of no "
    "difference and is not corrected for multiple comparisons."
)


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--operator", is_flag=True, help="Include figures that only the operator may see.")
@as_json
def command(runs: tuple[str, ...], operator: bool, as_json: bool) -> None:
    """Compare runs by the settings that differ, ε, δ, F1 (accuracy, perplexity) and exposure.

    RUN is a report step's output (shown by confide report --json), or a number: 0 is the latest
    report, 1 the previous one. With one RUN, its models are compared with its first model.
    """
    from tasks.report.comparison import differences, read_run, settings_that_differ

    deployment = Deployment.from_environment()
    store = deployment.open_store()
    edition = "operator_report" if operator else "report"
    found = [read_run(store, uri, edition) for uri in _uris(store, runs)]
    changed, compared = settings_that_differ(found), differences(store, found)
    if as_json:
        write_json(
            {
                "runs": [asdict(run) for run in found],
                "settings": changed,
                "f1_differences": [asdict(one) for one in compared],
            }
        )
        return
    _show(found, changed, compared)


def _uris(store: Store, runs: tuple[str, ...]) -> list[str]:
    uris: list[str] = []
    for run in runs:
        if not run.isdecimal():
            uris.append(given(store, run))
            continue
        latest_first = [uri for uri, _ in reversed(reports(store))]
        if int(run) >= len(latest_first):
            raise BadInput(
                f"there are {len(latest_first)} reports", where=f"RUN {run}", fix="0 is the latest."
            )
        uris.append(latest_first[int(run)])
    if len(set(uris)) < len(uris):
        raise BadInput("one run is named twice", where="compare")
    return uris


def _show(runs: list[Run], changed: dict[str, list[Any]], compared: list[Compared]) -> None:
    from tasks.report.tables import LEGEND

    names = [f"run {number}" for number in range(len(runs))]
    rows: list[list[object]] = [
        [name, run.created, run.uri] for name, run in zip(names, runs, strict=True)
    ]
    write_table("Runs", ["", "created", "report"], rows, prose=["report"])
    if changed:
        told = [[name, *("–" if v is None else v for v in own)] for name, own in changed.items()]
        write_table("Settings that differ", ["setting", *names], told, whole=["setting"])
    figures = dict.fromkeys(name for run in runs for model in run.models.values() for name in model)
    told = [
        [model, name, *(_figure(one, own.get(one)) for one in figures)]
        for name, run in zip(names, runs, strict=True)
        for model, own in run.models.items()
    ]
    told.sort(key=lambda row: str(row[0]))
    heads = ["model", "run", *(_HEADS.get(one, one) for one in figures)]
    short = len(figures) < 9 and all(len(str(row[0])) <= _WHOLE_NAME for row in told)
    write_table(f"Models ({LEGEND})", heads, told, whole=["model"] if short else [])
    if any(run.leakage for run in runs):
        _show_leakage(runs, names)
    if compared:
        columns = ["first", "second", "score", "95% interval", "p"]
        write_table(
            "Differences in F1 or accuracy", columns, [_difference(one, names) for one in compared]
        )
        click.echo(_PAIRED)


def _show_leakage(runs: list[Run], names: list[str]) -> None:
    """Show what membership attacks find: model, attack and level by run and epoch."""
    from tasks.report.tables import LEGEND, MARKS

    found: dict[tuple[str, str, str], dict[str, str]] = {}
    heads: dict[str, None] = {}
    for name, run in zip(names, runs, strict=True):
        for one in run.leakage:
            epoch = "last epoch" if one["epoch"] is None else f"epoch {one['epoch']:g}"
            head = f"{name}, {run.settings.get('model_kind', '')}, {epoch}"
            heads[head] = None
            told = f"{100 * one['value']:.1f}{MARKS[Label(one['label'])]}"
            found.setdefault((one["model"], one["attack"], one["level"]), {})[head] = told
    rows: list[list[object]] = [
        [*key, *(own.get(head, "–") for head in heads)] for key, own in found.items()
    ]
    columns = ["model", "attack", "level", *heads]
    write_table(
        f"Membership: leakage, TPR − FPR, % ({LEGEND})", columns, rows, prose=["attack", "level"]
    )


def _figure(name: str, figure: dict[str, Any] | None) -> str:
    from tasks.report.tables import MARKS

    if figure is None:
        return "–"
    if figure.get("withheld"):
        return "▒▒"
    try:
        value = float(figure["value"])
    except ValueError:
        return str(figure["value"])  # no total
    mark = MARKS[Label(figure["label"])]
    if math.isinf(value):
        return f"∞{mark}"
    return (f"{100 * value:.1f}" if name in _PERCENT else f"{value:.3g}") + mark


def _difference(one: Compared, names: list[str]) -> list[object]:
    models = [f"{model}, {names[number]}" for number, model in (one.first, one.second)]
    found = one.difference
    if found is None:
        return [*models, "–", one.why_not, "–"]
    low, high = found.interval
    interval = f"{100 * low:+.1f} … {100 * high:+.1f}"
    return [*models, f"{100 * found.value:+.1f}", interval, f"{found.p_value:.3g}"]
