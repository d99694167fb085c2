"""Tables of a job's report: costs and scores of models, the ledger, and facts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from dp_core.audit.exposure import summarise
from dp_core.labels import Label
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.statement import DatasetTotal
from tasks.report.cells import (
    NOT_MEASURED,
    Cell,
    Header,
    Table,
    bits,
    interval_cell,
    measured,
    name,
    number,
    percentage,
    total,
    withheld,
)
from tasks.report.model import (
    ACCURACY,
    F1,
    EpochsRow,
    Exposures,
    Fact,
    JobReport,
    LedgerView,
    Measure,
    ModelRow,
    ResultRow,
    Withheld,
    measure_of,
)

MASKED = Header("MLM accuracy", "public text, %"), Header("MLM accuracy", "private text, %")
CAUSAL = Header("Perplexity", "public text, by token"), Header("Perplexity", "private text")


def closing_of(report: JobReport) -> Table:
    """Return the closing table of an edition, with the result of the audits as first line."""
    table = closing_table(report.models, report.unit)
    audit = report.audit
    finding = "" if audit is None else f"{audit.verdict}. {audit.finding}"
    lead = report.against or (finding and f"Audit of the private training: {finding}")
    return replace(table, lead=lead)


def closing_table(models: Sequence[ModelRow], unit: PrivacyUnit) -> Table:
    """Return the final table of a job: cost, scores and exposure of each model.

    Causal models have perplexities instead of masked-token accuracies and fine-tuning scores.
    """
    causal, measure = are_causal(models), measure_of(models)
    cost_headers, cost_cells = cost_columns(models, unit)
    rows = []
    for model in models:
        abilities = (
            map(measured, (model.perplexity_public, model.perplexity_private))
            if causal
            else map(percentage, (model.mlm_public, model.mlm_private, model.score))
        )
        rows.append(
            (
                name(model.name),
                number(model.epsilon_vocabulary, Label.PUBLIC),
                number(model.epsilon_training, Label.PUBLIC),
                *cost_cells(model),
                *abilities,
                *_exposure_cells(model.exposures),
            )
        )
    return Table(
        key="closing",
        caption="Privacy cost, usefulness and memory of each model",
        headers=(
            Header("Model", numeric=False),
            Header("ε_V", "vocabulary"),
            Header("ε_T", "training"),
            *cost_headers,
            *(CAUSAL if causal else (*MASKED, Header(measure.column, measure.unit))),
            Header("Exposure", "mean, bits"),
            Header("Exposure", "largest, bits"),
        ),
        rows=tuple(rows),
        notes=exposure_notes([m.exposures for m in models if isinstance(m.exposures, Exposures)]),
    )


def cost_columns(
    rows: Sequence[ResultRow], unit: PrivacyUnit
) -> tuple[tuple[Header, ...], Callable[[ResultRow], tuple[Cell, ...]]]:
    """Return the headers of the total costs, and a function that returns a row's cells.

    Each data set has separate columns, because a sum over data sets guarantees nothing.
    """
    tuned = any(row.pretrained.corpus.epsilon != row.cost.corpus.epsilon for row in rows)
    others = {
        total.dataset: "" if total.unit is None else f", per {total.unit}"
        for row in rows
        for total in row.cost.others
    }
    headers = [Header("ε", "before fine-tuning")] if tuned else []
    headers += [Header("ε", f"in total, per {unit}"), Header("δ", "in total")]
    for dataset, per in others.items():
        headers += [Header("ε", f"of “{dataset}”{per}"), Header("δ", f"of “{dataset}”")]

    def cells(row: ResultRow) -> tuple[Cell, ...]:
        untouched = DatasetTotal("", None, 0.0, 0.0)
        known = {total.dataset: total for total in row.cost.others}
        shown = [row.cost.corpus, *(known.get(dataset, untouched) for dataset in others)]
        return (
            *((total(row.pretrained.corpus.epsilon),) if tuned else ()),
            *(cell for of_dataset in shown for cell in _total_cells(of_dataset)),
        )

    return tuple(headers), cells


def _total_cells(of_dataset: DatasetTotal) -> tuple[Cell, Cell]:
    finite = of_dataset.epsilon is not None and math.isfinite(of_dataset.epsilon)
    delta = number(of_dataset.delta, Label.PUBLIC, 2) if finite else Cell(NOT_MEASURED)
    return total(of_dataset.epsilon), delta


def _exposure_cells(exposures: Exposures | Withheld | None) -> tuple[Cell, Cell]:
    if exposures is None:
        return Cell(NOT_MEASURED), Cell(NOT_MEASURED)
    if isinstance(exposures, Withheld):
        return withheld(), withheld()
    summary = summarise(exposures.rows)
    mean_alarm = summary.remembers and summary.mean > summary.mean_null_high
    return (
        bits(summary.mean, exposures.label, alarm=mean_alarm),
        bits(summary.largest, exposures.label, alarm=summary.remembers),
    )


def are_causal(models: Sequence[ModelRow]) -> bool:
    """Return whether the models are causal."""
    return any(model.perplexity_public is not None for model in models)


def exposure_notes(shown: Sequence[Exposures]) -> tuple[str, ...]:
    """Return the notes of a table of exposures."""
    if not shown:
        return ()
    summary = summarise(shown[0].rows)
    ceiling = math.log2(shown[0].rows[0].candidates)
    return (
        f"The exposure of a model that remembers nothing is about 1 bit, and in 97.5% of cases "
        f"below {summary.mean_null_high:.1f} (mean) and {summary.largest_null_high:.1f} (largest "
        f"group). The exposure of a secret that is always ranked first is {ceiling:.1f}.",
    )


def entity_table(models: Sequence[ModelRow]) -> Table:
    """Return F1 by entity type or class, then the overall score with its interval.

    The table has no rows if nothing was measured.
    """
    measure = measure_of(models)
    types = sorted({kind for model in models for kind in model.f1_by_type})
    rows = [
        (name(kind), *(percentage(model.f1_by_type.get(kind)) for model in models))
        for kind in types
    ]
    if any(model.score is not None for model in models):
        rows.append((name(measure.over_all), *(percentage(model.score) for model in models)))
    if known := any(model.interval is not None for model in models):
        rows.append((name("95% interval"), *(interval_cell(model.interval) for model in models)))
    return Table(
        key="entities",
        caption=measure.by_label,
        headers=(
            Header(measure.label, numeric=False),
            *(Header(model.name, "%" if measure is ACCURACY else "F1, %") for model in models),
        ),
        rows=tuple(rows),
        notes=(_OF_THE_INTERVAL,) if known else (),
    )


_OF_THE_INTERVAL = (
    "The interval is a bootstrap over the patients or documents of the test part; it does not "
    "include the variation between trainings."
)
OF_ONE_TRAINING = (
    "One training saved these models before its end. Its learning-rate schedule covers the whole "
    "training, so a training that ended after as many epochs would give another model."
)
ONE_CHARGE = (
    "One charge covers all these models: each of them, including the first, has the ε of all, "
    "because a recipient of one model may also have the others."
)


def by_epoch_table(rows: Sequence[EpochsRow], unit: PrivacyUnit, measure: Measure = F1) -> Table:
    """Return scores and exposures by epoch, in the form of Jagannatha et al. 2021, Table 5."""
    cost_headers, cost_cells = cost_columns(rows, unit)
    epochs = sorted({model.epochs for row in rows for model in row.models})
    table_rows = []
    for row in rows:
        by_epoch = {model.epochs: model for model in row.models}
        models = [by_epoch.get(epoch) for epoch in epochs]
        scores = [percentage(model.score) if model else Cell(NOT_MEASURED) for model in models]
        exposures = [_exposure_cells(model.exposures if model else None) for model in models]
        figures = [
            (name(measure.column, measure.unit), scores),
            (name("Exposure", "mean, bits"), [mean for mean, _ in exposures]),
            (name("Exposure", "largest, bits"), [largest for _, largest in exposures]),
        ]
        table_rows += [
            (name(row.name), figure, *cost_cells(row), *cells)
            for figure, cells in figures
            if any(cell.text != NOT_MEASURED for cell in cells)
        ]
    return Table(
        key="by_epoch",
        caption="Usefulness and memory, by epoch",
        headers=(
            Header("Model", numeric=False),
            Header("Figure", numeric=False),
            *cost_headers,
            *(Header(f"Epoch {epoch:g}") for epoch in epochs),
        ),
        rows=tuple(table_rows),
        notes=(ONE_CHARGE, OF_ONE_TRAINING) if rows else (),
    )


def ledger_table(ledger: LedgerView) -> Table:
    """Return the releases of the data set, one per row."""
    rows = tuple(
        (
            name(line.entry, line.seed_hash and f"seed {line.seed_hash[:12]}"),
            name(line.release, line.mechanism),
            replace(
                number(line.epsilon, Label.PUBLIC),
                detail="by RDP: no PLD is known" if line.claimed_by_rdp else "",
            ),
            Cell(NOT_MEASURED)
            if line.epsilon_rdp is None
            else number(line.epsilon_rdp, Label.PUBLIC),
            number(line.delta, Label.PUBLIC, 2),
            name(line.state),
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
    """Return the facts, one per row."""
    return Table(
        key=key,
        caption=caption,
        headers=(Header("", numeric=False), Header("")),
        rows=tuple((name(fact.name, fact.note), _fact_cell(fact)) for fact in facts),
    )


def _fact_cell(fact: Fact) -> Cell:
    if isinstance(fact.value, Withheld):
        return withheld()
    if isinstance(fact.value, str):
        return Cell(fact.value, value=fact.value, label=fact.label)
    return number(fact.value, fact.label, 4)
