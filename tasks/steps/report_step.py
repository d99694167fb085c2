"""Collect the results of a job or a sweep into one page, in two editions; judge its models.

The report is the last step. It registers the models with the verdicts of their audits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dp_core.audit.exposure import summarise
from dp_core.errors import BadInput
from dp_core.labels import Dp, Label, Labelled, Operator, Public
from dp_core.privacy.statement import operator_only
from tasks.context import StepContext, StepOutput
from tasks.evidence.audits import JUDGED, judge
from tasks.protocol.job import is_of_job, names_of
from tasks.protocol.points import DP_MODEL
from tasks.protocol.specs import ReportSpec
from tasks.releases.provenance import MODELS, PRETRAINED
from tasks.report import job_results
from tasks.report.model import Edition, Fact, ModelRow, Report, edition_of, number_of
from tasks.report.models_table import model_runs, results_table
from tasks.report.page import report_page
from tasks.results import FINETUNED, MODEL_RUNS, read_result

EDITIONS = {"report": Edition.PUBLISHABLE, "operator_report": Edition.OPERATOR}


def run(spec: ReportSpec, context: StepContext) -> StepOutput:
    """Write the public page and the operator's page, and return the closing table in the facts.

    Raises:
        BadInput: no model, or in a job not the model with DP, has all its results.
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
        raise BadInput("no model has finished", where=spec.title, fix="See why the steps failed.")
    models = {
        names_of(spec.points[name])[task]: output
        for name, results in points.items()
        for task, output in results.items()
        if output.result.step in (PRETRAINED if spec.is_sweep else MODELS)
        and not operator_only(output.result.releases)
    }
    judged = _judged(spec, context, models)
    if spec.is_sweep:
        context.measure("points", Public(len(points)), len(points))
        report = job_results.sweep_report(spec, context, points, missing)
    else:
        report = _job(spec, context, points, missing, judged)
    # The total cost of releasing all models. A later attempt with more models overrides it.
    context.measure_cost(job_results.released_by(spec, points))
    artifacts: dict[str, Label] = {}
    for name, edition in EDITIONS.items():
        report_page(report, edition).write(context.out / name)
        label = Label.OPERATOR if edition is Edition.OPERATOR else Label.DP
        files = sorted((context.out / name).iterdir())
        artifacts |= {f"{name}/{file.name}": label for file in files}
    (context.out / MODEL_RUNS).write_text(json.dumps(model_runs(spec, report, points, judged)))
    facts = {
        JUDGED: judged,
        FINETUNED: job_results.finetuned_by_setting(spec, list(points)),
        "created": report.created,
        "models": {name: spec.results[name] for name in models},
        "table": results_table(edition_of(report, Edition.PUBLISHABLE)).to_json(),
        "missing": missing,
        "is_sweep": spec.is_sweep,
    }
    return StepOutput(outputs={name: name for name in EDITIONS}, facts=facts, artifacts=artifacts)


def _job(
    spec: ReportSpec,
    context: StepContext,
    points: Mapping[str, job_results.Results],
    missing: list[str],
    judged: list[dict[str, Any]],
) -> Report:
    """Return the report of a job; measure the figures of the model that the job trains with DP.

    Each model also has its own run in MLflow, with the metrics of its steps.
    """
    report = job_results.job_report(spec, context, points, missing)
    verdicts = (Fact("Audits", model["verdict"], Label.DP, model["sentence"]) for model in judged)
    against = " ".join(model["sentence"] for model in judged if model["verdict"] == "contradicted")
    if (share := job_results.audit_time(points.values())) is not None:
        context.measure("audit_time_over_training", share)
    for name, value in _headlines(next(row for row in report.models if row.name == DP_MODEL.name)):
        context.measure(name, value)
    return replace(report, training=(*report.training, *verdicts), against=against)


def _steps_of(spec: ReportSpec, name: str) -> dict[str, str]:
    """Return the names of a model's steps by task."""
    names = names_of(spec.points[name])
    return {task: step for task, step in names.items() if step in spec.results}


def _opened(spec: ReportSpec, context: StepContext, name: str) -> job_results.Results:
    """Return a model's results; releases without privacy in a baseline are not counted.

    The report publishes nothing that was computed without privacy.
    """
    steps = _steps_of(spec, name)
    opened = {task: context.beside(spec.results[step]) for task, step in steps.items()}
    for output in opened.values():
        if spec.points[name].baseline is None or not operator_only(output.result.releases):
            context.descends_from(*output.result.releases)
    return opened


def _judged(
    spec: ReportSpec, context: StepContext, models: job_results.Results
) -> list[dict[str, Any]]:
    """Judge the models; the rule promotes only those that have all settings of their job.

    An audit does not choose between the points of a sweep, and further trainings are only compared.
    """
    of_job = {name: output for name, output in models.items() if is_of_job(name)}
    others = {name: output for name, output in models.items() if name not in of_job}
    return [
        *judge(context.store, of_job, spec.promotion),
        *judge(context.store, others, "approved"),
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
        yield "exposure_largest", label(summary.largest.exposure)
