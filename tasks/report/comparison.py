"""What differs between runs: their settings, and the ε, score and exposure of their models."""

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
    Exposures,
    JobReport,
    Membership,
    MembershipAt,
    ModelRow,
    SweepReport,
    SweepRow,
    Value,
    Withheld,
    number_of,
    shown_day,
)
from tasks.results.inputs import read_result
from tasks.storage import Store

FIGURES_FILE = "figures.json"  # in the folder of each edition, with what that edition shows
FINETUNED = "finetuned"  # fact of a report: by model, the fine-tunings behind its score
_NO_COUNTS = "no counts by document: labels or model are private, or of an earlier version"
_OTHERS = "not tested on the same documents, by the same seeds on each fold, or too few of them"
_OTHER_HEADS = "fine-tuned for something else"
Figure = dict[str, Any]  # value and label, or that it is withheld


def figures_of(shown: JobReport | SweepReport) -> dict[str, Any]:
    """Return the settings of a run and its models' figures, as one edition of its report has them.

    Args:
        shown: of that edition: what it withholds is not in it.
    """
    rows = shown.points if isinstance(shown, SweepReport) else shown.models
    return {
        "settings": dict(shown.settings),
        "models": {row.name: dict(_figures(row)) for row in rows},
        "leakage": [one for row in rows if isinstance(row, ModelRow) for one in _leakage(row)],
    }


def _leakage(row: ModelRow) -> Iterator[Figure]:
    """Yield what each membership attack finds of a model, after each epoch that was kept."""
    if not isinstance(row.membership, Membership):
        return
    last = MembershipAt(math.inf, row.membership.losses, row.membership.rows)
    for at in row.membership.by_epoch or (last,):
        for one in at.rows:
            found = one.leakage
            yield {
                "model": row.name,
                "epoch": None if math.isinf(at.epochs) else at.epochs,  # None: the last alone
                "level": one.level,
                "attack": one.attack,
                "value": found.value,
                "interval": [found.low, found.high],
                "label": row.membership.label,
            }


def _figures(row: ModelRow | SweepRow) -> Iterator[tuple[str, Figure]]:
    for total in (row.cost.corpus, *row.cost.others):
        name = f"/{total.dataset}" if total in row.cost.others else ""
        epsilon = "no total" if total.epsilon is None else str(total.epsilon)
        yield f"epsilon{name}", {"value": epsilon, "label": Label.PUBLIC}
        if total.epsilon is not None and math.isfinite(total.epsilon):  # else it says nothing
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
    audited = row.exposures if isinstance(row.exposures, tuple) else (row.exposures,)
    if any(isinstance(one, Withheld) for one in audited):
        yield "exposure", {"withheld": True}
    if seen := [one for one in audited if isinstance(one, Exposures)]:
        found = [summarise(one.rows) for one in seen]
        mean = sum(one.mean for one in found) / len(found)
        yield "exposure", {"value": str(mean), "label": seen[0].label}
        largest = max(one.largest for one in found)
        yield "exposure_largest", {"value": str(largest), "label": seen[0].label}


@dataclass(frozen=True)
class Run:
    """A run as its report has left it.

    Attributes:
        uri: of the report step's output.
        created: date, and of the operator's edition the time.
        settings: all of them.
        models: by name, figures by name.
        finetuned: by model, the fine-tunings behind its score.
        leakage: what membership attacks find, by model, epoch, level and attack; the operator's.
    """

    uri: str
    created: str
    settings: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Figure]]
    finetuned: Mapping[str, Sequence[Mapping[str, Any]]]
    leakage: Sequence[Figure] = ()


def read_run(store: Store, uri: str, edition: str) -> Run:
    """Return a run by its report.

    Args:
        store: that holds it.
        uri: of the report step's output.
        edition: `report` or `operator_report`: whose figures.

    Raises:
        BadInput: no report there, or one of an earlier version.
    """
    result = read_result(store, uri)
    if result is None or edition not in result.outputs:
        raise BadInput("no report there", where=uri, fix="Give what confide report --json names.")
    file = store.local_copy(uri) / edition / FIGURES_FILE
    if not file.exists():
        raise BadInput(
            "the report is of an earlier version, and cannot be compared",
            where=uri,
            fix="Run the job again: what was charged is not charged again.",
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
    """Return the settings that are not the same in all runs, with their value in each."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [run.settings.get(name) for run in runs] for name in names}
    return {name: own for name, own in values.items() if any(v != own[0] for v in own)}


@dataclass(frozen=True)
class Compared:
    """F1, or accuracy, of one model less that of another, or why nothing can be said of it.

    Attributes:
        first: number of the run and name of the model that the other is compared with.
        second: likewise, of the other.
        difference: of the second less the first; None: it cannot be had.
        why_not: in words; empty where there is a difference.
    """

    first: tuple[int, str]
    second: tuple[int, str]
    difference: Difference | None
    why_not: str = ""


def differences(store: Store, runs: Sequence[Run]) -> list[Compared]:
    """Return what can be said of differences in F1 or accuracy, document by document.

    Models of the same name are compared, of each run with the first that has it; where one run is
    given, its models with its first one. Only what anyone may see is read: counts by document are
    kept of public labels alone. Causal models have no such score.
    """
    models = [
        (number, name)
        for number, run in enumerate(runs)
        for name in run.models
        if not is_causal(run.settings.get("model_kind", "bert"))
    ]
    pairs = [
        (one, two)
        for one, two in itertools.combinations(models, 2)
        if (one == models[0] if len(runs) == 1 else one[1] == two[1])
    ]
    if len(runs) > 1:  # each with the first that has it
        firsts = {name: (number, name) for number, name in reversed(models)}
        pairs = [(one, two) for one, two in pairs if one == firsts[one[1]]]
    return [_compared(store, runs, one, two) for one, two in pairs]


def _compared(
    store: Store, runs: Sequence[Run], one: tuple[int, str], two: tuple[int, str]
) -> Compared:
    first, second = (_replicates(store, runs[number], name) for number, name in (one, two))
    if first is None or second is None:
        return Compared(one, two, None, _NO_COUNTS)
    if len({runs[number].settings.get("head", "entities") for number, _ in (one, two)}) > 1:
        return Compared(one, two, None, _OTHER_HEADS)
    found = f1_difference(first, second)
    return Compared(one, two, found, "" if found else _OTHERS)


def _replicates(store: Store, run: Run, model: str) -> list[Replicate] | None:
    replicates = []
    for told in run.finetuned.get(model, ()):
        result = read_result(store, told["uri"])
        if result is None or not result.facts.get("documents"):
            return None
        counts = result.facts["documents"]
        replicates.append(Replicate(told["seed"], told["fold"], counts, told["start"]))
    return replicates or None
