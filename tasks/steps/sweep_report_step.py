"""Collect the results of a sweep: ε, F1 and exposure by its settings (Figs. 1 and 2)."""

from __future__ import annotations

from dp_core.errors import BadInput
from dp_core.labels import Public
from tasks.context import StepContext, StepOutput
from tasks.evidence.audits import JUDGED, judge
from tasks.protocol import SweepReportSpec
from tasks.releases.provenance import operator_only
from tasks.report.comparison import FINETUNED
from tasks.report.model import Edition, edition_of
from tasks.report.page import sweep_page
from tasks.report.sweep_results import finetuned_by_setting, released_by_sweep, sweep_report
from tasks.report.sweep_tables import sweep_table
from tasks.results import Input, read_result
from tasks.steps.report_step import EDITIONS, artifacts


def run(spec: SweepReportSpec, context: StepContext) -> StepOutput:
    """Write both editions of the sweep's page, and return the table of its points in the facts.

    Raises:
        BadInput: no point has all its results.
    """
    missing = [
        name
        for name, tasks in spec.results.items()
        if any(read_result(context.store, uri) is None for uri in tasks.values())
    ]
    points = {name: _opened(spec, context, name) for name in spec.results if name not in missing}
    if not points:
        raise BadInput("no point has finished", where="sweep", fix="See why the points failed.")
    report = sweep_report(spec, context, points, missing)
    for name, edition in EDITIONS.items():
        sweep_page(report, edition).write(context.out / name)
    shown = edition_of(report, Edition.PUBLISHABLE)
    # The total cost of releasing every point. A later attempt with more points overrides it.
    context.measure_cost(released_by_sweep(spec, points))
    context.measure("points", Public(len(points)), len(points))
    # Models by training: points that differ only in fine-tuning share one model.
    models = {
        spec.points[name].training.name: name
        for name, results in points.items()
        if not operator_only(results["pretraining"].result.releases)
    }
    return StepOutput(
        outputs={name: name for name in EDITIONS},
        facts={
            "created": report.created,
            # Tagged with their verdicts; an audit does not choose which one to promote.
            JUDGED: judge(
                context.store,
                {model: points[name]["pretraining"] for model, name in models.items()},
                {model: spec.results[name]["pretraining"] for model, name in models.items()},
                "approved",
            ),
            "models": {model: spec.results[name]["pretraining"] for model, name in models.items()},
            FINETUNED: finetuned_by_setting(spec, list(points)),
            "table": sweep_table(shown.points, shown.unit).to_json(),
            "missing": missing,
        },
        artifacts=list(artifacts(context)),
    )


def _opened(spec: SweepReportSpec, context: StepContext, name: str) -> dict[str, Input]:
    """Return a point's results; releases without privacy in a baseline are not counted.

    The report publishes nothing that was computed without privacy.
    """
    found = {task: context.beside(uri) for task, uri in spec.results[name].items()}
    for one in found.values():
        if spec.points[name].baseline is None or not operator_only(one.result.releases):
            context.descends_from(*one.result.releases)
    return found
