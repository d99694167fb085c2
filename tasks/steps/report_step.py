"""Collect the results of a job into one page, in two editions; judge and register its models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dp_core.audit.exposure import summarise
from dp_core.labels import Dp, Label, Labelled, Operator, Public
from tasks.context import StepArtifact, StepContext, StepOutput
from tasks.evidence.audits import JUDGED, judge
from tasks.protocol import ReportSpec, point_and_task
from tasks.releases.provenance import MODELS, operator_only
from tasks.report.comparison import FINETUNED
from tasks.report.job_results import Results, audit_time, job_report, released_by_job
from tasks.report.model import Edition, Exposures, Fact, ModelRow, edition_of, number_of
from tasks.report.page import job_page
from tasks.report.tables import closing_of

EDITIONS = {"report": Edition.PUBLISHABLE, "operator_report": Edition.OPERATOR}


def run(spec: ReportSpec, context: StepContext) -> StepOutput:
    """Write the public page and the operator's page, and return the closing table in the facts.

    The models are judged here, by the last step of the job, and registered with the verdict.
    """
    results = {name: context.input(uri) for name, uri in spec.results.items()}
    judged = _judged(spec, context, results)
    verdicts = (Fact("Audits", one["verdict"], Label.DP, one["sentence"]) for one in judged)
    report = job_report(spec, context, results)
    against = " ".join(one["sentence"] for one in judged if one["verdict"] == "contradicted")
    report = replace(report, training=(*report.training, *verdicts), against=against)
    for name, edition in EDITIONS.items():
        job_page(report, edition).write(context.out / name)
    shown = edition_of(report, Edition.PUBLISHABLE)
    # The job's run in MLflow has the figures of the model that the job trains, and the total cost
    # of all private models. Each model also has its own run, with the metrics of its steps.
    row = next(row for row in report.models if row.kind == "dp")
    context.measure_cost(released_by_job(results))
    if (share := audit_time(results)) is not None:
        context.measure("audit_time_over_training", share)
    for name, value in _headlines(row):
        context.measure(name, value)
    return StepOutput(
        outputs={name: name for name in EDITIONS},
        facts={
            "created": report.created,
            JUDGED: judged,
            "models": {
                name: uri
                for name, uri in spec.results.items()
                if results[name].result.step in MODELS
                and not operator_only(results[name].result.releases)
            },
            FINETUNED: {
                row.name: [{"uri": uri, "seed": "", "fold": 0, "start": ""}]
                for row in report.models
                if (uri := spec.results.get(f"{row.tasks}_finetuning"))
            },
            "table": closing_of(shown).to_json(),
        },
        artifacts=list(artifacts(context)),
    )


def _judged(spec: ReportSpec, context: StepContext, results: Results) -> list[dict[str, Any]]:
    """Judge the job's models; models of further private trainings are never promoted by rule."""
    more = {name for name in results if point_and_task(name)[0]}
    own = {name: one for name, one in results.items() if name not in more}
    others = {name: results[name] for name in results if name in more}
    return [
        *judge(context.store, own, spec.results, spec.promotion),
        *judge(context.store, others, spec.results, "approved"),
    ]


def artifacts(context: StepContext) -> Iterator[StepArtifact]:
    """Yield the pages and figures of both editions, each with the label of its edition."""
    labels = {"report": Label.DP, "operator_report": Label.OPERATOR}
    for name, label in labels.items():
        for file in sorted((context.out / name).iterdir()):
            yield StepArtifact(f"{name}/{file.name}", label, name)


def _headlines(row: ModelRow) -> Iterator[tuple[str, Labelled]]:
    """Yield the figures of a row with their labels, which decide where each figure is shown."""
    for name, value in (
        ("mlm_accuracy_public", row.mlm_public),
        ("mlm_accuracy_private", row.mlm_private),
        ("perplexity_public", row.perplexity_public),
        ("perplexity_private", row.perplexity_private),
        ("f1", row.f1),
        ("accuracy", row.accuracy),
    ):
        if isinstance(value, Dp | Public | Operator) and number_of(value) is not None:
            yield name, value
    if isinstance(row.exposures, Exposures):
        label = Operator if row.exposures.label is Label.OPERATOR else Dp
        summary = summarise(row.exposures.rows)
        yield "exposure", label(summary.mean)
        yield "exposure_largest", label(summary.largest)
