"""The table of a sweep's settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from dp_core.audit.exposure import summarise
from dp_core.labels import Label, Labelled
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.training.bootstrap import MeanF1
from tasks.report.model import Exposures, SweepRow, Withheld, compared_by, measure_of
from tasks.report.tables import (
    CAUSAL,
    MASKED,
    NOT_MEASURED,
    OF_ONE_TRAINING,
    ONE_CHARGE,
    Cell,
    Header,
    Table,
    bits,
    cost_columns,
    exposure_notes,
    measured,
    name,
    number,
    percentage,
    significant,
    span_cell,
    withheld,
)

FINETUNING_TITLES = {  # by axis of the sweep
    "finetune_noise_multiplier": "Fine-tuning σ",
    "finetune_batch_size": "Fine-tuning batch",
    "finetune_epochs": "Fine-tuning epochs",
    "finetune_learning_rate": "Fine-tuning rate",
}


def sweep_table(points: Sequence[SweepRow], unit: PrivacyUnit) -> Table:
    """Return the settings of a sweep in their order, followed by the baselines."""
    cost_headers, cost_cells = cost_columns(points, unit)
    named = any(point.baseline for point in points)
    tuning = list(points[0].finetuning) if points else []
    measure, (spread_headers, spread_cells) = compared_by(points), _spread_columns(points)
    return Table(
        key="sweep",
        caption="All settings of the sweep; each private training was a separate release",
        headers=(
            *((Header("Model", numeric=False),) if named else ()),
            Header("Noise multiplier", "σ"),
            Header("Batch size", "expected units"),
            Header("Epochs"),
            *(Header(FINETUNING_TITLES[axis]) for axis in tuning),
            *((Header("ε_V", "vocabulary"),) if named else ()),
            Header("ε_T", f"training, per {unit}"),
            *cost_headers,
            Header(measure.column, measure.unit),
            *spread_headers,
            *(MASKED if measure.is_share else CAUSAL[:1]),
            Header("Exposure", "mean, bits"),
            Header("Exposure", "largest, bits"),
        ),
        rows=tuple(
            (
                *((name(_model_of(point)),) if named else ()),
                *_training_cells(point),
                *(number(point.finetuning[axis], Label.PUBLIC) for axis in tuning),
                *((number(point.epsilon_vocabulary, Label.PUBLIC),) if named else ()),
                number(point.epsilon_training, Label.PUBLIC),
                *cost_cells(point),
                measured(point.compared, percent=measure.is_share),
                *spread_cells(point),
                *(
                    map(percentage, (point.mlm_public, point.mlm_private))
                    if measure.is_share
                    else (measured(point.perplexity_public),)
                ),
                *_sweep_exposure_cells(point),
            )
            for point in points
        ),
        notes=(
            *_spread_notes(points),
            *exposure_notes([e for p in points for e in _audits(p)]),
            *((ONE_CHARGE, OF_ONE_TRAINING) if any(p.training_epochs for p in points) else ()),
            *((_OF_BASELINES,) if named else ()),
            *((_OF_OTHER_TOKENS,) if named and not measure.is_share else ()),
        ),
    )


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


def _model_of(point: SweepRow) -> str:
    return "with DP" if point.baseline is None else point.name.partition(" · ")[0]


def _training_cells(point: SweepRow) -> tuple[Cell, ...]:
    """Return σ, batch size and epochs of the training on private rows, if there was one."""
    settings = point.noise_multiplier, point.batch_size, point.epochs
    *others, epochs = (
        number(value, Label.PUBLIC) if value else Cell(NOT_MEASURED) for value in settings
    )
    whole = point.training_epochs
    return *others, replace(epochs, detail=f"of {significant(whole)} trained" if whole else "")


def _spread_columns(
    points: Sequence[SweepRow],
) -> tuple[tuple[Header, ...], Callable[[SweepRow], tuple[Cell, ...]]]:
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

    def cells(point: SweepRow) -> tuple[Cell, ...]:
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


def _spread_notes(points: Sequence[SweepRow]) -> tuple[str, ...]:
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


def _audits(point: SweepRow) -> tuple[Exposures, ...]:
    return point.exposures if isinstance(point.exposures, tuple) else ()


def _sweep_exposure_cells(point: SweepRow) -> tuple[Cell, Cell]:
    """Return the mean exposure over the setting's trainings, and the largest exposure."""
    if isinstance(point.exposures, Withheld):
        return withheld(), withheld()
    if not point.exposures:
        return Cell(NOT_MEASURED), Cell(NOT_MEASURED)
    label = point.exposures[0].label
    summaries = [summarise(exposures.rows) for exposures in point.exposures]
    mean = math.fsum(s.mean for s in summaries) / len(summaries)
    remembers = any(s.remembers for s in summaries)
    alarm = any(s.remembers and s.mean > s.mean_null_high for s in summaries)
    return (
        bits(mean, label, alarm=alarm),
        bits(max(s.largest for s in summaries), label, alarm=remembers),
    )
