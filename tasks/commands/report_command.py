"""`confide report`, `compare` and `errors`: tables of runs and their models, from their reports."""

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.training.bootstrap import Difference, Replicate, f1_difference
from tasks.commands.command_options import options_of
from tasks.commands.output import as_json, write_answer, write_prose, write_table
from tasks.protocol.messages import StepResult
from tasks.protocol.points import DP_MODEL
from tasks.protocol.specs import FinetuneSpec
from tasks.report import tables
from tasks.report.model import ACCURACY, F1, shown_day
from tasks.results import FIGURES_FILE, FINETUNED, Input, read_result
from tasks.runtime.deployment import Deployment
from tasks.storage.store import Store

_COLUMNS = ("document", "error", "expected", "predicted", "context")


@click.command("report")
@options_of("report")
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

    content = _content(Deployment.from_environment().open_store(), uri)
    console = Console()
    console.print(tables.rich_table(tables.TABLE.validate_python(content["table"])))
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


# --- a comparison of runs

_PAIRED = (
    "Difference in F1 or accuracy, second minus first, in points, by a paired bootstrap over the "
    "documents that both were tested on and over several seeds. p tests the hypothesis of no "
    "difference and is not corrected for multiple comparisons."
)
_NO_COUNTS = "no counts by document: labels or model are private, or the version is too old"
_OTHER_DOCUMENTS = "documents, seeds or folds of the tests differ, or there are too few"
_OTHER_HEADS = "fine-tuned for different tasks"
_COLOURS = ("blue", "orange", "green", "pink", "sky", "black")  # of the runs in figures
_COSTS = ("ε_V", "ε_T", "ε, in total")  # titles of columns: costs of a training


@dataclass(frozen=True)
class Run:
    """A run, read from its report.

    Attributes:
        uri: address of the report step's output.
        created: the date; the operator's edition also has the time.
        settings: all settings of the run.
        models: cells of the table of results, by model and column.
        finetuned: by model, the fine-tunings of its score.
        leakage: membership leakage by model, epoch, level and attack, for the operator only.
    """

    uri: str
    created: str
    settings: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Mapping[str, Any]]]
    finetuned: Mapping[str, Sequence[Mapping[str, Any]]]
    leakage: Sequence[Mapping[str, Any]] = ()


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


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@options_of("compare")
@as_json
def compare(runs: tuple[str, ...], operator: bool, page: Path | None) -> None:
    """Compare runs by the settings that differ, ε, δ, F1 (accuracy, perplexity) and exposure.

    RUN is a report step's output (shown by confide report --json), or a number: 0 is the latest
    report, 1 the previous one. With one RUN, its models are compared with its first model.

    Example:
      confide compare 1 0
    """
    store = Deployment.from_environment().open_store()
    edition = "operator_report" if operator else "report"
    read = [_read_run(store, uri, edition) for uri in _uris(store, runs)]
    names = dict.fromkeys(name for run in read for name in run.settings)
    settings = {name: [run.settings.get(name) for run in read] for name in names}
    changed = {
        name: values for name, values in settings.items() if any(v != values[0] for v in values)
    }
    compared = _differences(store, read)
    answer = {
        "runs": [asdict(run) for run in read],
        "settings": changed,
        "f1_differences": [asdict(pair) for pair in compared],
    }
    if page is not None:
        if operator:
            os.umask(0o077)
        _write_page(page, read, edition)
    write_answer(answer, lambda: _show_comparison(read, changed, compared))


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


def _read_run(store: Store, uri: str, edition: str) -> Run:
    """Return a run from one edition of its report, `report` or `operator_report`.

    Raises:
        BadInput: there is no report at this address, or an earlier version wrote it.
    """
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
    figures = json.loads(file.read_text())
    created = result.facts["created"]
    if edition == "report":
        created = shown_day(created, figures["settings"])
    return Run(uri, created, finetuned=result.facts.get(FINETUNED, {}), **figures)


def _differences(store: Store, runs: Sequence[Run]) -> list[Compared]:
    """Return the differences in F1 or accuracy, paired by test document.

    Models of equal name are compared across runs, each with the first run that has the model. In
    a single run, all models are compared with its first model. Counts by document are kept for
    public labels only, so only publishable values are read. Models that are not fine-tuned have no
    score.
    """
    models = [
        (number, name)
        for number, run in enumerate(runs)
        for name in run.models
        if name in run.finetuned
    ]
    references = {name: (number, name) for number, name in reversed(models)}
    return [
        _compared(store, runs, first, second)
        for first, second in itertools.combinations(models, 2)
        if (
            first == models[0]
            if len(runs) == 1
            else first[1] == second[1] and first == references[first[1]]
        )
    ]


def _compared(
    store: Store, runs: Sequence[Run], first: tuple[int, str], second: tuple[int, str]
) -> Compared:
    reference, other = (_replicates(store, runs[number], name) for number, name in (first, second))
    if reference is None or other is None:
        return Compared(first, second, None, _NO_COUNTS)
    if len({runs[number].settings.get("head", "entities") for number, _ in (first, second)}) > 1:
        return Compared(first, second, None, _OTHER_HEADS)
    difference = f1_difference(reference, other)
    return Compared(first, second, difference, "" if difference else _OTHER_DOCUMENTS)


def _replicates(store: Store, run: Run, model: str) -> list[Replicate] | None:
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


def _show_comparison(
    runs: list[Run], changed: dict[str, list[Any]], compared: list[Compared]
) -> None:
    names = [f"run {number}" for number in range(len(runs))]
    addresses = [[name, run.created, run.uri] for name, run in zip(names, runs, strict=True)]
    write_table("Runs", ["", "created", "report"], addresses)
    if changed:
        settings = [[setting, *values] for setting, values in changed.items()]
        write_table("Settings that differ", ["setting", *names], settings)
    models = [
        (model, name, cells)
        for name, run in zip(names, runs, strict=True)
        for model, cells in run.models.items()
    ]
    titles = dict.fromkeys(title for _, _, cells in models for title in cells)
    shown = [title for title in titles if not title.startswith("ε_")]  # not the parts of a total
    rows = [
        [model, name, *(_text(cells.get(title)) for title in shown)]
        for model, name, cells in sorted(models, key=lambda row: row[0])
    ]
    heads = ["model", "run", *(title.replace(", ", " ", 1) for title in shown)]  # breaks better
    write_table(f"Models ({tables.LEGEND})", heads, rows)
    if any(run.leakage for run in runs):
        _show_leakage(runs, names)
    if compared:
        columns = ["first", "second", "score", "95% interval", "p"]
        differences = [_difference(pair, names) for pair in compared]
        write_table("Differences in F1 or accuracy", columns, differences)
        write_prose(_PAIRED)


def _show_leakage(runs: list[Run], names: list[str]) -> None:
    """Show the results of membership attacks: model, attack and level by run and epoch."""
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    heads: dict[str, None] = {}
    for name, run in zip(names, runs, strict=True):
        for leakage in run.leakage:
            epoch = leakage["epoch"]
            when = "last epoch" if epoch is None else f"epoch {epoch:g}"
            head = f"{name}, {run.settings.get('model_kind', '')}, {when}"
            heads[head] = None
            row = cells.setdefault((leakage["model"], leakage["attack"], leakage["level"]), {})
            row[head] = f"{100 * leakage['value']:.1f}{tables.MARKS[Label(leakage['label'])]}"
    write_table(
        f"Membership: leakage, TPR − FPR, % ({tables.LEGEND})",
        ["model", "attack", "level", *heads],
        [[*key, *(row.get(head) for head in heads)] for key, row in cells.items()],
    )


def _write_page(folder: Path, runs: Sequence[Run], edition: str) -> None:
    """Write a page of all runs: scores by labelled text, and leakage by epoch.

    Raises:
        BadInput: the folder exists.
    """
    # Matplotlib is slow to import.
    from tasks.report.figures import COLOURS, STYLES, leakage_figure
    from tasks.report.job_results import ARCHITECTURES
    from tasks.report.page import comparison_page

    if folder.exists():
        raise BadInput("the folder exists", where=f"--page {folder}", fix="Name a new folder.")
    families = [ARCHITECTURES.get(run.settings.get("model_kind", ""), "Model") for run in runs]
    leakages, styles = [], {}
    for number, (run, family) in enumerate(zip(runs, families, strict=True)):
        repeated = f" (run {number})" if families.count(family) > 1 else ""
        for leakage in run.leakage:
            line = f"{family}{repeated}, {leakage['model']}"
            leakages.append({**leakage, "model": line})
            stroke = "-" if leakage["kind"] == "nonprivate" else "--"
            colour = COLOURS[_COLOURS[number % len(_COLOURS)]]
            styles[line] = colour, STYLES[leakage["kind"]][1], stroke
    comparison_page(scores_by_labels(runs), leakage_figure(leakages, styles), edition).write(folder)


def scores_by_labels(runs: Sequence[Run]) -> tables.Table:
    """Return the score of each model on the labelled text of each run, by the cost of its training.

    The form is that of Hoory et al. 2021, Table 2. A model has one row if its cost is the same in
    all runs, as in runs that differ in the labelled text alone.
    """
    every_cell = [cells for run in runs for cells in run.models.values()]
    costs = dict.fromkeys(t for cells in every_cell for t in cells if t.startswith(_COSTS))
    rows: dict[tuple[tables.Cell, ...], list[tables.Cell]] = {}
    for number, run in enumerate(runs):
        for model, cells in run.models.items():
            key = tables.Cell(model, value=model), *(_cell(cells, cost) for cost in costs)
            scores = rows.setdefault(key, [tables.Cell(tables.NOT_MEASURED)] * len(runs))
            scores[number] = _cell(cells, ACCURACY.title, F1.title)
    names = [run.settings.get("entities_train") or "made-up labels" for run in runs]
    return tables.Table(
        key="labels",
        caption="Scores by labelled text",
        headers=(
            tables.Header("Model", numeric=False),
            *(
                tables.Header(title, unit)
                for title, _, unit in (cost.partition(", ") for cost in costs)
            ),
            *(tables.Header(text, f"run {n}, F1 or accuracy, %") for n, text in enumerate(names)),
        ),
        rows=tuple((*key, *scores) for key, scores in rows.items()),
        notes=("The reports of the runs have the cost of private labels.",),
    )


def _cell(cells: Mapping[str, Mapping[str, Any]], *titles: str) -> tables.Cell:
    """Return the first of the cells that a run has."""
    known = (cells[title] for title in titles if title in cells)
    return next(map(tables.CELL.validate_python, known), tables.Cell(tables.NOT_MEASURED))


def _text(cell: Mapping[str, Any] | None) -> str:
    """Return a cell's text with the mark of its label."""
    if cell is None:
        return tables.NOT_MEASURED
    mark = tables.MARKS[Label(cell["label"])] if cell["label"] and not cell["withheld"] else ""
    return f"{cell['text']}{mark}"


def _difference(pair: Compared, names: list[str]) -> list[object]:
    models = [f"{model}, {names[number]}" for number, model in (pair.first, pair.second)]
    difference = pair.difference
    if difference is None:
        return [*models, None, pair.why_not, None]
    low, high = difference.interval
    interval = f"{100 * low:+.1f} … {100 * high:+.1f}"
    return [*models, f"{100 * difference.value:+.1f}", interval, f"{difference.p_value:.3g}"]


# --- errors of a fine-tuned model


@click.command("errors")
@options_of("errors")
@as_json
def errors(uri: str) -> None:
    """List a fine-tuned model's errors on its test part, with the surrounding words.

    The step's own list holds places and labels alone; the words are looked up in the labelled text,
    which the operator may read anyway. Nothing here is for publication.

    Example:
      confide errors
    """
    store = Deployment.from_environment().open_store()
    uri = given(store, uri) if uri else _latest_finetuning(store)
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


def _latest_finetuning(store: Store) -> str:
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
