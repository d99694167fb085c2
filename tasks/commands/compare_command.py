"""`confide compare`: compares settings and results of runs, and tests differences in scores."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from dp_core.config.training import is_causal
from dp_core.errors import BadInput
from dp_core.labels import Label
from tasks.commands.output import as_json, write_json, write_table
from tasks.commands.report_command import given, reports
from tasks.results import FIGURES_FILE, FINETUNED, read_result
from tasks.runtime.deployment import Deployment
from tasks.storage import Store

if TYPE_CHECKING:
    from dp_core.training.bootstrap import Difference, Replicate

_NO_COUNTS = "no counts by document: labels or model are private, or the version is too old"
_OTHER_DOCUMENTS = "documents, seeds or folds of the tests differ, or there are too few"
_OTHER_HEADS = "fine-tuned for different tasks"

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


def _figure(name: str, figure: Mapping[str, Any] | None) -> str:
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


@dataclass(frozen=True)
class Run:
    """A run, read from its report.

    Attributes:
        uri: address of the report step's output.
        created: the date; the operator's edition also has the time.
        settings: all settings of the run.
        models: figures by model and name.
        finetuned: by model, the fine-tunings of its score.
        leakage: membership leakage by model, epoch, level and attack, for the operator only.
    """

    uri: str
    created: str
    settings: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Mapping[str, Any]]]
    finetuned: Mapping[str, Sequence[Mapping[str, Any]]]
    leakage: Sequence[Mapping[str, Any]] = ()


def read_run(store: Store, uri: str, edition: str) -> Run:
    """Return a run from its report.

    Args:
        store: the store that contains the report.
        uri: address of the report step's output.
        edition: the edition whose figures are read, `report` or `operator_report`.

    Raises:
        BadInput: there is no report, or an earlier version wrote it.
    """
    from tasks.report.model import shown_day

    result = read_result(store, uri)
    if result is None or edition not in result.outputs:
        raise BadInput(
            "no report there", where=uri, fix="Give the address that confide report --json names."
        )
    file = store.local_copy(uri) / edition / FIGURES_FILE
    if not file.exists():
        raise BadInput(
            "the report is of an earlier version, and cannot be compared",
            where=uri,
            fix="Run the job again; existing releases are not charged again.",
        )
    written = json.loads(file.read_text())
    created = result.facts["created"]
    return Run(
        uri,
        created if edition != "report" else shown_day(created, written["settings"]),
        written["settings"],
        written["models"],
        result.facts.get(FINETUNED, {}),
        written.get("leakage", ()),
    )


def settings_that_differ(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the settings that differ between runs, with their value in each run."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [run.settings.get(name) for run in runs] for name in names}
    return {
        name: in_runs for name, in_runs in values.items() if any(v != in_runs[0] for v in in_runs)
    }


@dataclass(frozen=True)
class Compared:
    """The difference between two models in F1 or accuracy, or the reason why there is none.

    Attributes:
        first: number of the run and name of the reference model.
        second: number of the run and name of the other model.
        difference: score of the second model minus score of the first; None if not available.
        why_not: why there is no difference; empty if there is one.
    """

    first: tuple[int, str]
    second: tuple[int, str]
    difference: Difference | None
    why_not: str = ""


def differences(store: Store, runs: Sequence[Run]) -> list[Compared]:
    """Return the differences in F1 or accuracy, paired by test document.

    Models of equal name are compared across runs, each with the first run that has the model. In
    a single run, all models are compared with its first model. Counts by document are kept for
    public labels only, so only publishable values are read. Causal models have no such score.
    """
    models = [
        (number, name)
        for number, run in enumerate(runs)
        for name in run.models
        if not is_causal(run.settings.get("model_kind", "bert"))
    ]
    pairs = [
        (first, second)
        for first, second in itertools.combinations(models, 2)
        if (first == models[0] if len(runs) == 1 else first[1] == second[1])
    ]
    if len(runs) > 1:
        references = {name: (number, name) for number, name in reversed(models)}
        pairs = [(first, second) for first, second in pairs if first == references[first[1]]]
    return [_compared(store, runs, first, second) for first, second in pairs]


def _compared(
    store: Store, runs: Sequence[Run], first: tuple[int, str], second: tuple[int, str]
) -> Compared:
    from dp_core.training.bootstrap import f1_difference

    reference, other = (_replicates(store, runs[number], name) for number, name in (first, second))
    if reference is None or other is None:
        return Compared(first, second, None, _NO_COUNTS)
    if len({runs[number].settings.get("head", "entities") for number, _ in (first, second)}) > 1:
        return Compared(first, second, None, _OTHER_HEADS)
    difference = f1_difference(reference, other)
    return Compared(first, second, difference, "" if difference else _OTHER_DOCUMENTS)


def _replicates(store: Store, run: Run, model: str) -> list[Replicate] | None:
    from dp_core.training.bootstrap import Replicate

    replicates = []
    for finetuning in run.finetuned.get(model, ()):
        result = read_result(store, finetuning["uri"])
        if result is None or not result.facts.get("documents"):
            return None
        counts = result.facts["documents"]
        replicates.append(
            Replicate(finetuning["seed"], finetuning["fold"], counts, finetuning["start"])
        )
    return replicates or None
