"""The report's tables as plain data: page, terminal and JSON show the same rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dp_core.audit.exposure import ALONE, EMBEDDED, ExposureRow, summarise
from dp_core.privacy.labels import Label
from dp_core.privacy.units import PrivacyUnit
from dp_core.report import cells
from dp_core.report.cells import Cell
from dp_core.report.model import Exposures, Fact, LedgerView, ModelRow, SweepRow, Withheld

_CONTEXT_WORDS = {ALONE: "shown alone", EMBEDDED: "among random pieces"}


@dataclass(frozen=True)
class Header:
    """A column's name, its unit, and whether it holds numbers (aligned right)."""

    name: str
    unit: str = ""
    numeric: bool = True


_MASKED = Header("MLM accuracy", "public text, %"), Header("MLM accuracy", "private text, %")
_CAUSAL = Header("Perplexity", "public text, by piece"), Header("Perplexity", "private text")
_ENTITIES = Header("Entity F1", "strict, micro, %")
_LEFT_TO_RIGHT = (
    "A causal model ranks the secret by what stands before it: as the next piece after the hints."
)


@dataclass(frozen=True)
class Table:
    """Headers, rows of labelled cells as long as the headers, and notes beneath."""

    key: str
    caption: str
    headers: tuple[Header, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any(len(row) != len(self.headers) for row in self.rows):
            raise ValueError(f"table {self.key}: a row is not as long as the headers")

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON values; infinities as the string `inf`."""
        return {
            "key": self.key,
            "caption": self.caption,
            "columns": [{"name": h.name, "unit": h.unit} for h in self.headers],
            "rows": [[_cell_json(cell) for cell in row] for row in self.rows],
            "notes": list(self.notes),
        }


def closing_table(models: Sequence[ModelRow], unit: PrivacyUnit) -> Table:
    """Return what the job ends with: what each model costs, what it can do, what it remembers.

    Causal models show their perplexity where others show their accuracy under masks, and no F1.
    """
    causal = _are_causal(models)
    return Table(
        key="closing",
        caption="What each model costs in privacy, what it can do, and what it remembers",
        headers=(
            Header("Model", numeric=False),
            Header("ε_V", "vocabulary"),
            Header("ε_T", "training"),
            *_cost_headers(models, unit),
            *(_CAUSAL if causal else (*_MASKED, _ENTITIES)),
            Header("Exposure", "mean, bits"),
            Header("Exposure", "largest, bits"),
        ),
        rows=tuple(_closing_row(model, causal, _charged(models)) for model in models),
        notes=_exposure_notes(models),
    )


@dataclass(frozen=True)
class _Charged:
    """Which columns of cost a table needs beside the total of the private corpus."""

    tuned: bool  # some row's fine-tuning was charged to the corpus
    others: tuple[tuple[str, str], ...]  # data sets, each with its unit in words


def _charged(rows: Sequence[ModelRow | SweepRow]) -> _Charged:
    others = {
        total.dataset: "" if total.unit is None else f", per {total.unit}"
        for row in rows
        for total in row.others
    }
    tuned = any(
        row.untuned is not None and row.untuned.corpus.epsilon != row.epsilon_total for row in rows
    )
    return _Charged(tuned, tuple(others.items()))


def _cost_headers(rows: Sequence[ModelRow | SweepRow], unit: PrivacyUnit) -> tuple[Header, ...]:
    """Return the columns of the totals: no sum over data sets is anybody's guarantee."""
    charged = _charged(rows)
    return (
        *((Header("ε", "before fine-tuning"),) if charged.tuned else ()),
        Header("ε", f"in total, per {unit}"),
        Header("δ", "in total"),
        *(
            header
            for name, per in charged.others
            for header in (Header("ε", f"of “{name}”{per}"), Header("δ", f"of “{name}”"))
        ),
    )


def _cost_cells(row: ModelRow | SweepRow, charged: _Charged) -> tuple[Cell, ...]:
    before = row.epsilon_total if row.untuned is None else row.untuned.corpus.epsilon
    others = {total.dataset: (total.epsilon, total.delta) for total in row.others}
    return (
        *((cells.total(before),) if charged.tuned else ()),
        *_total_cells(row.epsilon_total, row.delta),
        *(
            cell
            for name, _ in charged.others
            for cell in _total_cells(*others.get(name, (0.0, 0.0)))
        ),
    )


def _total_cells(epsilon: float | None, delta: float) -> tuple[Cell, Cell]:
    finite = epsilon is not None and math.isfinite(epsilon)
    told = cells.number(delta, Label.PUBLIC, 2) if finite else Cell(cells.NOT_MEASURED)
    return cells.total(epsilon), told


def _closing_row(model: ModelRow, causal: bool, charged: _Charged) -> tuple[Cell, ...]:
    return (
        cells.name(model.name),
        cells.number(model.epsilon_vocabulary, Label.PUBLIC),
        cells.number(model.epsilon_training, Label.PUBLIC),
        *_cost_cells(model, charged),
        *cells.knowledge(model, causal=causal),
        *(() if causal else (cells.percentage(model.f1),)),
        *_exposure_cells(model.exposures),
    )


def _exposure_cells(exposures: Exposures | Withheld | None) -> tuple[Cell, Cell]:
    if exposures is None:
        return Cell(cells.NOT_MEASURED), Cell(cells.NOT_MEASURED)
    if isinstance(exposures, Withheld):
        return cells.withheld(), cells.withheld()
    found = summarise(exposures.rows)
    mean_alarm = found.remembers and found.mean > found.mean_null_high
    return (
        cells.bits(found.mean, exposures.label, alarm=mean_alarm),
        cells.bits(found.largest, exposures.label, alarm=found.remembers),
    )


def _are_causal(models: Sequence[ModelRow]) -> bool:
    return any(model.perplexity_public is not None for model in models)


def _exposure_notes(models: Sequence[ModelRow]) -> tuple[str, ...]:
    measured = [m.exposures for m in models if isinstance(m.exposures, Exposures)]
    if not measured:
        return ()
    found = summarise(measured[0].rows)
    ceiling = math.log2(measured[0].rows[0].candidates)
    return (
        f"Exposure: a model that remembers nothing reads about 1 bit, and stays below "
        f"{found.mean_null_high:.1f} (mean) and {found.largest_null_high:.1f} (largest group) "
        f"in 97.5% of cases; a secret always ranked first reads {ceiling:.1f}.",
    )


def entity_table(models: Sequence[ModelRow]) -> Table:
    """Return strict F1 by entity type, then micro; no rows where nothing was measured."""
    types = sorted({kind for model in models for kind in model.f1_by_type})
    rows = [
        (
            cells.name(kind),
            *(cells.percentage(model.f1_by_type.get(kind)) for model in models),
        )
        for kind in types
    ]
    if any(model.f1 is not None for model in models):
        rows.append((cells.name("all (micro)"), *(cells.percentage(model.f1) for model in models)))
    return Table(
        key="entities",
        caption="Entity extraction: strict F1 by type",
        headers=(
            Header("Entity type", numeric=False),
            *(Header(model.name, "F1, %") for model in models),
        ),
        rows=tuple(rows),
    )


def exposure_table(models: Sequence[ModelRow]) -> Table:
    """Return every group of canaries of every model whose exposure may be shown."""
    rows = [
        _group_row(model.name, row, model.exposures.label)
        for model in models
        if isinstance(model.exposures, Exposures)
        for row in model.exposures.rows
    ]
    return Table(
        key="exposure",
        caption="Exposure of every group of canaries",
        headers=(
            Header("Model", numeric=False),
            Header("Pattern", "H hint, S secret", numeric=False),
            Header("Occurrences", "expected, units"),
            Header("Exposure", "bits, 95% interval"),
            Header("Without memory", "bits, 95% band"),
            Header("Probability", "by chance"),
            Header("Rank exposure", "bits, against references"),
            Header("Remembered", numeric=False),
        ),
        rows=tuple(rows),
        notes=(
            "Exposure is log₂|V| − log₂(mean rank of the secret). Rank exposure compares each "
            "canary with references that were never planted (Carlini et al. 2019). “Remembered” "
            "needs the whole interval to lie above the band of a model without memory.",
            *((_LEFT_TO_RIGHT,) if _are_causal(models) else ()),
        ),
    )


def _group_row(model: str, row: ExposureRow, label: Label) -> tuple[Cell, ...]:
    band = f"{row.null_low:.1f} – {row.null_high:.1f}"
    place = f"null {row.rank_exposure_null:.1f}, ceiling {row.rank_exposure_ceiling:.1f}"
    verdict = "yes" if row.remembers else "no"
    chance = f"<{cells.power_of_ten(1e-9)}" if row.p_value < 1e-9 else _probability(row.p_value)
    ranked = cells.bits(row.rank_exposure, label, detail=place)
    return (
        cells.name(model, _CONTEXT_WORDS.get(row.context, row.context)),
        cells.name(row.pattern, f"{row.canaries} canaries"),
        Cell(
            cells.significant(row.expected_occurrences),
            value=row.expected_occurrences,
            label=Label.PUBLIC,
            detail=f"p = {cells.significant(row.rate)}",
        ),
        cells.bits(
            row.exposure, label, alarm=row.remembers, detail=f"{row.low:.1f} – {row.high:.1f}"
        ),
        Cell(f"{row.null_expected:.1f}", value=row.null_expected, label=Label.PUBLIC, detail=band),
        Cell(chance, value=row.p_value, label=label),
        ranked if row.references else Cell(cells.NOT_MEASURED),
        Cell(verdict, value=verdict, label=label, alarm=row.remembers),
    )


def _probability(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else cells.significant(value, 1)


def ledger_table(ledger: LedgerView) -> Table:
    """Return the data set's releases, one a row."""
    rows = tuple(
        (
            cells.name(line.entry, line.seed_hash and f"seed {line.seed_hash[:12]}"),
            cells.name(line.release, line.mechanism),
            cells.number(line.epsilon, Label.PUBLIC),
            Cell(cells.NOT_MEASURED)
            if line.epsilon_rdp is None
            else cells.number(line.epsilon_rdp, Label.PUBLIC),
            cells.number(line.delta, Label.PUBLIC, 2),
            cells.name(line.state),
        )
        for line in ledger.lines
    )
    return Table(
        key="ledger",
        caption=f"Releases of “{ledger.dataset}”, per {ledger.unit}",
        headers=(
            Header("Entry", numeric=False),
            Header("Release", "mechanism", numeric=False),
            Header("ε", "PLD, claimed"),
            Header("ε", "RDP, for comparison"),
            Header("δ"),
            Header("State", numeric=False),
        ),
        rows=rows,
    )


def facts_table(key: str, caption: str, facts: Sequence[Fact]) -> Table:
    """Return a list of facts, one a row."""
    return Table(
        key=key,
        caption=caption,
        headers=(Header("", numeric=False), Header("")),
        rows=tuple((cells.name(fact.name, fact.note), _fact_cell(fact)) for fact in facts),
    )


def _fact_cell(fact: Fact) -> Cell:
    if isinstance(fact.value, Withheld):
        return cells.withheld()
    if isinstance(fact.value, str):
        return Cell(fact.value, value=fact.value, label=fact.label)
    return cells.number(fact.value, fact.label, 4)


def sweep_table(points: Sequence[SweepRow], unit: PrivacyUnit) -> Table:
    """Return the points of a sweep, in its own order."""
    return Table(
        key="sweep",
        caption="Every point of the sweep; each was a release of its own",
        headers=(
            Header("Noise multiplier", "σ"),
            Header("Batch size", "expected units"),
            Header("Epochs"),
            Header("ε_T", f"training, per {unit}"),
            *_cost_headers(points, unit),
            Header("Entity F1", "strict, micro, %"),
            *_MASKED,
        ),
        rows=tuple(
            (
                cells.number(point.noise_multiplier, Label.PUBLIC),
                cells.number(point.batch_size, Label.PUBLIC),
                cells.number(point.epochs, Label.PUBLIC),
                cells.number(point.epsilon_training, Label.PUBLIC),
                *_cost_cells(point, _charged(points)),
                cells.percentage(point.f1),
                cells.percentage(point.mlm_public),
                cells.percentage(point.mlm_private),
            )
            for point in points
        ),
    )


def _cell_json(cell: Cell) -> dict[str, Any]:
    value = cell.value
    if isinstance(value, float) and not math.isfinite(value):
        value = "inf" if value > 0 else "-inf"
    record: dict[str, Any] = {"text": cell.text, "value": value}
    if cell.label is not None:
        record["label"] = cell.label.value
    if cell.withheld:
        record["withheld"] = True
    if cell.detail:
        record["detail"] = cell.detail
    return record
