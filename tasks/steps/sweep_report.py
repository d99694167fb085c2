"""Gather the results of a sweep: ε and F1 against noise, batch size and epochs (Fig. 1)."""

from __future__ import annotations

from collections.abc import Iterator

from dp_core.privacy.labels import Labelled, Public
from dp_core.privacy.units import PrivacyUnit
from dp_core.report.editions import sweep_edition
from dp_core.report.model import Edition, SweepReport, SweepRow
from dp_core.report.page import sweep_page
from dp_core.report.tables import sweep_table
from tasks import reporting
from tasks.specs import SweepReportSpec
from tasks.statements import statement_of
from tasks.steps.model_kinds import in_words
from tasks.steps.report import EDITIONS, artifacts
from tasks.workbench import Answer, Input, Workbench, merged


def run(spec: SweepReportSpec, bench: Workbench) -> Answer:
    """Write both editions of the sweep's page; hand the table of its points on."""
    points = {
        name: {task: bench.input(uri) for task, uri in tasks.items()}
        for name, tasks in spec.results.items()
    }
    report = _report(spec, bench, points)
    for name, edition in EDITIONS.items():
        sweep_page(report, edition).write(bench.out / name)
    releases = merged(
        r for tasks in points.values() for result in tasks.values() for r in result.result.releases
    )
    epsilon, delta = reporting.total(releases)
    for metric, value in _headlines(epsilon, delta, report):
        bench.measure(metric, value)
    shown = sweep_edition(report, Edition.PUBLISHABLE)
    return Answer(
        outputs={name: name for name in EDITIONS},
        releases=releases,
        facts={"created": report.created, "table": sweep_table(shown.points, shown.unit).to_json()},
        artifacts=list(artifacts(bench)),
    )


def _report(
    spec: SweepReportSpec, bench: Workbench, points: dict[str, dict[str, Input]]
) -> SweepReport:
    first = next(iter(points.values()))
    vocabulary, dp = first["vocabulary"], first["dp_pretraining"]
    unit = PrivacyUnit(vocabulary.facts["unit"])
    public, entities = reporting.source_names(spec.settings)
    releases = merged(
        r for tasks in points.values() for r in tasks["dp_pretraining"].result.releases
    )
    return SweepReport(
        title=spec.title,
        run_key=bench.context.run_key,
        created=reporting.now(),
        made_up=spec.made_up,
        known_seed=any(tasks["dp_pretraining"].facts["known_seed"] for tasks in points.values()),
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
    )


def _row(spec: SweepReportSpec, name: str, tasks: dict[str, Input]) -> SweepRow:
    model = tasks["dp_pretraining"]
    place = model.facts.get("chosen") or spec.points[name]  # of a selection: which one won
    epsilon, delta = reporting.total(model.result.releases)
    values = reporting.last_values(model.result)
    return SweepRow(
        name=name,
        noise_multiplier=place["noise_multiplier"],
        batch_size=int(place["batch_size"]),
        epochs=place["epochs"],
        epsilon_training=model.facts["epsilon_training"],
        epsilon_total=epsilon,
        delta=delta,
        f1=reporting.last_values(tasks["dp_finetuning"].result).get("f1"),
        mlm_public=values.get("mlm_accuracy_public"),
        mlm_private=values.get("mlm_accuracy_private"),
    )


def _headlines(
    epsilon: float | None, delta: float, report: SweepReport
) -> Iterator[tuple[str, Labelled]]:
    """Yield what releasing every point costs together."""
    if epsilon is not None:
        yield "sweep/epsilon", Public(epsilon)
        yield "sweep/delta", Public(delta)
    yield "sweep/points", Public(len(report.points))
