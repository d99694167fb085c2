"""From the results of a job's steps to what its report is told."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Literal

from dp_core.audit.exposure import ExposureRow
from dp_core.labels import Label, Labelled
from dp_core.privacy.accounting import epsilon_pld, epsilon_rdp
from dp_core.privacy.ledger import Entry
from dp_core.privacy.mechanisms import MechanismEvent, PrivacyUnit
from dp_core.privacy.statement import DatasetTotal, dataset_totals
from tasks.protocol import JobSettings, ReleaseRecord, StepResult
from tasks.releases.ledger_identity import open_ledger
from tasks.releases.provenance import operator_only
from tasks.releases.statements import as_releases
from tasks.report.model import Cost, Curve, Exposures, Kind, LedgerLine, LedgerView, ModelRow
from tasks.runtime.context import Input, StepContext, labelled, merged

KINDS: tuple[Kind, ...] = ("public", "dp", "nonprivate")
NAMES: dict[Kind, str] = {
    "public": "Public text only",
    "dp": "With DP",
    "nonprivate": "Without privacy",
}
Quantity = Literal["loss", "mlm_public"]
EXPOSURE_FILE = "exposure.json"  # rows of `dp_core.audit.exposure`, as the exposure step left them
LEDGER_LINES = 30  # the latest ones; each needs an accounting


def now() -> str:
    """Return the time, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def last_values(result: StepResult) -> dict[str, Labelled]:
    """Return each metric's last value, with the type of its label."""
    return {m.name: labelled(m) for m in sorted(result.metrics, key=lambda m: m.step)}


def totals(releases: Sequence[ReleaseRecord]) -> tuple[DatasetTotal, ...]:
    """Return (ε, δ) of all releases of each data set, composed by PLD at the sum of their δ.

    ε is None where they protect different units or have unlike neighbours: then there is no
    total, and each release's own ε is all that may be said.
    """
    return _totals(tuple(r.model_dump_json() for r in releases))


@cache
def _totals(records: tuple[str, ...]) -> tuple[DatasetTotal, ...]:
    found = [ReleaseRecord.model_validate_json(record) for record in records]
    return dataset_totals(as_releases(found))


def cost(dataset: str, *results: Input | None) -> Cost:
    """Return what models cost together, by the ancestry of all of them.

    Args:
        dataset: the private corpus, whose total is told first.
        results: of the steps whose figures are shown beside it.
    """
    found = totals(merged(r for one in results if one for r in one.result.releases))
    own = [t for t in found if t.dataset == dataset]
    corpus = own[0] if own else DatasetTotal(dataset, None, 0.0, 0.0)
    return Cost(corpus, tuple(t for t in found if t.dataset != dataset))


def model_row(
    kind: Kind, vocabulary: Input, model: Input, finetuned: Input | None, audited: Input | None
) -> ModelRow:
    """Return one model of the comparison: its ε is that of everything that its figures cost."""
    dataset = vocabulary.facts["dataset"]
    pretrained, whole = cost(dataset, model, audited), cost(dataset, model, audited, finetuned)
    training = model.facts["epsilon_training"]
    values = last_values(model.result)
    scores = last_values(finetuned.result) if finetuned else {}
    return ModelRow(
        kind=kind,
        name=NAMES[kind],
        epsilon_vocabulary=vocabulary.result.releases[0].epsilon,
        epsilon_training=math.inf if training is None else training,
        epsilon_total=whole.corpus.epsilon,
        delta=whole.corpus.delta,
        others=whole.others,
        untuned=pretrained if whole != pretrained else None,
        mlm_public=values.get("mlm_accuracy_public"),
        mlm_private=values.get("mlm_accuracy_private"),
        perplexity_public=values.get("perplexity_public"),
        perplexity_private=values.get("perplexity_private"),
        f1=scores.get("f1"),
        f1_by_type={k.removeprefix("f1/"): v for k, v in scores.items() if k.startswith("f1/")},
        exposures=_exposures(audited),
    )


def _exposures(audited: Input | None) -> Exposures | None:
    if audited is None:
        return None
    label = Label.OPERATOR if operator_only(audited.result.releases) else Label.DP
    rows = json.loads((audited.folder / EXPOSURE_FILE).read_text())
    return Exposures(label, tuple(ExposureRow(**row) for row in rows))


def curves(kind: Kind, result: StepResult) -> list[Curve]:
    """Return a model's loss and accuracy over its updates, with the ε spent so far."""
    quantities: tuple[Quantity, ...] = ("loss", "mlm_public")  # the metrics bear these names
    found = [_curve(kind, quantity, result) for quantity in quantities]
    return [curve for curve in found if curve is not None]


def _curve(kind: Kind, quantity: Quantity, result: StepResult) -> Curve | None:
    measured = [m for m in result.metrics if m.name == quantity]
    spent = {m.step: m.value for m in result.metrics if m.name == "epsilon_training"}
    if spent:  # an update without any unit has no loss
        measured = [m for m in measured if m.step in spent]
    if not measured:
        return None
    return Curve(
        kind=kind,
        quantity=quantity,
        label=Label(measured[0].label),
        updates=tuple(m.step for m in measured),
        values=tuple(m.value for m in measured),
        epsilon=tuple(spent[m.step] for m in measured) if spent else (),
    )


def ledger_view(bench: StepContext, dataset: str, unit: PrivacyUnit) -> LedgerView:
    """Return the data set's account: its latest entries and how its budget stands."""
    ledger = open_ledger(bench.deployment)
    remaining = ledger.remaining(dataset)
    entries = [e for e in ledger.history(dataset) if e.accounted][-LEDGER_LINES:]
    return LedgerView(
        dataset=dataset,
        unit=unit,
        lines=tuple(ledger_line(entry) for entry in entries),
        spent_epsilon=remaining.epsilon_so_far,
        spent_delta=remaining.budget.delta,
        budget_epsilon=remaining.budget.epsilon,
        budget_delta=remaining.budget.delta,
    )


def ledger_line(entry: Entry) -> LedgerLine:
    """Return an entry with its ε by today's accounting."""
    epsilon, rdp = _epsilons(json.dumps(entry.event.to_json(), sort_keys=True), entry.delta)
    return LedgerLine(
        entry=entry.id,
        release=entry.event.title,
        mechanism=entry.event.describe(),
        epsilon=epsilon,
        epsilon_rdp=rdp,
        delta=entry.delta,
        state=entry.state.value,
        seed_hash=entry.seed_hash,
    )


@cache
def _epsilons(event: str, delta: float) -> tuple[float, float | None]:
    parsed = MechanismEvent.from_json(json.loads(event))
    return epsilon_pld(parsed, delta), epsilon_rdp(parsed, delta)


def source_names(settings: Mapping[str, bool | int | float | str]) -> tuple[str, str]:
    """Return what people call the public corpus and the entities."""

    def called(kind: str, path: str) -> str:
        synthetic = settings[f"{kind}_format"] == "synthetic"
        return "made up by the project" if synthetic else Path(str(settings[path])).name

    return called("public", "public_path"), called("entities", "entities_train")


def repeat_command(job: str, settings: Mapping[str, bool | int | float | str]) -> str:
    """Return the command that does the job again."""
    defaults = {n: f.default for n, f in JobSettings.model_fields.items()}
    words = [
        f"--set {name}={value}" for name, value in settings.items() if value != defaults.get(name)
    ]
    return " ".join(["./confide run", job, *words])
