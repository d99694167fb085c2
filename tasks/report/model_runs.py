"""The rows of models in MLflow's list of runs: names, rounded numbers, verdicts, descriptions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dp_core.audit.exposure import summarise
from dp_core.labels import Dp, Label, Labelled, Operator, Public
from dp_core.privacy.statement import privacy_statement
from tasks.protocol.job import names_of
from tasks.protocol.messages import MetricRecord
from tasks.protocol.specs import ReportSpec
from tasks.releases.provenance import operator_only
from tasks.report.job_results import Results, released_models, releases_of
from tasks.report.model import ModelRow, Report, measure_of, number_of
from tasks.tracking.event_log import rounded

_NOT_PRIVATE = (
    "Trained on private text without privacy. Only the operator of the data may have this model."
)


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
                "name": f"{row.name} · {_epsilon(row)} · {report.private_dataset}",
                "holds_job": row is first,
                "numbers": [number.model_dump() for number in _numbers(row)],
                "verdict": verdicts[0]["verdict"] if verdicts else "not judged",
                "description": "\n\n".join(
                    [*(v["sentence"] for v in verdicts[:1]), _statement(of_row, report.made_up)]
                ),
            }
        )
    return runs


def _epsilon(row: ModelRow) -> str:
    if row.cost.infinite:
        return "ε ∞"
    epsilon = row.cost.corpus.epsilon
    return "no total ε" if epsilon is None else f"ε {_record('epsilon', Public(epsilon)).value:g}"


def _statement(models: Mapping[str, Results], made_up: bool) -> str:
    """Return the privacy statement of the models of one row in words."""
    if any(operator_only(results["pretraining"].result.releases) for results in models.values()):
        return _NOT_PRIVATE
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
    several = len((row.cost.corpus, *row.cost.others)) > 1
    for position, total in enumerate((row.cost.corpus, *row.cost.others)):
        for suffix in [""] * (not position) + [f"/{total.dataset}"] * several:
            if total.epsilon is not None and math.isfinite(total.epsilon):
                yield _record(f"epsilon{suffix}", Public(total.epsilon))
                yield _record(f"delta{suffix}", Public(total.delta))
    for name, value in (*row.scores.items(), *_interval(row)):
        if isinstance(value, Dp | Public | Operator) and number_of(value) is not None:
            yield _record(name, value)
    if row.audits:
        label = Operator if any(a.label is Label.OPERATOR for a in row.audits) else Dp
        summaries = [summarise(exposures.rows) for exposures in row.audits]
        mean = math.fsum(summary.mean for summary in summaries) / len(summaries)
        yield _record("exposure", label(mean))
        yield _record("exposure_largest", label(max(summary.largest for summary in summaries)))


def _interval(row: ModelRow) -> Iterator[tuple[str, Labelled]]:
    """Yield the interval of the mean score over seeds and folds."""
    interval, compared = getattr(row.spread, "interval", None), measure_of([row]).of(row)
    for name, value in row.scores.items():
        if interval and value is compared and isinstance(value, Dp | Public | Operator):
            yield f"{name}_low", type(value)(interval[0])
            yield f"{name}_high", type(value)(interval[1])


def _record(name: str, value: Labelled) -> MetricRecord:
    return rounded(MetricRecord(name=name, value=value.value, label=value.label.value, step=0))
