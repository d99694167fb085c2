"""Differences between runs: settings, and the ε, scores and exposures of their models."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dp_core.audit.exposure import summarise
from dp_core.config.training import is_causal
from dp_core.errors import BadInput
from dp_core.labels import Label
from dp_core.training.bootstrap import Difference, Replicate, f1_difference
from tasks.report.model import (
    Membership,
    MembershipAt,
    ModelRow,
    Report,
    Value,
    Withheld,
    number_of,
    shown_day,
)
from tasks.results import read_result
from tasks.storage import Store

FIGURES_FILE = "figures.json"  # in the folder of each edition, with the figures of that edition
FINETUNED = "finetuned"  # fact of a report: the fine-tunings of each model's score
_NO_COUNTS = "no counts by document: labels or model are private, or the version is too old"
_OTHER_DOCUMENTS = "documents, seeds or folds of the tests differ, or there are too few"
_OTHER_HEADS = "fine-tuned for different tasks"
Figure = dict[str, Any]  # value and label, or `withheld`


def figures_of(shown: Report) -> dict[str, Any]:
    """Return the settings of a run and the figures of its models, for one edition of its report.

    Args:
        shown: the report of that edition, without the values that it withholds.
    """
    return {
        "settings": dict(shown.settings),
        "models": {row.name: dict(_figures(row)) for row in shown.models},
        "leakage": [leakage for row in shown.models for leakage in _leakage(row)],
    }


def _leakage(row: ModelRow) -> Iterator[Figure]:
    """Yield the leakage by each membership attack, after each epoch whose model was kept."""
    if not isinstance(row.membership, Membership):
        return
    last = MembershipAt(math.inf, row.membership.losses, row.membership.rows)
    for epoch in row.membership.by_epoch or (last,):
        # None if only the last model was saved.
        epochs = None if math.isinf(epoch.epochs) else epoch.epochs
        for attack in epoch.rows:
            yield {
                "model": row.name,
                "epoch": epochs,
                "level": attack.level,
                "attack": attack.attack,
                "value": attack.leakage.value,
                "interval": [attack.leakage.low, attack.leakage.high],
                "label": row.membership.label,
            }


def _figures(row: ModelRow) -> Iterator[tuple[str, Figure]]:
    for total in (row.cost.corpus, *row.cost.others):
        name = f"/{total.dataset}" if total in row.cost.others else ""
        epsilon = "no total" if total.epsilon is None else str(total.epsilon)
        yield f"epsilon{name}", {"value": epsilon, "label": Label.PUBLIC}
        if total.epsilon is not None and math.isfinite(total.epsilon):  # δ has no meaning otherwise
            yield f"delta{name}", {"value": str(total.delta), "label": Label.PUBLIC}
    measured: list[tuple[str, Value]] = [("f1", row.f1), ("accuracy", row.accuracy)]
    if row.perplexity_public is None:
        measured.append(("mlm_accuracy_public", row.mlm_public))
        measured.append(("mlm_accuracy_private", row.mlm_private))
    else:
        measured.append(("perplexity_public", row.perplexity_public))
        measured.append(("perplexity_private", row.perplexity_private))
    for name, value in measured:
        if isinstance(value, Withheld):
            yield name, {"withheld": True}
        elif value is not None and (number := number_of(value)) is not None:
            yield name, {"value": str(number), "label": value.label}
    if isinstance(row.exposures, Withheld):
        yield "exposure", {"withheld": True}
    if visible := row.audits:
        summaries = [summarise(exposures.rows) for exposures in visible]
        mean = sum(summary.mean for summary in summaries) / len(summaries)
        yield "exposure", {"value": str(mean), "label": visible[0].label}
        largest = max(summary.largest for summary in summaries)
        yield "exposure_largest", {"value": str(largest), "label": visible[0].label}


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
    models: Mapping[str, Mapping[str, Figure]]
    finetuned: Mapping[str, Sequence[Mapping[str, Any]]]
    leakage: Sequence[Figure] = ()


def read_run(store: Store, uri: str, edition: str) -> Run:
    """Return a run from its report.

    Args:
        store: the store that contains the report.
        uri: address of the report step's output.
        edition: the edition whose figures are read, `report` or `operator_report`.

    Raises:
        BadInput: there is no report, or an earlier version wrote it.
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
