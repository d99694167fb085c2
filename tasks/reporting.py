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
from dp_core.privacy.accounting import epsilon_pld, epsilon_rdp
from dp_core.privacy.events import MechanismEvent
from dp_core.privacy.labels import Label, Labelled
from dp_core.privacy.ledger import Entry, Ledger
from dp_core.privacy.mechanism_words import describe
from dp_core.privacy.statement import total_epsilon
from dp_core.privacy.units import PrivacyUnit
from dp_core.report.model import (
    Curve,
    Exposures,
    Kind,
    LedgerLine,
    LedgerView,
    ModelRow,
)
from tasks.specs import JobSettings, ReleaseRecord, StepResult
from tasks.statements import release_in_words
from tasks.workbench import Input, Workbench, labelled

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


def total(releases: Sequence[ReleaseRecord]) -> tuple[float | None, float]:
    """Return (ε, δ) of all releases together, composed by PLD at the sum of their δ.

    Their parameters were all fixed before the first of them, by one job's settings: so the
    composition is not adaptive. ε is None where they protect different units or have unlike
    neighbours: then there is no total, and each release's own ε is all that may be said.
    """
    delta = math.fsum(r.delta for r in releases)
    return _total(json.dumps([r.event for r in releases], sort_keys=True), delta), delta


@cache
def _total(events: str, delta: float) -> float | None:
    parts = [MechanismEvent.from_json(event) for event in json.loads(events)]
    return total_epsilon(parts, delta)


def model_row(
    kind: Kind, vocabulary: Input, model: Input, finetuned: Input | None, audited: Input | None
) -> ModelRow:
    """Return one model of the comparison."""
    private = kind != "nonprivate"
    epsilon: float | None = math.inf
    delta = 0.0
    if private:
        epsilon, delta = total(model.result.releases)
    values = last_values(model.result)
    scores = last_values(finetuned.result) if finetuned else {}
    return ModelRow(
        kind=kind,
        name=NAMES[kind],
        epsilon_vocabulary=vocabulary.result.releases[0].epsilon,
        epsilon_training=model.facts["epsilon_training"] if private else math.inf,
        epsilon_total=epsilon,
        delta=delta,
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
    label = Label.OPERATOR if audited.facts["operator_only"] else Label.DP
    rows = json.loads((audited.folder / EXPOSURE_FILE).read_text())
    return Exposures(label, tuple(ExposureRow.from_json(row) for row in rows))


def curves(kind: Kind, result: StepResult) -> list[Curve]:
    """Return a model's loss and accuracy over its updates, with the ε spent so far."""
    quantities: tuple[Quantity, ...] = ("loss", "mlm_public")  # the metrics bear these names
    found = [_curve(kind, quantity, result) for quantity in quantities]
    return [curve for curve in found if curve is not None]


def _curve(kind: Kind, quantity: Quantity, result: StepResult) -> Curve | None:
    measured = [m for m in result.metrics if m.name == quantity]
    spent = {m.step: m.value for m in result.metrics if m.name == "epsilon"}
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


def ledger_view(bench: Workbench, dataset: str, unit: PrivacyUnit) -> LedgerView:
    """Return the data set's account: its latest entries and how its budget stands."""
    ledger = Ledger.open(bench.deployment.ledger)
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
        release=release_in_words(entry.event),
        mechanism=describe(entry.event),
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
