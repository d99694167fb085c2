"""Gather the results of a job into one self-contained page, in two editions."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dp_core.audit.exposure import summarise
from dp_core.labels import Dp, Label, Labelled, Operator, Public
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.statement import DatasetTotal
from tasks.protocol import ReportSpec
from tasks.releases.provenance import MODELS, operator_only
from tasks.releases.statements import statement_of
from tasks.report import results as reporting
from tasks.report.model import Edition, Exposures, Fact, JobReport, ModelRow, job_edition
from tasks.report.page import job_page
from tasks.report.tables import closing_table
from tasks.runtime.context import Artifact, Input, StepContext, StepOutput, merged
from tasks.steps.model_kinds import in_words

EDITIONS = {"report": Edition.PUBLISHABLE, "operator_report": Edition.OPERATOR}


def run(spec: ReportSpec, bench: StepContext) -> StepOutput:
    """Write the page for anyone and the page for the operator; hand the closing table on."""
    results = {name: bench.input(uri) for name, uri in spec.results.items()}
    report = job_report(spec, bench, results)
    for name, edition in EDITIONS.items():
        job_page(report, edition).write(bench.out / name)
    shown = job_edition(report, Edition.PUBLISHABLE)
    for name, value in _headlines(report, shown):
        bench.measure(name, value)
    return StepOutput(
        outputs={name: name for name in EDITIONS},
        facts={
            "created": report.created,
            "models": {
                name: uri
                for name, uri in spec.results.items()
                if results[name].result.step in MODELS
                and not operator_only(results[name].result.releases)
            },
            "table": closing_table(shown.models, shown.unit).to_json(),
        },
        artifacts=list(artifacts(bench)),
    )


def artifacts(bench: StepContext) -> Iterator[Artifact]:
    """Yield the pages and figures of both editions, each with the label of its edition."""
    labels = {"report": Label.DP, "operator_report": Label.OPERATOR}
    for name, label in labels.items():
        for file in sorted((bench.out / name).iterdir()):
            yield Artifact(f"{name}/{file.name}", label, name)


def job_report(spec: ReportSpec, bench: StepContext, results: dict[str, Input]) -> JobReport:
    """Return what the page is told."""
    vocabulary, dp = results["vocabulary"], results["dp_pretraining"]
    unit = PrivacyUnit(vocabulary.facts["unit"])
    public, entities = reporting.source_names(spec.settings)
    kinds = [k for k in reporting.KINDS if f"{k}_pretraining" in results]
    models = {k: results[f"{k}_pretraining"] for k in kinds}
    curves = [curve for k in kinds for curve in reporting.curves(k, models[k].result)]
    leaving = released(dp, results.get("dp_finetuning"))
    shown = merged(release for model in leaving for release in model.result.releases)
    return JobReport(
        title=spec.title,
        run_key=bench.context.run_key,
        shown_run=bench.tracker.shown_run,
        created=reporting.now(),
        made_up=spec.made_up,
        known_seed=any(r.seed_known for r in shown),
        private_dataset=vocabulary.facts["dataset"],
        public_dataset=public,
        entities_dataset=entities if "entities" in results else "",
        unit=unit,
        declared_units=vocabulary.facts["declared_units"],
        model_size=in_words(dp),
        statement=statement_of(shown, made_up=spec.made_up),
        models=tuple(
            reporting.model_row(
                k,
                vocabulary,
                models[k],
                results.get(f"{k}_finetuning"),
                results.get(f"{k}_exposure"),
            )
            for k in kinds
        ),
        curves=tuple(curves),
        training=tuple(_training_facts(dp)),
        vocabulary=tuple(_vocabulary_facts(vocabulary)),
        ledger=reporting.ledger_view(bench, vocabulary.facts["dataset"], unit),
        settings=spec.settings,
        versions=dp.result.versions,
        public_seeds={"seed": int(spec.settings["seed"])},
        repeat=(reporting.repeat_command(spec.title, spec.settings),),
    )


def released(model: Input, finetuned: Input | None) -> list[Input]:
    """Return the models of a row that may leave: one fine-tuned without privacy does not."""
    kept = finetuned is None or operator_only(finetuned.result.releases)
    return [model] if finetuned is None or kept else [model, finetuned]


def _training_facts(dp: Input) -> Iterator[Fact]:
    plan, values = dp.facts["plan"], reporting.last_values(dp.result)
    phases = plan["schedule"]
    batch = phases[-1]["expected_batch"]
    grown = f"grown from {phases[0]['expected_batch']:g}" if len(phases) > 1 else ""
    yield Fact("Updates", sum(phase["steps"] for phase in phases), Label.PUBLIC)
    divided = ", ".join(filter(None, ["what every update is divided by", grown]))
    yield Fact("Expected batch, units", batch, Label.PUBLIC, divided)
    yield Fact("Sampling", plan["sampling"]["kind"], Label.PUBLIC, "how batches are drawn")
    rate = batch / plan["declared_units"]
    yield Fact("Sampling rate", rate, Label.PUBLIC, "share of the declared units in an update")
    yield Fact("Noise multiplier σ", plan["noise_multiplier"], Label.PUBLIC)
    yield Fact("Clip norm C", plan["clip_norm"], Label.PUBLIC)
    yield Fact("Parameters", dp.facts["parameters"], Label.PUBLIC)
    for name, words in (("clipped", "Share of units clipped"), ("batch", "Realised batch, units")):
        if (value := values.get(name)) is not None:
            yield Fact(words, value.value, value.label, "at the end of training")


def _vocabulary_facts(vocabulary: Input) -> Iterator[Fact]:
    facts, values = vocabulary.facts, reporting.last_values(vocabulary.result)
    yield Fact("Word pieces |V|", facts["vocabulary_size"], Label.DP)
    yield Fact("Words released", facts["words_released"], Label.DP)
    yield Fact("σ of the histogram", facts["sigma"], Label.PUBLIC, "in counts")
    yield Fact("Threshold", facts["threshold"], Label.PUBLIC, "noised counts below it are gone")
    yield Fact("Words per unit, at most", facts["words_per_unit"], Label.PUBLIC)
    if (distinct := values.get("distinct_words")) is not None:
        yield Fact("Distinct words before noise", distinct.value, distinct.label)


def _headlines(report: JobReport, shown: JobReport) -> Iterator[tuple[str, Labelled]]:
    """Yield the figures by which runs are compared: they stand on the run's own line in MLflow.

    Args:
        report: with every figure, each of which goes where its label sends it.
        shown: the publishable edition, whose ε anyone may see.
    """
    for model, public in zip(report.models, shown.models, strict=True):
        yield from _cost_headlines(public)
        yield from _model_headlines(model)


def _cost_headlines(model: ModelRow) -> Iterator[tuple[str, Labelled]]:
    own = DatasetTotal("", None, model.epsilon_total, model.delta)
    for total in (own, *model.others):
        if total.epsilon is not None and math.isfinite(total.epsilon):  # infinity is no metric
            name = f"/{total.dataset}" if total.dataset else ""
            yield f"{model.kind}/epsilon{name}", Public(total.epsilon)
            yield f"{model.kind}/delta{name}", Public(total.delta)


def _model_headlines(model: ModelRow) -> Iterator[tuple[str, Labelled]]:
    for name, value in (
        ("mlm_accuracy_public", model.mlm_public),
        ("mlm_accuracy_private", model.mlm_private),
        ("perplexity_public", model.perplexity_public),
        ("perplexity_private", model.perplexity_private),
        ("f1", model.f1),
    ):
        if isinstance(value, Dp | Public | Operator):
            yield f"{model.kind}/{name}", value
    if isinstance(model.exposures, Exposures):
        kind = Operator if model.exposures.label is Label.OPERATOR else Dp
        yield f"{model.kind}/exposure_mean", kind(summarise(model.exposures.rows).mean)
        yield f"{model.kind}/exposure_largest", kind(summarise(model.exposures.rows).largest)
