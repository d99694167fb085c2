"""Cost, usefulness and memory of each model or setting, in tables and in MLflow's list."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter, methodcaller
from typing import Any

from dp_core.audit.exposure import summarise
from dp_core.labels import Dp, Label, Labelled, Operator, Public
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.statement import DatasetTotal, operator_only, privacy_statement
from dp_core.training.bootstrap import MeanF1
from tasks.protocol.job import names_of
from tasks.protocol.messages import MetricRecord
from tasks.protocol.specs import ReportSpec
from tasks.report.job_results import Results, released_models, releases_of
from tasks.report.model import (
    ACCURACY,
    F1,
    MASKED,
    PERPLEXITY,
    WORDS,
    Cost,
    Exposures,
    Measure,
    ModelRow,
    Report,
    Withheld,
    measure_of,
    number_of,
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
from tasks.tracking.event_log import rounded

Column = tuple[Header, Callable[[ModelRow], Cell]]


def results_table(report: Report) -> Table:
    """Return the table of an edition's models, with the result of the audits as first line."""
    table = models_table(report.models, report.unit, is_sweep=report.is_sweep)
    audit = report.audit
    finding = "" if audit is None else f"{audit.verdict}. {audit.finding}"
    lead = report.against or (finding and f"Audit of the private training: {finding}")
    return replace(table, lead=lead)


def models_table(models: Sequence[ModelRow], unit: PrivacyUnit, *, is_sweep: bool = False) -> Table:
    """Return cost, scores and exposure of each model, in their order.

    Causal models have perplexities instead of masked-token accuracies. Without fine-tuning there
    is no column of scores.

    Args:
        models: models of a job, or settings of a sweep followed by baselines.
        unit: the privacy unit of the private corpus.
        is_sweep: also show the settings of each model.
    """
    measure = measure_of(models)
    named = not is_sweep or any(model.baseline for model in models)
    title = _model_of if is_sweep else attrgetter("name")
    predictions = _CAUSAL if any(model.is_causal for model in models) else _MASKED
    divided = any(model.development is not None for model in models)
    columns: list[Column] = []
    if named:
        columns.append((Header("Model", numeric=False), lambda model: name(title(model))))
    if is_sweep:
        columns += _settings_columns(models)
    if named:
        columns.append((Header("ε_V", "vocabulary"), lambda m: _public(m.epsilon_vocabulary)))
    columns += [
        (Header("ε_T", "training"), lambda model: _public(model.epsilon_training)),
        *cost_columns(models, unit),
        *predictions[: 1 if measure in (PERPLEXITY, MASKED) else 2],
        *((_DEVELOPMENT,) if measure in (F1, ACCURACY) and divided else ()),
        (
            Header(measure.column, measure.unit),
            lambda model: measured(measure.of(model), percent=measure.is_share),
        ),
        *_spread_columns(models),
        (_EXPOSURES[0], lambda model: _exposure_cells(model.exposures)[0]),
        (_EXPOSURES[1], lambda model: _exposure_cells(model.exposures)[1]),
    ]
    words = WORDS["notes"]
    return Table.of(
        "sweep" if is_sweep else "closing",
        (tuple(cell(model) for _, cell in columns) for model in models),
        (header for header, _ in columns),
        (
            *_spread_notes(models),
            *exposure_notes([exposures for model in models for exposures in model.audits]),
            *(_OF_KEPT_MODELS if any(m.training_epochs for m in models) else ()),
            *((words["baselines"],) if is_sweep and named else ()),
            *((words["other_tokens"],) if is_sweep and named and measure.by_token else ()),
        ),
    )


def _public(value: float) -> Cell:
    return number(value, Label.PUBLIC)


_MASKED: tuple[Column, ...] = (
    (Header("MLM accuracy", "public text, %"), lambda model: percentage(model.mlm_public)),
    (Header("MLM accuracy", "private text, %"), lambda model: percentage(model.mlm_private)),
)
_CAUSAL: tuple[Column, ...] = (
    (Header("Perplexity", "public text, by token"), lambda m: measured(m.perplexity_public)),
    (Header("Perplexity", "private text, by token"), lambda m: measured(m.perplexity_private)),
)
_DEVELOPMENT: Column = (
    Header("MLM accuracy", MASKED.on_development_part.unit),
    lambda model: percentage(model.development),
)
_EXPOSURES = Header("Exposure", "mean, bits"), Header("Exposure", "largest, bits")
_OF_KEPT_MODELS = (WORDS["notes"]["one_charge"], WORDS["notes"]["one_training"])


def _settings_columns(points: Sequence[ModelRow]) -> Iterator[Column]:
    """Yield the settings of the training, if there was one, and of fine-tuning that vary."""

    def setting(value: float, detail: str = "") -> Cell:
        return replace(_public(value) if value else Cell(NOT_MEASURED), detail=detail)

    def epochs(point: ModelRow) -> Cell:
        whole = point.training_epochs
        return setting(point.epochs, f"of {significant(whole)} trained" if whole else "")

    yield Header("Noise multiplier", "σ"), lambda point: setting(point.noise_multiplier)
    yield Header("Batch size", "expected units"), lambda point: setting(point.batch_size)
    yield Header("Epochs"), epochs
    yield from map(_finetuning_column, points[0].finetuning if points else ())


def _finetuning_column(axis: str) -> Column:
    return Header(WORDS["axes"][axis][0]), lambda point: _public(point.finetuning[axis])


def _model_of(point: ModelRow) -> str:
    return "with DP" if point.baseline is None else point.name.partition(" · ")[0]


def cost_columns(rows: Sequence[ModelRow], unit: PrivacyUnit) -> Iterator[Column]:
    """Yield the columns of the total costs.

    Each budget has separate columns, because a sum over budgets guarantees nothing.
    """
    if any(row.pretrained.corpus.epsilon != row.cost.corpus.epsilon for row in rows):
        yield Header("ε", "before fine-tuning"), lambda row: total(row.pretrained.corpus.epsilon)
    yield from _columns_of(attrgetter("corpus"), f"in total, per {unit}", "in total")
    others = {other.dataset: other for row in rows for other in row.cost.others}
    for title, other in others.items():
        per = "" if other.unit is None else f", per {other.unit}"
        total_of = methodcaller("other", {*other.datasets})
        yield from _columns_of(total_of, f"of “{title}”{per}", f"of “{title}”")


def _columns_of(
    total_of: Callable[[Cost], DatasetTotal], epsilon_of: str, delta_of: str
) -> Iterator[Column]:
    """Yield the columns of the totals of one budget."""
    yield Header("ε", epsilon_of), lambda row: total(total_of(row.cost).epsilon)
    yield Header("δ", delta_of), lambda row: _delta(total_of(row.cost))


def _delta(of_dataset: DatasetTotal) -> Cell:
    finite = of_dataset.epsilon is not None and math.isfinite(of_dataset.epsilon)
    return number(of_dataset.delta, Label.PUBLIC, 2) if finite else Cell(NOT_MEASURED)


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
        bits(max(s.largest.exposure for s in summaries), label, alarm=remembers),
    )


def exposure_notes(shown: Sequence[Exposures]) -> tuple[str, ...]:
    """Return the notes of a table of exposures."""
    if not shown:
        return ()
    summary = summarise(shown[0].rows)
    ceiling = math.log2(shown[0].rows[0].candidates)
    return (WORDS["notes"]["exposure"].format(summary=summary, ceiling=ceiling),)


def _spread_columns(points: Sequence[ModelRow]) -> Iterator[Column]:
    """Yield the columns of intervals and deviations of scores.

    Deviations of shares are in percentage points.
    """
    measure = measure_of(points)
    short, share = measure.short, measure.is_share

    def column(unit: str, figure: str) -> Column:
        def shown(point: ModelRow) -> Cell:
            score = measure.of(point)
            if not isinstance(point.spread, MeanF1) or not isinstance(score, Labelled):
                return Cell(NOT_MEASURED) if point.spread is None else withheld()
            value = getattr(point.spread, figure)
            if isinstance(value, tuple):
                return span_cell(value, score.label, percent=share)
            return measured(None if value is None else type(score)(value), percent=share)

        return Header(short, unit), shown

    known = [point.spread for point in points if isinstance(point.spread, MeanF1)]
    if known:
        yield column("95% interval", "interval")
    if any(spread.seeds > 1 for spread in known):
        yield column("SD over seeds", "seed_deviation")
    if any(spread.folds > 1 for spread in known):
        yield column("SD over folds", "fold_deviation")
    if any(isinstance(point.best_three, Labelled) for point in points):
        yield Header(short, "three best seeds, %"), lambda point: percentage(point.best_three)


def _spread_notes(points: Sequence[ModelRow]) -> tuple[str, ...]:
    seen = [point.spread for point in points if isinstance(point.spread, MeanF1)]
    if not seen:
        return ()
    most = max(seen, key=lambda spread: spread.replicates)
    measure, words = measure_of(points), WORDS["notes"]
    if measure.by_token:
        return (words["spread_by_token"].format(measure=measure, most=most),)
    source = words["mean_score" if most.replicates > 1 else "one_score"].format(most=most)
    over_seeds = ", with Student's t over seeds" if most.seeds > 1 else ""
    note = words["spread"].format(measure=measure, source=source, over_seeds=over_seeds)
    best = any(point.best_three is not None for point in points)
    return (note, words["best_three"]) if best else (note,)


def by_epoch_table(rows: Sequence[ModelRow], unit: PrivacyUnit, measure: Measure = F1) -> Table:
    """Return scores and exposures by epoch, in the form of Jagannatha et al. 2021, Table 5."""
    costs = list(cost_columns(rows, unit))
    epochs = sorted({row.epochs for row in rows})
    trainings: dict[str, dict[float, ModelRow]] = {}
    for row in rows:
        trainings.setdefault(row.name, {})[row.epochs] = row
    table_rows = []
    for training, by_epoch in trainings.items():
        last = by_epoch[max(by_epoch)]
        models = [by_epoch.get(epoch) for epoch in epochs]
        scores = [percentage(model.score) if model else Cell(NOT_MEASURED) for model in models]
        exposures = [_exposure_cells(model.exposures if model else ()) for model in models]
        figures = [
            (name(measure.column, measure.unit), scores),
            *(
                (name(header.name, header.unit), list(cells))
                for header, cells in zip(_EXPOSURES, zip(*exposures, strict=True), strict=True)
            ),
        ]
        table_rows += [
            (name(training), figure, *(cost(last) for _, cost in costs), *cells)
            for figure, cells in figures
            if any(cell.text != NOT_MEASURED for cell in cells)
        ]
    headers = (*(header for header, _ in costs), *(Header(f"Epoch {e:g}") for e in epochs))
    return Table.of("by_epoch", table_rows, headers, _OF_KEPT_MODELS if rows else ())


# --- the rows of models in MLflow's list of runs


def model_runs(
    spec: ReportSpec,
    report: Report,
    points: Mapping[str, Results],
    judged: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return one JSON object for each model of a job, or for each setting of a sweep.

    Args:
        spec: the spec of the report.
        report: the report, which has a row for each of these models.
        points: outputs of the finished models, by name.
        judged: verdicts of audits (`tasks/evidence/audits.py`).

    Returns:
        The `model`, its `replicates` over seeds and folds, its `name` in the list, whether it
        `holds_job` (the job's shared steps), its `numbers`, `verdict` and `description`.
    """
    first = next((row for row in report.models if row.kind == "dp"), report.models[0])
    runs = []
    for row in report.models:
        of_row = {n: r for n, r in points.items() if spec.points[n].setting.name == row.name}
        steps = {step for name in of_row for step in names_of(spec.points[name]).values()}
        verdicts = [verdict for verdict in judged if verdict["name"] in steps]
        # The models of a row have several verdicts; a contradiction is the verdict on the row.
        verdicts.sort(key=lambda verdict: verdict["verdict"] != "contradicted")
        runs.append(
            {
                "model": row.name,
                "replicates": [name for name in of_row if name != row.name],
                "name": f"{row.name} · {_epsilon_in_words(row)} · {report.private_dataset}",
                "holds_job": row is first,
                "numbers": [number.model_dump() for number in _numbers(row)],
                "verdict": verdicts[0]["verdict"] if verdicts else "not judged",
                "description": "\n\n".join(
                    [
                        *(v["sentence"] for v in verdicts[:1]),
                        _statement_in_words(of_row, report.made_up),
                    ]
                ),
            }
        )
    return runs


def _epsilon_in_words(row: ModelRow) -> str:
    if row.cost.infinite:
        return "ε ∞"
    epsilon = row.cost.corpus.epsilon
    return "no total ε" if epsilon is None else f"ε {_record('epsilon', Public(epsilon)).value:g}"


def _statement_in_words(models: Mapping[str, Results], made_up: bool) -> str:
    """Return the privacy statement of the models of one row in words."""
    if any(operator_only(results["pretraining"].result.releases) for results in models.values()):
        return str(WORDS["notes"]["not_private"])
    releases = releases_of(
        model
        for results in models.values()
        for model in released_models(results["pretraining"], results.get("finetuning"))
    )
    paragraphs = privacy_statement(releases, made_up=made_up).paragraphs
    # The report lists the releases and the assumptions of the statement.
    return "\n\n".join(text for text in paragraphs if text[0] != "•" and text[-1] != ":")


def _numbers(row: ModelRow) -> Iterator[MetricRecord]:
    """Yield the cost, scores with intervals, and exposure of a row."""
    totals = [("", row.cost.corpus)]
    if row.cost.others:
        totals += [(f"/{cost.dataset}", cost) for cost in (row.cost.corpus, *row.cost.others)]
    for suffix, cost in totals:
        if cost.epsilon is not None and math.isfinite(cost.epsilon):
            yield _record(f"epsilon{suffix}", Public(cost.epsilon))
            yield _record(f"delta{suffix}", Public(cost.delta))
    for metric, value in (*row.scores.items(), *_ends_of_interval(row)):
        if isinstance(value, Dp | Public | Operator) and number_of(value) is not None:
            yield _record(metric, value)
    if row.audits:
        label = Operator if any(a.label is Label.OPERATOR for a in row.audits) else Dp
        summaries = [summarise(exposures.rows) for exposures in row.audits]
        mean = math.fsum(summary.mean for summary in summaries) / len(summaries)
        yield _record("exposure", label(mean))
        yield _record(
            "exposure_largest", label(max(summary.largest.exposure for summary in summaries))
        )


def _ends_of_interval(row: ModelRow) -> Iterator[tuple[str, Labelled]]:
    """Yield the interval of the mean score over seeds and folds."""
    interval, compared = getattr(row.spread, "interval", None), measure_of([row]).of(row)
    for metric, value in row.scores.items():
        if interval and value is compared and isinstance(value, Dp | Public | Operator):
            yield f"{metric}_low", type(value)(interval[0])
            yield f"{metric}_high", type(value)(interval[1])


def _record(metric: str, value: Labelled) -> MetricRecord:
    return rounded(MetricRecord(name=metric, value=value.value, label=value.label.value, step=0))
