"""Builds the report of a job or a sweep from the results of its steps."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter

from dp_core.audit.exposure import EXPOSURE, EXPOSURE_IN_ROWS, ExposureRow
from dp_core.audit.extraction import DISCOVERABLE, TARGETED
from dp_core.audit.membership import MembershipRow, RarityBucket
from dp_core.audit.membership_sample import MEMBERSHIP
from dp_core.audit.one_run import LOWER_BOUND
from dp_core.audit.protocol import AuditRecord, Finding
from dp_core.config.release import ReleaseRecord
from dp_core.config.training import is_causal
from dp_core.errors import BadInput
from dp_core.labels import Label, Labelled, Operator
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.statement import (
    DatasetTotal,
    PrivacyStatement,
    operator_only,
    privacy_statement,
    totals,
)
from dp_core.training.bootstrap import MeanF1, Replicate, mean_f1, mean_over_seeds
from tasks.context import StepContext, omissions_of
from tasks.protocol.job import names_of, point_and_task
from tasks.protocol.messages import StepResult
from tasks.protocol.points import DP_MODEL, FINETUNING_AXES, TRAINING_AXES, Mode, Point
from tasks.protocol.settings import JobSettings
from tasks.protocol.specs import ReportSpec
from tasks.protocol.sweep import SweepSettings
from tasks.releases.deployment_ledger import open_ledger
from tasks.releases.training_advice import RunReleases, how_it_is_known, outlook_of
from tasks.report.model import (
    QUANTITIES,
    WORDS,
    Cost,
    Curve,
    Exposures,
    Fact,
    Membership,
    ModelRow,
    Report,
    Samples,
    number_of,
)
from tasks.report.tables import ledger_table, significant
from tasks.results import Input, findings_of, labelled, merged, read_result, released_after

Results = dict[str, Input]  # by the name of the task
ARCHITECTURES: dict[str, str] = WORDS["architectures"]
# Occurrences of canaries, counted by the step that builds the private token store.
OCCURRENCES, OCCURRENCES_FILE = "occurrences", "occurrences.json"
SAMPLES, SAMPLES_FILE = "samples", "samples.json"  # output of the exposure step
EXPECTED_ENTITIES = "expected_entities"  # metric of a fine-tuning, counted in its test part
SCORES = ("f1", "accuracy")  # metrics of a fine-tuning, for entities and for classes
DOCUMENTS_FILE = "documents.json"  # for the operator: counts of a fine-tuning by test document
SEEDS_FOR_THE_BEST = 8
NOTICED = 0.2  # difference of realised and expected batches, as a share of the latter
_METRICS: dict[str, dict[str, str]] = WORDS["metrics"]  # names, by metric of a step
LABEL_COUNTS = "_labels/"  # in metrics of a fine-tuning: PART_labels/TYPE


def job_report(
    spec: ReportSpec, context: StepContext, points: Mapping[str, Results], missing: Sequence[str]
) -> Report:
    """Return the report of one job, with its finished models and the names of the missing ones.

    Raises:
        BadInput: the model with DP has not finished.
    """
    if DP_MODEL.name not in points:
        raise BadInput("the model with DP has not finished", where="job", fix="See why it failed.")
    dp, shared = points[DP_MODEL.name], _shared_results(spec, context)
    kinds = get_args(Mode)
    rows = [name for name in points if not spec.points[name].is_on_the_way]
    rows.sort(key=lambda name: kinds.index(spec.points[name].mode))
    bounds = findings_of(dp.get("audit"), LOWER_BOUND.key)
    audit = next((finding.record for finding in bounds), None)
    header = header_of(spec, context, dp, released_by(spec, points))
    budget = str(header["budget"]["budget"])
    return Report(
        **header,
        omissions=omission_facts(shared),
        audit=audit,
        occurrences=_occurrences(shared),
        labels=_label_counts(spec, points),
        models=tuple(
            model_row(spec.points[name], points[name], float(spec.settings["epochs"]), budget)
            for name in rows
        ),
        by_epoch=tuple(_by_epoch(spec, points, rows, budget)),
        curves=tuple(
            curve for name in rows for curve in _curves(name, points[name]["pretraining"])
        ),
        training=(
            *_training_facts(dp["pretraining"]),
            *_audit_facts(audit, dp, audit_time(points.values())),
            *_outlook_facts(spec),
        ),
        vocabulary=tuple(_vocabulary_facts(shared)),
        phrases=tuple(_phrase_facts(shared["phrases"])) if "phrases" in shared else (),
        notes=_notes(missing),
    )


def _shared_results(spec: ReportSpec, context: StepContext) -> Results:
    """Return the finished steps that the models share, by name."""
    return {
        name: context.beside(uri)
        for name, uri in spec.results.items()
        if not point_and_task(name)[0] and read_result(context.store, uri) is not None
    }


def _notes(missing: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"Missing, because it did not finish: {name}." for name in missing)


def released_by(spec: ReportSpec, points: Mapping[str, Results]) -> list[ReleaseRecord]:
    """Return the releases of the publishable models of all points.

    Models of baselines without privacy are for the operator only, and are not included.
    """
    return releases_of(
        model
        for name, results in points.items()
        for model in released_models(results["pretraining"], results.get("finetuning"))
        if spec.points[name].baseline is None or not operator_only(model.result.releases)
    )


def released_models(model: Input, finetuned: Input | None) -> list[Input]:
    """Return the publishable models of a row; a model fine-tuned without privacy is not."""
    only_pretrained = finetuned is None or operator_only(finetuned.result.releases)
    return [model] if finetuned is None or only_pretrained else [model, finetuned]


def model_row(point: Point, results: Results, epochs: float, budget: str) -> ModelRow:
    """Return one model of the comparison, with the cost of all its figures.

    Args:
        point: the model.
        results: outputs of its steps.
        epochs: number of epochs of the whole training.
        budget: name of the private corpus's budget.
    """
    finetuned, audited = results.get("finetuning"), results.get("exposure")
    return ModelRow(
        **measured_of([results], budget),
        kind=point.mode,
        name=point.name,
        interval=_interval(last_values(finetuned.result) if finetuned else {}),
        exposures_in_rows=next(iter(exposures_of([audited], EXPOSURE_IN_ROWS.key)), None),
        memberships=_memberships(results.get("membership"), epochs),
        extractions=tuple(
            finding
            for audit in (TARGETED, DISCOVERABLE)
            for finding in findings_of(audited, audit.key)
            if finding.value is not None
        ),
        samples=_samples(audited),
    )


def _by_epoch(
    spec: ReportSpec, points: Mapping[str, Results], rows: Sequence[str], budget: str
) -> Iterator[ModelRow]:
    """Yield the models of trainings that saved several, each with the cost of all of them."""
    for name in rows:
        last, results = spec.points[name], points[name]
        saved = {
            point: points[kept]
            for kept, point in spec.points.items()
            if kept in points and point.is_on_the_way and point.training == last.training
        }
        if not saved:
            continue
        saved[last] = results
        cost_of_all = costs_of(list(saved.values()), budget)
        for point, steps in saved.items():
            measured = measured_of([steps], budget, with_predictions=False) | cost_of_all
            yield ModelRow(**measured, kind=last.mode, name=name, epochs=point.epochs or 0.0)


def _interval(scores: Mapping[str, Labelled]) -> tuple[Labelled, Labelled] | None:
    """Return the interval of the score, or None if it was not measured."""
    for name in SCORES:
        if f"{name}_low" in scores:
            return scores[f"{name}_low"], scores[f"{name}_high"]
    return None


def epsilon_of_vocabulary(vocabulary: Input) -> float:
    """Return the ε of the vocabulary, which is 0 if it was built from public text alone."""
    return max((release.epsilon for release in vocabulary.result.releases), default=0.0)


def last_values(result: StepResult) -> dict[str, Labelled]:
    """Return the last value of each metric, typed by its label.

    F1 is NaN if the test part contains no entities.
    """
    values = {m.name: labelled(m) for m in sorted(result.metrics, key=lambda m: m.step)}
    expected = values.get(EXPECTED_ENTITIES)
    if expected is not None and not expected.value:
        values["f1"] = replace(expected, value=math.nan)
    return values


def header_of(
    spec: ReportSpec, context: StepContext, results: Results, releases: Sequence[ReleaseRecord]
) -> dict[str, Any]:
    """Return the common fields of both kinds of report, by name.

    Args:
        spec: the spec of the report.
        context: the context of the step.
        results: outputs of one model's steps.
        releases: releases of all models that may be published.
    """
    model, vocabulary = results["pretraining"], results["vocabulary"]
    dataset, unit = vocabulary.facts["dataset"], PrivacyUnit(vocabulary.facts["unit"])
    ledger = open_ledger(context.deployment)
    settings = SweepSettings if spec.is_sweep else JobSettings
    labels = _source(spec.settings["entities_train"])
    if "entities_train" in spec.private_paths:
        labels = str(spec.settings["entities_dataset"] or dataset)
    return {
        "title": spec.title,
        "run_key": context.run.run_key,
        "shown_run": context.tracker.shown_run,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "made_up": spec.made_up,
        "known_seed": any(release.seed_known for release in releases),
        "private_dataset": dataset,
        "public_dataset": _source(spec.settings["public_path"]),
        "entities_dataset": labels if "entities" in spec.results else "",
        "unit": PrivacyUnit(vocabulary.facts["unit"]),
        "model_size": _model_size(model),
        "statement": privacy_statement(
            releases,
            made_up=spec.made_up,
            # The table of a sweep lists the models that its trainings saved before their end.
            released_after=() if spec.is_sweep else released_after(model.result),
        ),
        "ledger": ledger_table(ledger.history(dataset), dataset, unit),
        "budget": ledger.remaining(dataset).to_json(),
        "settings": spec.settings,
        "private_paths": spec.private_paths,
        "why_not_audited": settings.model_validate(spec.settings).why_unaudited,
        "versions": model.result.versions,
    }


def omission_facts(results: Results) -> tuple[Fact, ...]:
    """Return one fact for each step that left out items of a source."""
    omitted = {name: omissions_of(output.result) for name, output in results.items()}
    return tuple(Fact(name, *words) for name, words in omitted.items() if words is not None)


def releases_of(models: Iterable[Input]) -> list[ReleaseRecord]:
    """Return the releases of the models without duplicates."""
    return merged(release for model in models for release in model.result.releases)


def measured_of(
    replicates: Sequence[Results], budget: str, *, with_predictions: bool = True
) -> dict[str, Any]:
    """Return the fields of a row that are means or totals over its replicates, by name.

    Args:
        replicates: outputs of the steps of each of its models.
        budget: name of the private corpus's budget.
        with_predictions: the accuracies of a training belong to the row's model, which is the
            last model of the training.
    """
    models, tuned = _outputs(replicates, "pretraining"), _outputs(replicates, "finetuning")
    types = {m.name.removeprefix("f1/") for t in tuned for m in t.result.metrics if "f1/" in m.name}
    scored = models if with_predictions else []
    return {
        **costs_of(replicates, budget),
        "epsilon_vocabulary": epsilon_of_vocabulary(replicates[0]["vocabulary"]),
        "is_causal": is_causal(models[0].facts["shape"].get("kind", "bert")),
        **{name: _mean(tuned, name) for name in SCORES},
        "f1_by_type": {name: _mean(tuned, f"f1/{name}") for name in sorted(types)},
        "mlm_public": _mean(scored, "mlm_accuracy_public"),
        "mlm_private": _mean(scored, "mlm_accuracy_private"),
        "perplexity_public": _mean(scored, "perplexity_public"),
        "perplexity_private": _mean(scored, "perplexity_private"),
        "development": _mean(scored, "perplexity_development")
        or _mean(scored, "mlm_accuracy_development"),
        "exposures": exposures_of(_outputs(replicates, "exposure")),
    }


def _outputs(models: Sequence[Results], task: str) -> list[Input]:
    """Return the outputs of a task of several models; models may share an output."""
    return list({steps[task].uri: steps[task] for steps in models if task in steps}.values())


def _mean(outputs: Iterable[Input], name: str) -> Labelled | None:
    """Return the mean of a metric, for the operator only if that is true of any of its values.

    None if an output lacks the metric: a diverged training has no perplexity, and the mean of the
    other trainings would be too optimistic.
    """
    values = [last_values(output.result).get(name) for output in outputs]
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return _label_of(known)(math.fsum(v.value for v in known) / len(known))


def _label_of(values: Sequence[Labelled]) -> type[Labelled]:
    """Return the type of a number computed from these values."""
    return next((type(v) for v in values if v.label is Label.OPERATOR), type(values[0]))


def costs_of(models: Sequence[Results], budget: str) -> dict[str, Any]:
    """Return the cost of all figures of these models, and of those before fine-tuning.

    Audits measure the pre-trained models.
    """
    trained, tuned = _outputs(models, "pretraining"), _outputs(models, "finetuning")
    untuned = [*trained, *_outputs(models, "exposure")]
    epsilon = trained[0].facts["epsilon_training"]
    return {
        "epsilon_training": math.inf if epsilon is None else epsilon,
        "cost": _cost(budget, *untuned, *tuned),
        "pretrained": _cost(budget, *untuned),
    }


def score_of(finetuned: Input) -> Labelled | None:
    """Return the score of a fine-tuning, or None if it was not measured."""
    values = last_values(finetuned.result)
    return next((values[name] for name in SCORES if name in values), None)


def _cost(budget: str, *results: Input) -> Cost:
    """Return the total cost of the models with all their ancestors.

    Args:
        budget: name of the private corpus's budget, whose total comes first.
        results: outputs of the steps whose figures are shown together.
    """
    releases = releases_of(results)
    corpus = totals([r for r in releases if r.budget == budget])
    others = totals([r for r in releases if r.budget != budget])
    return Cost(corpus[0] if corpus else DatasetTotal((budget,), None, 0.0, 0.0), others)


_EXPOSURE: TypeAdapter[tuple[ExposureRow, ...]] = TypeAdapter(tuple[ExposureRow, ...])


def exposures_of(audited: Iterable[Input | None], key: str = EXPOSURE.key) -> tuple[Exposures, ...]:
    """Return the exposures that audits measured; an audit without canaries has none."""
    return tuple(
        Exposures(finding.label, _EXPOSURE.validate_python(finding.rows))
        for audit in audited
        for finding in findings_of(audit, key)
    )


def _occurrences(shared: Results) -> dict[str, Operator]:
    """Return the counted mean number of units with a canary, by group."""
    store = shared.get("private_store")
    if store is None or OCCURRENCES not in store.result.outputs:
        return {}
    record = json.loads((store.folder / OCCURRENCES_FILE).read_text())
    return {group: Operator(value) for group, value in record["means"].items()}


def _occurrence_facts(shared: Results, models: Iterable[ModelRow]) -> Iterator[Fact]:
    """Yield the counted number of units with a canary of each measured group."""
    rows = (row for model in models for exposures in model.audits for row in exposures.rows)
    expected = {f"{row.pattern} at {row.canary_rate:g}": row.expected_occurrences for row in rows}
    for group, counted in _occurrences(shared).items():
        if group in expected:
            note = f"{significant(expected[group])} are expected"
            yield Fact(f"Units with a canary {group}", counted.value, counted.label, note)


def _samples(audited: Input | None) -> Samples | None:
    """Return the texts sampled from a causal model, or None if there are none."""
    if audited is None or SAMPLES not in audited.result.outputs:
        return None
    record = json.loads((audited.folder / SAMPLES_FILE).read_text(encoding="utf-8"))
    label = Label.OPERATOR if operator_only(audited.result.releases) else Label.DP
    return Samples(label, record["prompt"], tuple(record["texts"]))


_MEMBERSHIP: TypeAdapter[tuple[MembershipRow, ...]] = TypeAdapter(tuple[MembershipRow, ...])
_RARITY: TypeAdapter[tuple[RarityBucket, ...]] = TypeAdapter(tuple[RarityBucket, ...])


def _memberships(attacked: Input | None, epochs: float) -> tuple[Membership, ...]:
    """Return the attacks on a model, after those on earlier models that its training saved.

    Args:
        attacked: output of the membership step.
        epochs: number of epochs of the whole training.
    """
    by_updates: dict[int, list[Finding]] = {}
    for finding in findings_of(attacked, MEMBERSHIP.key):
        by_updates.setdefault(finding.updates, []).append(finding)
    last = max(by_updates, default=0)
    return tuple(
        Membership(
            _MEMBERSHIP.validate_python(
                [row for finding in findings for row in finding.details.get("rows", ())]
            ),
            findings[0].details.get("losses", {}),
            round(epochs * updates / last, 2) if len(by_updates) > 1 else math.inf,
            _RARITY.validate_python(findings[0].details.get("rarity", ())),
        )
        for updates, findings in by_updates.items()
    )


def _audit_facts(audit: AuditRecord | None, dp: Results, share: Operator | None) -> Iterator[Fact]:
    """Yield the lower bound on ε, the time of all audits, and the maxima of membership attacks.

    Args:
        audit: the audit of the model with DP by canaries in its training.
        dp: outputs of the steps of the model with DP.
        share: the time of all audits divided by the time of all trainings.
    """
    if audit is not None and audit.value is not None:
        yield Fact("ε at least, by the audit, at 95%", audit.value, audit.label, audit.power)
    if share is not None:
        note = "for all models, divided by the time of their trainings; the goal is 0.1"
        yield Fact("Time for audits", share.value, share.label, note)
    if "membership" in dp:
        note = "for any attack on one unit, by the guarantee alone"
        yield from _measured_facts(dp["membership"], _METRICS["ceilings"], note)


def _measured_facts(output: Input, names: Mapping[str, str], note: str = "") -> Iterator[Fact]:
    """Yield a fact for each of the metrics that the step recorded; `names` are by metric."""
    values = last_values(output.result)
    for metric, name in names.items():
        if (value := values.get(metric)) is not None:
            yield Fact(name, value.value, value.label, note)


def audit_time(points: Iterable[Results]) -> Operator | None:
    """Return the time of all audits divided by the time of all trainings; None if not known.

    The value is for the operator only, because the duration of a training depends on the amount
    of text. The time of an interrupted step counts from its last start.
    """
    seconds: dict[str, dict[str, float]] = {}  # of steps by address, by task
    for results in points:
        for task, output in results.items():
            seconds.setdefault(task, {})[output.uri] = output.result.seconds

    def took(*tasks: str) -> float:
        return math.fsum(s for task in tasks for s in seconds.get(task, {}).values())

    trained = took("pretraining", "finetuning")
    audited = took("exposure", "membership", "audit")
    return Operator(audited / trained) if trained and audited else None


def _curves(name: str, model: Input) -> Iterator[Curve]:
    """Yield a model's loss and scores over its updates, with the ε spent so far."""
    metrics = model.result.metrics
    spent = {m.step: m.value for m in metrics if m.name == "epsilon_training"}
    for quantity in QUANTITIES:
        # An update that sampled no unit has no loss.
        shown = [m for m in metrics if m.name == quantity and (m.step in spent or not spent)]
        if shown:
            yield Curve(
                model=name,
                quantity=quantity,
                label=Label(shown[0].label),
                updates=tuple(m.step for m in shown),
                values=tuple(m.value for m in shown),
                epsilon=tuple(spent[m.step] for m in shown) if spent else (),
            )


def _training_facts(dp: Input) -> Iterator[Fact]:
    plan, trained = dp.facts["plan"], dp.facts["trained"]
    phases, bands = plan["schedule"], len(plan["strategy"]["coefficients"])
    batch = phases[-1]["expected_batch"]
    grown = f", grown from {phases[0]['expected_batch']:g}" if len(phases) > 1 else ""
    per_column = f"of one column; the noise has {bands} bands" if bands > 1 else ""
    share = batch / plan["declared_units"]
    yield Fact("Updates", sum(phase["steps"] for phase in phases), Label.PUBLIC)
    yield Fact("Expected batch, units", batch, Label.PUBLIC, f"divisor of every update{grown}")
    yield Fact("Sampling", plan["sampling"]["kind"], Label.PUBLIC, "method of drawing batches")
    yield Fact("Sampling rate", share, Label.PUBLIC, "share of the declared units in an update")
    yield Fact("Noise multiplier σ", plan["noise_multiplier"], Label.PUBLIC, per_column)
    yield Fact("Clip norm C", plan["clip_norm"], Label.PUBLIC)
    # The parameters count the tokens of the vocabulary, which may come from exact private counts.
    sized = Label.OPERATOR if operator_only(dp.result.releases) else Label.DP
    yield Fact("Parameters", dp.facts["parameters"], sized)
    which = f"each with noise: {trained['which']}"
    yield Fact("Parameters trained", trained["parameters"], sized, which)
    yield from _measured_facts(dp, {"clipped": "Share of units clipped"}, "at the end of training")
    yield from _realised_batch(dp, "Realised batch, units")


def _realised_batch(model: Input, name: str) -> Iterator[Fact]:
    """Yield the mean number of units of an update of a private training, if it was measured.

    It tells the number of units, so it is for the operator, and so is each word about it: the note
    of a fact is never withheld.
    """
    batches = {m.step: m for m in model.result.metrics if m.name == "batch"}
    plan = model.facts.get("plan")
    if not (plan and batches):
        return
    points = sorted(batches)  # the metric is a mean since the point before
    drawn = sum((end - start) * batches[end].value for start, end in pairwise([0, *points]))
    phases = plan["schedule"]
    share = drawn / sum(phase["steps"] * phase["expected_batch"] for phase in phases)
    words = f"{drawn / points[-1]:.4g} on average, {share:.0%} of the expected number"
    if abs(share - 1) > NOTICED:
        words += ": they differ by more than a fifth"
    if share < 1 - NOTICED:
        words += WORDS["notes"]["few_units"]
    yield Fact(name, words, Label(batches[points[-1]].label))


def _outlook_facts(spec: ReportSpec) -> Iterator[Fact]:
    """Yield the expected gains at this and other budgets, which depend on settings alone."""
    settings = JobSettings.model_validate(spec.settings)
    known = how_it_is_known(RunReleases.of(settings).recipe)
    for number, case in enumerate(outlook_of(settings)):
        name = f"Expected share of the gain, {case.name}"
        words = "; ".join(f"{quantity} {share}" for quantity, share in case.expected.items())
        yield Fact(name, words, Label.PUBLIC, "" if number else known)


def _vocabulary_facts(results: Results) -> Iterator[Fact]:
    vocabulary = results["vocabulary"]
    facts = vocabulary.facts
    label = Label.OPERATOR if operator_only(vocabulary.result.releases) else Label.DP
    free = "" if vocabulary.result.releases else "ε 0: it was built without private text"
    yield Fact("Source", facts["source"], Label.PUBLIC, free)
    yield Fact("Tokens |V|", facts["vocabulary_size"], label)
    if "mechanism" in facts:
        yield Fact("Words released", facts["words_released"], label)
        yield Fact("Public words, without cost", facts["words_known"], Label.PUBLIC)
        yield Fact("Released by", facts["mechanism"], Label.PUBLIC)
        yield Fact("Maximum words per unit", facts["words_per_unit"], Label.PUBLIC)
    yield from _measured_facts(vocabulary, {"distinct_words": "Distinct words before noise"})
    for role in ("public", "private"):
        for metrics, note in (("fit", "held out"), ("tokens", "in rows, with markers")):
            names = {metric: f"{name}, {role} text" for metric, name in _METRICS[metrics].items()}
            yield from _measured_facts(results[f"{role}_store"], names, note)


def _label_counts(spec: ReportSpec, points: Mapping[str, Results]) -> tuple[Fact, ...]:
    """Return the number of labels of each entity type or class, by part of the labelled text."""
    tuned = next((r["finetuning"] for r in points.values() if "finetuning" in r), None)
    counts, label = Counter[tuple[str, str]](), Label.OPERATOR
    for metric, count in last_values(tuned.result).items() if tuned else ():
        part, counted, kind = metric.partition(LABEL_COUNTS)
        if counted:
            note = "all folds" if spec.settings["entities_folds"] else f"{part} part"
            counts[kind, note] += int(count.value)
            label = count.label
    return tuple(Fact(kind, number, label, note) for (kind, note), number in counts.items())


def _phrase_facts(phrases: Input) -> Iterator[Fact]:
    facts = phrases.facts
    yield Fact("ε of the phrases", facts["epsilon"], Label.PUBLIC, "all rounds together")
    for length, released in facts["released"].items():
        yield Fact(f"Phrases of {length} words released", released, Label.DP)
    yield Fact("Released in each round by", facts["mechanism"], Label.PUBLIC)
    yield Fact("Maximum phrases per unit and round", facts["phrases_per_unit"], Label.PUBLIC)


def _model_size(model: Input) -> str:
    """Return a model's kind and size, for example `BERT, 2 layers × 128`."""
    shape = model.facts["shape"]
    layers = f"{shape['layers']} layer{'s' * (shape['layers'] != 1)}"
    return f"{ARCHITECTURES[shape.get('kind', 'bert')]}, {layers} × {shape['hidden']}"


def _source(path: bool | int | float | str) -> str:
    """Return the name of a source of text; synthetic text has no path."""
    return Path(str(path)).name or "made-up text"


# --- the report of a sweep


class _StatementForTheOperator(PrivacyStatement):
    """The statement of a sweep of which only models without privacy have finished."""

    @property
    def paragraphs(self) -> list[str]:
        """One paragraph, because no guarantee is given."""
        return [WORDS["notes"]["no_training"]]


def sweep_report(
    spec: ReportSpec, context: StepContext, points: Mapping[str, Results], missing: Sequence[str]
) -> Report:
    """Return the report of a sweep, with its finished points and the names of the missing ones."""
    first = next(iter(points.values()))
    releases, shared = released_by(spec, points), _shared_results(spec, context)
    batches = (
        fact
        for name, model in _trainings(spec, points).items()
        for fact in _realised_batch(model, f"Realised batch of {name}, units")
    )
    header = header_of(spec, context, first, releases)
    budget = str(header["budget"]["budget"])
    models = tuple(_sweep_row(spec, each, budget) for each in _by_setting(spec, points))
    nonprivate = (
        operator_only(results["pretraining"].result.releases) for results in points.values()
    )
    if not releases and any(nonprivate):
        header["statement"] = _StatementForTheOperator(header["statement"].data)
    return Report(
        **header,
        omissions=omission_facts(shared),
        labels=_label_counts(spec, points),
        is_sweep=True,
        models=models,
        training=(*batches, *_occurrence_facts(shared, models)),
        notes=_notes(missing),
    )


def _trainings(spec: ReportSpec, points: Mapping[str, Results]) -> dict[str, Input]:
    """Return the trainings of the points by name; several points may share one."""
    return {
        spec.points[name].training.name: results["pretraining"] for name, results in points.items()
    }


Replicates = list[tuple[Point, Results]]


def _by_setting(spec: ReportSpec, points: Mapping[str, Results]) -> list[Replicates]:
    """Return the finished points, grouped by settings other than seeds and fold."""
    settings: dict[Point, Replicates] = {}
    for name, results in points.items():
        point = spec.points[name]
        settings.setdefault(point.setting, []).append((point, results))
    return list(settings.values())


def _sweep_row(spec: ReportSpec, replicates: Replicates, budget: str) -> ModelRow:
    """Return the row of one setting from its finished points."""
    setting = replicates[0][0].setting
    # Points with the same seed of the private training share its model and audit.
    outputs = [results for _, results in replicates]
    trained, tuned = _outputs(outputs, "pretraining"), _outputs(outputs, "finetuning")
    model, varied = trained[0], spec.points.values()
    is_last = not setting.is_on_the_way
    # A private selection reports the settings of the selected training.
    training = model.facts.get("chosen") or setting.model_dump(include=set(TRAINING_AXES))
    schedule = (model.facts.get("plan") or {}).get("schedule", ())
    batch_size, updates = training["batch_size"], sum(phase["steps"] for phase in schedule)
    if setting.mode == "nonprivate" or setting.is_on_the_way:
        job = SweepSettings.model_validate(spec.settings).job(setting)
        updates = job.updates_after(setting.mode, setting.epochs or 0.0)
        if setting.mode == "nonprivate":
            batch_size = job.nonprivate_batch_size
    return ModelRow(
        **measured_of(outputs, budget, with_predictions=is_last),
        kind=setting.mode,
        name=setting.name,
        baseline=setting.baseline,
        noise_multiplier=training["noise_multiplier"],
        batch_size=int(batch_size),
        epochs=training["epochs"],
        training_epochs=(setting.is_on_the_way and setting.training_epochs) or 0.0,
        updates=updates,
        finetuning={
            axis: float(getattr(setting, axis) or spec.settings[axis])
            for axis in FINETUNING_AXES
            if any(getattr(point, axis) is not None for point in varied)
        },
        spread=_spread(replicates) if tuned else _spread_over_seeds(trained if is_last else []),
        best_three=_best_three(replicates) if tuned else None,
    )


def _spread(replicates: Replicates) -> MeanF1 | None:
    """Return the spread of the score over seeds and folds, or None if a seed lacks a fold."""
    counts = [_replicate(point, results["finetuning"]) for point, results in replicates]
    try:
        return mean_f1([replicate for replicate in counts if replicate is not None])
    except ValueError:
        return None


def _spread_over_seeds(models: Iterable[Input]) -> MeanF1 | None:
    """Return the spread of the predictions of private text, or None for a single seed.

    They are those of the development part, if there is one.
    """
    measured = [last_values(model.result) for model in models]
    parts, measures = ("development", "private"), ("perplexity", "mlm_accuracy")
    values = [
        next((v[f"{m}_{part}"] for part in parts for m in measures if f"{m}_{part}" in v), None)
        for v in measured
    ]
    known = [value.value for value in values if value is not None]
    return mean_over_seeds(known) if len(known) == len(values) > 1 else None


def _replicate(point: Point, finetuned: Input) -> Replicate | None:
    """Return the counts by test document of a fine-tuned model, or None if it has no score.

    Counts for the operator only are in a separate file.
    """
    if number_of(score_of(finetuned)) is None:
        return None
    counts = finetuned.facts.get("documents")
    if counts is None:
        counts = json.loads((finetuned.folder / DOCUMENTS_FILE).read_text())
    return Replicate(counts=counts, **_drawn(point))


def _best_three(replicates: Replicates) -> Labelled | None:
    """Return the mean score of the three best seeds of a setting, averaged over folds.

    None for fewer than eight seeds; see Jagannatha et al. 2021, appendix A.3.
    """
    by_seed: dict[str, list[Labelled]] = {}
    for point, results in replicates:
        score = score_of(results["finetuning"])
        if score is not None and number_of(score) is not None:
            by_seed.setdefault(_drawn(point)["seed"], []).append(score)
    if len(by_seed) < SEEDS_FOR_THE_BEST:
        return None
    all_scores = [score for scores in by_seed.values() for score in scores]
    means = sorted(math.fsum(v.value for v in s) / len(s) for s in by_seed.values())
    return _label_of(all_scores)(math.fsum(means[-3:]) / 3)


def _drawn(point: Point) -> dict[str, Any]:
    """Return the seed, fold and start that identify a replicate of a setting."""
    seed = f"{point.seed} {point.finetune_seed}"
    return {"seed": seed, "fold": point.fold or 0, "start": str(point.seed)}


def finetuned_by_setting(
    spec: ReportSpec, points: Iterable[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return the addresses and replicates of the fine-tunings of each row."""
    finetunings: dict[str, list[dict[str, Any]]] = {}
    for name in points:
        uri = spec.results.get(names_of(spec.points[name])["finetuning"])
        if uri is None:  # without labelled text
            continue
        finetuning = {"uri": uri, **_drawn(spec.points[name])}
        finetunings.setdefault(spec.points[name].setting.name, []).append(finetuning)
    return finetunings
