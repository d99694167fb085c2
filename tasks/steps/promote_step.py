"""Promote a job's model, now that a person has read its verdict and approved."""

from __future__ import annotations

from dp_core.errors import BadInput
from tasks.context import StepContext, StepOutput
from tasks.evidence.audits import JUDGED, judge
from tasks.protocol.job import is_of_job
from tasks.protocol.specs import PromoteSpec


def run(spec: PromoteSpec, context: StepContext) -> StepOutput:
    """Judge the model of a report again, and give it the alias that its verdict allows.

    It is judged again because an audit may have contradicted it since the report was written.

    Raises:
        BadInput: the input is not the output of a job's report.
    """
    report = context.input(spec.report_uri)
    if report.result.step != "report" or report.facts.get("is_sweep"):
        raise BadInput("not a job's report", where="report_uri", fix="Give a report step's output.")
    models = {
        model["name"]: context.input(model["uri"])
        for model in report.facts[JUDGED]
        if is_of_job(model["name"])  # further trainings are only compared with it
    }
    judged = judge(context.store, models, "unaudited")
    for model in judged:
        model["tags"]["confide.approved"] = "by a person"
    return StepOutput(outputs={}, facts={JUDGED: judged})
