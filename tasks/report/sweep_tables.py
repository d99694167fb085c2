"""The points of a sweep as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from dp_core.audit.exposure import summarise
from dp_core.labels import Label, Labelled
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.training.bootstrap import MeanF1
from tasks.report.cells import (
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
    withheld,
)
from tasks.report.model import Exposures, SweepRow, Withheld, compared_by, measure_of
from tasks.report.tables import (
    CAUSAL,
    MASKED,
    OF_ONE_TRAINING,
    ONE_CHARGE,
    cost_columns,
    exposure_notes,
)

FINETUNING_TITLES = {  # of a sweep's axes
    "finetune_noise_multiplier": "Fine-tuning σ",
    "finetune_batch_size": "Fine-tuning batch",
    "finetune_epochs": "Fine-tuning epochs",
    "finetune_learning_rate": "Fine-tuning rate",
}


def sweep_table(points: Sequence[SweepRow], unit: PrivacyUnit) -> Table:
    """Return the settings of a sweep in its own order, and behind them its baselines."""
    cost_headers, cost_cells = cost_columns(points, unit)
    named = any(point.baseline for point in points)
    tuning = list(points[0].finetuning) if points else []
    measure, (spread_headers, spread_cells) = compared_by(points), _spread_columns(points)
    return Table(
        key="sweep",
        caption="Every setting of the sweep; each private training was a release of its own",
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
    "Models to compare with have no noise, and what anyone may see of them is charged nothing: "
    "public text only and checkpoints have a vocabulary of public text or their own (ε 0); "
    "“training” stands for one on the sweep's own vocabulary, which costs ε_V. What was trained "
    "without privacy, on exact private counts or the sweep's vocabulary, has no finite ε and "
    "stays with the operator. With another vocabulary there are other canaries."
)
_OF_OTHER_TOKENS = (
    "Perplexity is by token: on a vocabulary of its own (“public text only”, “without privacy”) it "
    "is of other tokens, and not to be compared with that on the sweep's."
)


def _model_of(point: SweepRow) -> str:
    return "with DP" if point.baseline is None else point.name.partition(" · ")[0]


def _training_cells(point: SweepRow) -> tuple[Cell, ...]:
    """Return what the training on private rows was told; a public model had none, and no σ."""
    told = point.noise_multiplier, point.batch_size, point.epochs
    *others, epochs = (
        number(value, Label.PUBLIC) if value else Cell(NOT_MEASURED) for value in told
    )
    whole = point.training_epochs
    return *others, replace(epochs, detail=f"of {significant(whole)} trained" if whole else "")


def _spread_columns(
    points: Sequence[SweepRow],
) -> tuple[tuple[Header, ...], Callable[[SweepRow], tuple[Cell, ...]]]:
    """Return the columns that say how sure a score is, where it was measured more than once.

    Deviations of shares are of points, as a percentage.
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
            "Perplexity is of text that no model trained on, less is better: the mean of up to "
            f"{most.seeds} trainings, each by a seed of its own, with Student's interval over "
            "them; what the trainings share (text, vocabulary, public pre-training) is not in it. "
            "ε in total is that of all trainings of a row.",
        )
    source = "of one fine-tuning"
    if most.replicates > 1:
        replicates = f"seeds: {most.seeds}, folds: {most.folds}"
        source = f"the mean of {most.replicates} fine-tunings ({replicates})"
    drawn = " and seeds" if most.seeds > 1 else ""
    told = (
        f"{measure_of(points).short} is {source}, its interval a bootstrap over test "
        f"documents{drawn}; what the trainings share (vocabulary, public pre-training) is not in "
        "it. ε in total is that of all trainings of a row.",
    )
    return (*told, _OF_THE_BEST) if any(point.best_three is not None for point in points) else told


_OF_THE_BEST = (
    "The mean of the three best seeds is what some papers report (Jagannatha et al. 2021): they "
    "are chosen by the test itself, so it is higher than what a training can be expected to give."
)


def _audits(point: SweepRow) -> tuple[Exposures, ...]:
    return point.exposures if isinstance(point.exposures, tuple) else ()


def _sweep_exposure_cells(point: SweepRow) -> tuple[Cell, Cell]:
    """Return the mean over the setting's trainings, and the largest of any of them."""
    if isinstance(point.exposures, Withheld):
        return withheld(), withheld()
    if not point.exposures:
        return Cell(NOT_MEASURED), Cell(NOT_MEASURED)
    label = point.exposures[0].label
    found = [summarise(one.rows) for one in point.exposures]
    mean = math.fsum(one.mean for one in found) / len(found)
    remembers = any(one.remembers for one in found)
    alarm = any(one.remembers and one.mean > one.mean_null_high for one in found)
    return (
        bits(mean, label, alarm=alarm),
        bits(max(one.largest for one in found), label, alarm=remembers),
    )
