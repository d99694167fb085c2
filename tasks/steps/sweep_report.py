"""Gather the results of a sweep: ε and F1 against noise, batch size and epochs (Fig. 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dp_core.errors import BadInput
from dp_core.labels import Labelled, Public
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.protocol import ReleaseRecord, SweepReportSpec
from tasks.releases.statements import statement_of
from tasks.report import results as reporting
from tasks.report.model import Edition, SweepReport, SweepRow, sweep_edition
from tasks.report.page import sweep_page
from tasks.report.tables import sweep_table
from tasks.runtime.context import Input, StepContext, StepOutput, merged, read_result
from tasks.steps.model_kinds import in_words
from tasks.steps.report import EDITIONS, artifacts, released


def run(spec: SweepReportSpec, bench: StepContext) -> StepOutput:
    """Write both editions of the sweep's page; hand the table of its points on.

    Raises:
        BadInput: not one point has all its results.
    """
    missing = [name for name, tasks in spec.results.items() if not _finished(bench, tasks)]
    points = {
        name: {task: bench.input(uri) for task, uri in tasks.items()}
        for name, tasks in spec.results.items()
        if name not in missing
    }
    if not points:
        raise BadInput("no point has finished", where="sweep", fix="See why the points failed.")
    report = _report(spec, bench, points, missing)
    for name, edition in EDITIONS.items():
        sweep_page(report, edition).write(bench.out / name)
    for metric, value in _headlines(points, report):
        bench.measure(metric, value, len(points))  # of a later try with more points, it is the last
    shown = sweep_edition(report, Edition.PUBLISHABLE)
    return StepOutput(
        outputs={name: name for name in EDITIONS},
        facts={
            "created": report.created,
            "models": {name: spec.results[name]["dp_pretraining"] for name in points},
            "table": sweep_table(shown.points, shown.unit).to_json(),
            "missing": missing,
        },
        artifacts=list(artifacts(bench)),
    )


def _finished(bench: StepContext, tasks: dict[str, str]) -> bool:
    return all(read_result(bench.store, uri) is not None for uri in tasks.values())


def _report(
    spec: SweepReportSpec,
    bench: StepContext,
    points: dict[str, dict[str, Input]],
    missing: list[str],
) -> SweepReport:
    first = next(iter(points.values()))
    vocabulary, dp = first["vocabulary"], first["dp_pretraining"]
    unit = PrivacyUnit(vocabulary.facts["unit"])
    public, entities = reporting.source_names(spec.settings)
    releases = _released(points)
    return SweepReport(
        title=spec.title,
        run_key=bench.context.run_key,
        shown_run=bench.tracker.shown_run,
        created=reporting.now(),
        made_up=spec.made_up,
        known_seed=any(r.seed_known for r in releases),
        private_dataset=vocabulary.facts["dataset"],
        public_dataset=public,
        entities_dataset=entities,
        unit=unit,
        declared_units=vocabulary.facts["declared_units"],
        model_size=in_words(dp),
        statement=statement_of(releases, made_up=spec.made_up),
        points=tuple(_row(spec, name, tasks) for name, tasks in points.items()),
        ledger=reporting.ledger_view(bench, vocabulary.facts["dataset"], unit),
        settings=spec.settings,
        versions=dp.result.versions,
        public_seeds={"seed": int(spec.settings["seed"])},
        repeat=(reporting.repeat_command(spec.title, spec.settings),),
        notes=tuple(f"Not here, as it did not finish: {name}." for name in missing),
    )


def _row(spec: SweepReportSpec, name: str, tasks: dict[str, Input]) -> SweepRow:
    model = tasks["dp_pretraining"]
    place = model.facts.get("chosen") or spec.points[name]  # of a selection: which one won
    dataset, tuned = tasks["vocabulary"].facts["dataset"], tasks["dp_finetuning"]
    pretrained = reporting.cost(dataset, model, tasks["dp_exposure"])
    whole = reporting.cost(dataset, model, tasks["dp_exposure"], tuned)
    training = model.facts["epsilon_training"]
    values = reporting.last_values(model.result)
    return SweepRow(
        name=name,
        noise_multiplier=place["noise_multiplier"],
        batch_size=int(place["batch_size"]),
        epochs=place["epochs"],
        epsilon_training=math.inf if training is None else training,
        epsilon_total=whole.corpus.epsilon,
        delta=whole.corpus.delta,
        others=whole.others,
        untuned=pretrained if whole != pretrained else None,
        f1=reporting.last_values(tuned.result).get("f1"),
        mlm_public=values.get("mlm_accuracy_public"),
        mlm_private=values.get("mlm_accuracy_private"),
    )


def _released(points: dict[str, dict[str, Input]]) -> list[ReleaseRecord]:
    """Return what releasing every point's models costs together."""
    models = [
        model
        for tasks in points.values()
        for model in released(tasks["dp_pretraining"], tasks["dp_finetuning"])
    ]
    return merged(r for model in models for r in model.result.releases)


def _headlines(
    points: dict[str, dict[str, Input]], report: SweepReport
) -> Iterator[tuple[str, Labelled]]:
    """Yield what releasing every point costs together, of each data set."""
    for total in reporting.totals(_released(points)):
        name = "" if total.dataset == report.private_dataset else f"/{total.dataset}"
        if total.epsilon is not None and math.isfinite(total.epsilon):
            yield f"sweep/epsilon{name}", Public(total.epsilon)
            yield f"sweep/delta{name}", Public(total.delta)
    yield "sweep/points", Public(len(report.points))
