"""The table of results: cost, usefulness and memory of each model or setting of a sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from dp_core.audit.exposure import summarise
from dp_core.labels import Label, Labelled
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.statement import DatasetTotal
from dp_core.training.bootstrap import MeanF1
from tasks.report.model import (
    F1,
    EpochsRow,
    Exposures,
    Measure,
    ModelRow,
    Report,
    ResultRow,
    Withheld,
    compared_by,
    measure_of,
)
from tasks.report.tables import (
    NOT_MEASURED,
    Cell,
    Header,
    Table,
    bits,
    measured,
    name,
    number,
    percentage,
    significant,
    span_cell,
    total,
    withheld,
)

Cells = Callable[[ModelRow], tuple[Cell, ...]]  # the cells of a row under some headers
FINETUNING_TITLES = {  # by axis of the sweep
    "finetune_noise_multiplier": "Fine-tuning σ",
    "finetune_batch_size": "Fine-tuning batch",
    "finetune_epochs": "Fine-tuning epochs",
    "finetune_learning_rate": "Fine-tuning rate",
}


def results_table(report: Report) -> Table:
    """Return the table of an edition's models, with the result of the audits as first line."""
    table = models_table(report.models, report.unit, is_sweep=report.is_sweep)
    audit = report.audit
    finding = "" if audit is None else f"{audit.verdict}. {audit.finding}"
    lead = report.against or (finding and f"Audit of the private training: {finding}")
    return replace(table, lead=lead)


def models_table(models: Sequence[ModelRow], unit: PrivacyUnit, *, is_sweep: bool = False) -> Table:
    """Return cost, scores and exposure of each model, in their order.

    Causal models have perplexities instead of masked-token accuracies and fine-tuning scores.

    Args:
        models: models of a job, or settings of a sweep followed by baselines.
        unit: the privacy unit of the private corpus.
        is_sweep: also show the settings of each model.
    """
    measure = compared_by(models)
    named = not is_sweep or any(model.baseline for model in models)
    cost_headers, cost_cells = cost_columns(models, unit)
    spread_headers, spread_cells = _spread_columns(models)
    columns: list[tuple[tuple[Header, ...], Cells]] = []
    if named:
        columns.append(
            (
                (Header("Model", numeric=False),),
                lambda model: (name(_model_of(model) if is_sweep else model.name),),
            )
        )
    if is_sweep:
        columns += _settings_columns(models)
    if named:
        columns.append(
            (
                (Header("ε_V", "vocabulary"),),
                lambda model: (number(model.epsilon_vocabulary, Label.PUBLIC),),
            )
        )
    columns += [
        (
            (Header("ε_T", "training"),),
            lambda model: (number(model.epsilon_training, Label.PUBLIC),),
        ),
        (cost_headers, cost_cells),
        (
            _MASKED if measure.is_share else _CAUSAL,
            lambda model: (
                tuple(map(percentage, (model.mlm_public, model.mlm_private)))
                if measure.is_share
                else (measured(model.perplexity_public),)
            ),
        ),
        (
            (Header(measure.column, measure.unit),),
            lambda model: (measured(model.compared, percent=measure.is_share),),
        ),
        (spread_headers, spread_cells),
        (_EXPOSURE, lambda model: _exposure_cells(model.exposures)),
    ]
    return Table(
        key="sweep" if is_sweep else "closing",
        caption="All settings of the sweep; each private training was a separate release"
        if is_sweep
        else "Privacy cost, usefulness and memory of each model",
        headers=tuple(header for headers, _ in columns for header in headers),
        rows=tuple(
            tuple(cell for _, cells in columns for cell in cells(model)) for model in models
        ),
        notes=(
            *_spread_notes(models),
            *exposure_notes([exposures for model in models for exposures in model.audits]),
            *((ONE_CHARGE, OF_ONE_TRAINING) if any(m.training_epochs for m in models) else ()),
            *((_OF_BASELINES,) if is_sweep and named else ()),
            *((_OF_OTHER_TOKENS,) if is_sweep and named and not measure.is_share else ()),
        ),
    )


_MASKED = Header("MLM accuracy", "public text, %"), Header("MLM accuracy", "private text, %")
_CAUSAL = (Header("Perplexity", "public text, by token"),)
_EXPOSURE = Header("Exposure", "mean, bits"), Header("Exposure", "largest, bits")
_OF_BASELINES = (
    "Baselines are trained without noise, and their publishable values are not charged. The "
    "baseline “public text only” and checkpoints use a vocabulary from public text or from the "
    "checkpoint (ε 0). Baselines named “training” use the vocabulary of the sweep, which costs "
    "ε_V. A model that was trained without privacy has no finite ε, so its values are for the "
    "operator only. Baselines with another vocabulary have other canaries."
)
_OF_OTHER_TOKENS = (
    "Perplexity is measured by token. Baselines with another vocabulary (“public text only”, "
    "“without privacy”) have other tokens, so their perplexities are not comparable with those "
    "on the vocabulary of the sweep."
)
OF_ONE_TRAINING = (
    "One training saved these models before its end. Its learning-rate schedule covers the whole "
    "training, so a training that ended after as many epochs would give another model."
)
ONE_CHARGE = (
    "One charge covers all these models: each of them, including the first, has the ε of all, "
    "because a recipient of one model may also have the others."
)


def _settings_columns(
    points: Sequence[ModelRow],
) -> list[tuple[tuple[Header, ...], Cells]]:
    """Return the settings of the training, and those of fine-tuning that vary."""
    tuning = list(points[0].finetuning) if points else []
    training = Header("Noise multiplier", "σ"), Header("Batch size", "expected units")
    return [
        ((*training, Header("Epochs")), _training_cells),
        (
            tuple(Header(FINETUNING_TITLES[axis]) for axis in tuning),
            lambda point: tuple(number(point.finetuning[axis], Label.PUBLIC) for axis in tuning),
        ),
    ]


def _model_of(point: ModelRow) -> str:
    return "with DP" if point.baseline is None else point.name.partition(" · ")[0]


def _training_cells(point: ModelRow) -> tuple[Cell, ...]:
    """Return σ, batch size and epochs of the training on private rows, if there was one."""
    settings = point.noise_multiplier, point.batch_size, point.epochs
    *others, epochs = (
        number(value, Label.PUBLIC) if value else Cell(NOT_MEASURED) for value in settings
    )
    whole = point.training_epochs
    return *others, replace(epochs, detail=f"of {significant(whole)} trained" if whole else "")


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


def _exposure_cells(trainings: Sequence[Exposures] | Withheld) -> tuple[Cell, Cell]:
    """Return the mean exposure over the trainings of a row, and the largest exposure."""
    if isinstance(trainings, Withheld):
        return withheld(), withheld()
    if not trainings:
        return Cell(NOT_MEASURED), Cell(NOT_MEASURED)
    label = trainings[0].label
    summaries = [summarise(exposures.rows) for exposures in trainings]
    mean = math.fsum(s.mean for s in summaries) / len(summaries)
    remembers = any(s.remembers for s in summaries)
    alarm = any(s.remembers and s.mean > s.mean_null_high for s in summaries)
    return (
        bits(mean, label, alarm=alarm),
        bits(max(s.largest for s in summaries), label, alarm=remembers),
    )


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


def _spread_columns(
    points: Sequence[ModelRow],
) -> tuple[tuple[Header, ...], Callable[[ModelRow], tuple[Cell, ...]]]:
    """Return the headers of intervals and deviations of scores, and a function for the cells.

    Deviations of shares are in percentage points.
    """
    short, share = compared_by(points).short, compared_by(points).is_share
    known = [point.spread for point in points if point.spread is not None]
    seen = [spread for spread in known if isinstance(spread, MeanF1)]
    seeds = any(spread.seeds > 1 for spread in seen)
    folds = any(spread.folds > 1 for spread in seen)
    best = any(point.best_three is not None for point in points)
    headers = [Header(short, "95% interval")] if known else []
    headers += [Header(short, "SD over seeds")] if seeds else []
    headers += [Header(short, "SD over folds")] if folds else []
    headers += [Header(short, "three best seeds, %")] if best else []

    def cells(point: ModelRow) -> tuple[Cell, ...]:
        if not isinstance(point.spread, MeanF1) or not isinstance(point.compared, Labelled):
            return (withheld() if point.spread is not None else Cell(NOT_MEASURED),) * len(headers)
        kind, spread = type(point.compared), point.spread
        interval = Cell(NOT_MEASURED)
        if spread.interval is not None:
            interval = span_cell(spread.interval, point.compared.label, percent=share)
        deviations = [
            measured(None if value is None else kind(value), percent=share)
            for value, shown in (
                (spread.seed_deviation, seeds),
                (spread.fold_deviation, folds),
            )
            if shown
        ]
        return (interval, *deviations, *((percentage(point.best_three),) if best else ()))

    return tuple(headers), cells


def _spread_notes(points: Sequence[ModelRow]) -> tuple[str, ...]:
    seen = [point.spread for point in points if isinstance(point.spread, MeanF1)]
    if not seen:
        return ()
    most = max(seen, key=lambda spread: spread.replicates)
    if not compared_by(points).is_share:
        return (
            "Perplexity is measured on held-out text; lower is better. It is the mean of up to "
            f"{most.seeds} trainings with different seeds, with Student's interval over them. The "
            "interval does not include the variation of the shared text, vocabulary and public "
            "pre-training. The total ε covers all trainings of a row.",
        )
    source = "the score of one fine-tuning"
    if most.replicates > 1:
        replicates = f"seeds: {most.seeds}, folds: {most.folds}"
        source = f"the mean of {most.replicates} fine-tunings ({replicates})"
    drawn = " and seeds" if most.seeds > 1 else ""
    notes = (
        f"{measure_of(points).short} is {source}; its interval is a bootstrap over test "
        f"documents{drawn}. The interval does not include the variation of the shared vocabulary "
        "and public pre-training. The total ε covers all trainings of a row.",
    )
    return (*notes, _OF_THE_BEST) if any(p.best_three is not None for p in points) else notes


_OF_THE_BEST = (
    "Some papers report the mean of the three best seeds (Jagannatha et al. 2021). These seeds are "
    "selected on the test part, so this mean is higher than the expected score of a training."
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
        exposures = [_exposure_cells(model.exposures if model else ()) for model in models]
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
