"""Gather the results of a sweep: ε and F1 against noise, batch size and epochs (Fig. 1)."""

from __future__ import annotations

from collections.abc import Iterator

from dp_core.errors import BadInput
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
from tasks.workbench import Answer, Input, Workbench, merged, read_result


def run(spec: SweepReportSpec, bench: Workbench) -> Answer:
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
    releases = merged(
        r for tasks in points.values() for result in tasks.values() for r in result.result.releases
    )
    epsilon, delta = reporting.total(releases)
    for metric, value in _headlines(epsilon, delta, report):
        bench.measure(metric, value, len(points))  # of a later try with more points, it is the last
    shown = sweep_edition(report, Edition.PUBLISHABLE)
    return Answer(
        outputs={name: name for name in EDITIONS},
        releases=releases,
        facts={
            "created": report.created,
            "models": {name: spec.results[name]["dp_pretraining"] for name in points},
            "table": sweep_table(shown.points, shown.unit).to_json(),
            "missing": missing,
        },
        artifacts=list(artifacts(bench)),
    )


def _finished(bench: Workbench, tasks: dict[str, str]) -> bool:
    return all(read_result(bench.store, uri) is not None for uri in tasks.values())


def _report(
    spec: SweepReportSpec,
    bench: Workbench,
    points: dict[str, dict[str, Input]],
    missing: list[str],
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
        shown_run=bench.tracker.shown_run,
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
        notes=tuple(f"Not here, as it did not finish: {name}." for name in missing),
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
