"""Collect the results of a job or a sweep into one page, in two editions; judge its models.

The report is the last step. It registers the models with the verdicts of their audits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dp_core.audit.exposure import summarise
from dp_core.errors import BadInput
from dp_core.labels import Dp, Label, Labelled, Operator, Public
from tasks.context import StepContext, StepOutput
from tasks.evidence.audits import JUDGED, judge
from tasks.protocol import ReportSpec, names_of, point_and_task
from tasks.releases.provenance import MODELS, PRETRAINED, operator_only
from tasks.report.job_results import (
    Results,
    audit_time,
    finetuned_by_setting,
    job_report,
    released_by_job,
    released_by_sweep,
    sweep_report,
)
from tasks.report.model import Edition, Fact, ModelRow, Report, edition_of, number_of
from tasks.report.models_table import results_table
from tasks.report.page import report_page
from tasks.results import FINETUNED, read_result

EDITIONS = {"report": Edition.PUBLISHABLE, "operator_report": Edition.OPERATOR}


def run(spec: ReportSpec, context: StepContext) -> StepOutput:
    """Write the public page and the operator's page, and return the closing table in the facts.

    Raises:
        BadInput: a result of a job is missing, or no point of a sweep has all its results.
    """
    report, results, facts = (_sweep if spec.points else _job)(spec, context)
    artifacts: dict[str, Label] = {}
    for name, edition in EDITIONS.items():
        report_page(report, edition).write(context.out / name)
        label = Label.OPERATOR if edition is Edition.OPERATOR else Label.DP
        files = sorted((context.out / name).iterdir())
        artifacts |= {f"{name}/{file.name}": label for file in files}
    released = PRETRAINED if spec.points else MODELS
    facts |= {
        "created": report.created,
        "models": {
            name: spec.results[name]
            for name, output in results.items()
            if output.result.step in released and not operator_only(output.result.releases)
        },
        "table": results_table(edition_of(report, Edition.PUBLISHABLE)).to_json(),
    }
    return StepOutput(outputs={name: name for name in EDITIONS}, facts=facts, artifacts=artifacts)


def _job(spec: ReportSpec, context: StepContext) -> tuple[Report, Results, dict[str, Any]]:
    """Return the report of a job, the results of its steps, and facts about its models."""
    results = {name: context.input(uri) for name, uri in spec.results.items()}
    judged = _judged(spec, context, results)
    verdicts = (Fact("Audits", one["verdict"], Label.DP, one["sentence"]) for one in judged)
    report = job_report(spec, context, results)
    against = " ".join(one["sentence"] for one in judged if one["verdict"] == "contradicted")
    report = replace(report, training=(*report.training, *verdicts), against=against)
    # The job's run in MLflow has the figures of the model that the job trains, and the total cost
    # of all private models. Each model also has its own run, with the metrics of its steps.
    row = next(row for row in report.models if row.kind == "dp")
    context.measure_cost(released_by_job(results))
    if (share := audit_time(results)) is not None:
        context.measure("audit_time_over_training", share)
    for name, value in _headlines(row):
        context.measure(name, value)
    facts = {
        JUDGED: judged,
        FINETUNED: {
            row.name: [{"uri": uri, "seed": "", "fold": 0, "start": ""}]
            for row in report.models
            if (uri := spec.results.get(f"{row.tasks}_finetuning"))
        },
    }
    return report, results, facts


def _sweep(spec: ReportSpec, context: StepContext) -> tuple[Report, Results, dict[str, Any]]:
    """Return the report of a sweep, the results of its finished points, and facts as `_job`.

    Raises:
        BadInput: no point has all its results.
    """
    missing = [
        name
        for name in spec.points
        if any(
            read_result(context.store, spec.results[step]) is None
            for step in _steps_of(spec, name).values()
        )
    ]
    points = {name: _opened(spec, context, name) for name in spec.points if name not in missing}
    if not points:
        raise BadInput("no point has finished", where="sweep", fix="See why the points failed.")
    report = sweep_report(spec, context, points, missing)
    # The total cost of releasing every point. A later attempt with more points overrides it.
    context.measure_cost(released_by_sweep(spec, points))
    context.measure("points", Public(len(points)), len(points))
    results = {
        step: points[name][task] for name in points for task, step in _steps_of(spec, name).items()
    }
    trained = {
        name: output
        for name, output in results.items()
        if point_and_task(name)[1] == "pretraining" and not operator_only(output.result.releases)
    }
    facts = {
        JUDGED: _judged(spec, context, trained),
        FINETUNED: finetuned_by_setting(spec, list(points)),
        "missing": missing,
    }
    return report, results, facts


def _steps_of(spec: ReportSpec, name: str) -> dict[str, str]:
    """Return the names of a point's steps by task."""
    names = names_of(spec.points[name])
    return {task: step for task, step in names.items() if step in spec.results}


def _opened(spec: ReportSpec, context: StepContext, name: str) -> Results:
    """Return a point's results; releases without privacy in a baseline are not counted.

    The report publishes nothing that was computed without privacy.
    """
    steps = _steps_of(spec, name)
    opened = {task: context.beside(spec.results[step]) for task, step in steps.items()}
    for output in opened.values():
        if spec.points[name].baseline is None or not operator_only(output.result.releases):
            context.descends_from(*output.result.releases)
    return opened


def _judged(spec: ReportSpec, context: StepContext, results: Results) -> list[dict[str, Any]]:
    """Judge the models. No rule promotes a point's model, because an audit does not choose one."""
    points = {name for name in results if point_and_task(name)[0]}
    own = {name: output for name, output in results.items() if name not in points}
    others = {name: results[name] for name in results if name in points}
    return [
        *judge(context.store, own, spec.results, spec.promotion),
        *judge(context.store, others, spec.results, "approved"),
    ]


def _headlines(row: ModelRow) -> Iterator[tuple[str, Labelled]]:
    """Yield the figures of a row with their labels, which decide where each figure is shown."""
    for name, value in row.scores.items():
        if isinstance(value, Dp | Public | Operator) and number_of(value) is not None:
            yield name, value
    for exposures in row.audits:
        label = Operator if exposures.label is Label.OPERATOR else Dp
        summary = summarise(exposures.rows)
        yield "exposure", label(summary.mean)
        yield "exposure_largest", label(summary.largest)
