"""What the tracker is told of a step: its settings, its numbers, its files, how it ended."""

from __future__ import annotations

import json
from pathlib import Path

from dp_core.labels import Label
from tasks.protocol import PretrainSpec, ReportSpec, StepResult, StepSpec, SweepReportSpec
from tasks.releases.statements import WORDS
from tasks.runtime.context import Artifact, labelled
from tasks.runtime.messages import say
from tasks.storage import Store
from tasks.tracking.mlflow import Tracker

LAST_STEPS = ("report", "sweep_report")


def record(
    tracker: Tracker, spec: StepSpec, store: Store, result: StepResult, *, point: bool
) -> None:
    """Tell the tracker what the result holds; what it knows already is not told twice."""
    told = spec.model_dump(mode="json", exclude={"settings", "results", "points", "charged"})
    tracker.settings(_flat(told))
    if isinstance(spec, ReportSpec | SweepReportSpec):
        tracker.settings(spec.settings, target="parent")
    if isinstance(spec, PretrainSpec) and spec.plan and point:  # by these, points are compared
        place = {"batch_size": spec.batch_size, "updates": spec.updates}
        tracker.settings({**place, "σ": spec.plan.noise_multiplier}, target="point")
    for metric in result.metrics:
        tracker.labelled(metric.name, labelled(metric), metric.step)
    above = "parent" if spec.step in LAST_STEPS else "point" if point else ""
    if above:
        for name, metric in {m.name: m for m in result.metrics}.items():
            tracker.labelled(name, labelled(metric), metric.step, target=above)
    for release in result.releases:
        tracker.dataset(release.dataset, release.ledger_id)
    artifacts = [Artifact(f, Label(label), d) for f, label, d in result.facts["artifacts"]]
    if artifacts or result.facts["model"]:
        folder = store.local_copy(spec.output)
        for artifact in artifacts:
            tracker.artifact(folder / artifact.file, artifact.label, artifact.folder)
            if spec.step in LAST_STEPS:  # the job's own page has its report and figures too
                tracker.artifact(
                    folder / artifact.file, artifact.label, artifact.folder, target="parent"
                )
        if result.facts["model"]:
            # Not all that is there: a local store is no copy, and has the operator's numbers too.
            _register(tracker, result, [folder / name for name in store.published(spec.output)])


def _register(tracker: Tracker, result: StepResult, files: list[Path]) -> None:
    (statement,) = (file.read_text() for file in files if file.name == WORDS)
    tags = {f"ledger.{i}": r.ledger_id for i, r in enumerate(result.releases)}
    tracker.model(result.facts["model"], files, statement, tags)


def end_tracking(tracker: Tracker, *, stopped: bool, goes_on: bool) -> None:
    """End the runs of a step that did not finish.

    Args:
        tracker: of the step.
        stopped: it was told to end, and with it the job; a retry makes both run again.
        goes_on: its time was up: it is started again at once.
    """
    if stopped or goes_on:
        tracker.leave("KILLED", also=("parent",) if stopped else ())
    else:
        tracker.finish("FAILED", also=("parent",))  # a retry makes it run again
        say_where(tracker)


def say_where(tracker: Tracker) -> None:
    """Name the run's page in a line of its own: Airflow makes a button of it."""
    if url := tracker.url():
        say(f"MLflow: {url}")


def _flat(values: dict[str, object], above: str = "") -> dict[str, bool | int | float | str]:
    flat: dict[str, bool | int | float | str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{above}{name}.")
        elif isinstance(value, bool | int | float | str):
            flat[f"{above}{name}"] = value
        else:
            flat[f"{above}{name}"] = json.dumps(value)
    return flat
