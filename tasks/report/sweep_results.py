"""From the results of a sweep's points to what its report shows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dp_core.config.training import is_causal
from dp_core.labels import Label, Labelled
from dp_core.training.bootstrap import MeanF1, Replicate, mean_f1, mean_over_seeds
from tasks.context import StepContext
from tasks.protocol import ReleaseRecord, SweepPoint, SweepReportSpec, SweepSettings
from tasks.protocol.sweep import FINETUNING_AXES, TRAINING_AXES
from tasks.releases.provenance import operator_only
from tasks.report.model import SweepReport, SweepRow, number_of
from tasks.report.results import (
    Results,
    costs_of,
    epsilon_of_vocabulary,
    exposures_of,
    header_of,
    last_values,
    omission_facts,
    released_models,
    releases_of,
    score_of,
)
from tasks.results.inputs import Input, read_result

DOCUMENTS_FILE = "documents.json"  # the operator's: counts of a fine-tuning, by test document
SEEDS_FOR_THE_BEST = 8


_OF_THE_OPERATOR = (
    "No training with differential privacy of this sweep has finished. What was trained without "
    "privacy read private text, and stays with the operator of the data.",
)


def sweep_report(
    spec: SweepReportSpec,
    context: StepContext,
    points: Mapping[str, Results],
    missing: Sequence[str],
) -> SweepReport:
    """Return what the report of a sweep shows: the points that finished, and which did not."""
    first = next(iter(points.values()))
    releases = released_by_sweep(spec, points)
    header = header_of(spec, context, first, releases)
    red = (operator_only(results["pretraining"].result.releases) for results in points.values())
    if not releases and any(red):
        header["statement"] = replace(header["statement"], words=_OF_THE_OPERATOR)
    return SweepReport(
        **header,
        omissions=omission_facts(
            {
                name: result
                for name, uri in spec.readers.items()
                if (result := read_result(context.store, uri)) is not None
            }
        ),
        points=tuple(_sweep_row(spec, own) for own in _by_setting(spec, points)),
        notes=tuple(f"Not here, as it did not finish: {name}." for name in missing),
    )


def released_by_sweep(spec: SweepReportSpec, points: Mapping[str, Results]) -> list[ReleaseRecord]:
    """Return the releases behind every point's models: what all of them cost together.

    What a baseline without privacy made stays with the operator, and is not among them.
    """
    return releases_of(
        model
        for name, results in points.items()
        for model in released_models(results["pretraining"], results.get("finetuning"))
        if spec.points[name].baseline is None or not operator_only(model.result.releases)
    )


Replicates = list[tuple[SweepPoint, Results]]


def _by_setting(spec: SweepReportSpec, points: Mapping[str, Results]) -> list[Replicates]:
    """Return the points that finished, those together that differ in seeds and fold alone."""
    settings: dict[SweepPoint, Replicates] = {}
    for name, results in points.items():
        point = spec.points[name]
        settings.setdefault(point.setting, []).append((point, results))
    return list(settings.values())


def _sweep_row(spec: SweepReportSpec, own: Replicates) -> SweepRow:
    """Return the row of one setting, of its points that finished."""
    setting, first = own[0][0].setting, own[0][1]
    # By the seed of the private training: points that share one read the same.
    models = {point.seed: results["pretraining"] for point, results in own}
    audited = {point.seed: results["exposure"] for point, results in own}
    tuned = [results["finetuning"] for _, results in own if "finetuning" in results]
    model, varied = first["pretraining"], spec.points.values()
    # What a training says of accuracy is of its last model.
    scored = () if setting.is_on_the_way else models.values()
    # Of a selection: which one won.
    training = model.facts.get("chosen") or setting.model_dump(include=set(TRAINING_AXES))
    schedule = (model.facts.get("plan") or {}).get("schedule", ())
    batch_size, updates = training["batch_size"], sum(phase["steps"] for phase in schedule)
    if setting.mode == "nonprivate" or setting.is_on_the_way:
        job = SweepSettings.model_validate(spec.settings).job(setting)
        assert setting.mode != "public"  # noqa: S101 - narrows the type: its training has no epochs
        updates = job.updates_after(setting.mode, setting.epochs)
        if setting.mode == "nonprivate":
            batch_size = job.nonprivate_batch_size
    return SweepRow(
        **costs_of(
            first["vocabulary"].facts["dataset"],
            model,
            [*models.values(), *audited.values()],
            tuned,
        ),
        name=setting.name,
        baseline=setting.baseline,
        is_causal=is_causal(model.facts["shape"].get("kind", "bert")),
        epsilon_vocabulary=epsilon_of_vocabulary(first["vocabulary"]),
        noise_multiplier=training["noise_multiplier"],
        batch_size=int(batch_size),
        epochs=training["epochs"],
        training_epochs=setting.training_epochs if setting.is_on_the_way else 0.0,
        updates=updates,
        trainings=len(models),
        finetuning={
            axis: float(getattr(setting, axis) or spec.settings[axis])
            for axis in FINETUNING_AXES
            if any(getattr(point, axis) is not None for point in varied)
        },
        f1=_mean(tuned, "f1"),
        accuracy=_mean(tuned, "accuracy"),
        spread=_spread(own) if tuned else _spread_of_perplexity(scored),
        best_three=_best_three(own) if tuned else None,
        mlm_public=_mean(scored, "mlm_accuracy_public"),
        mlm_private=_mean(scored, "mlm_accuracy_private"),
        perplexity_public=_mean(scored, "perplexity_public"),
        perplexity_private=_mean(scored, "perplexity_private"),
        exposures=tuple(e for one in audited.values() if (e := exposures_of(one)) is not None),
    )


def _mean(outputs: Iterable[Input], name: str) -> Labelled | None:
    """Return the mean of a metric; the operator's if it is of any of them.

    None where one of them lacks it: a training that diverged has no perplexity, and a mean without
    it would be too good.
    """
    values = [last_values(one.result).get(name) for one in outputs]
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    kind = next((type(v) for v in known if v.label is Label.OPERATOR), type(known[0]))
    return kind(math.fsum(v.value for v in known) / len(known))


def _spread(own: Replicates) -> MeanF1 | None:
    """Return how the score spreads over seeds and folds; None where a seed lacks a fold."""
    replicates = [_replicate(point, results["finetuning"]) for point, results in own]
    try:
        return mean_f1([one for one in replicates if one is not None])
    except ValueError:
        return None


def _spread_of_perplexity(models: Iterable[Input]) -> MeanF1 | None:
    """Return how perplexity of private text spreads over seeds; None of one seed alone."""
    values = [last_values(model.result).get("perplexity_private") for model in models]
    known = [value.value for value in values if value is not None]
    return mean_over_seeds(known) if len(known) == len(values) > 1 else None


def _replicate(point: SweepPoint, finetuned: Input) -> Replicate | None:
    """Return what a fine-tuned model made of each test document; None: it has no score.

    Where only the operator may see them, the counts are in a file of the operator's.
    """
    if number_of(score_of(finetuned)) is None:
        return None
    counts = finetuned.facts.get("documents")
    if counts is None:
        counts = json.loads((finetuned.folder / DOCUMENTS_FILE).read_text())
    return Replicate(counts=counts, **_drawn(point))


def _best_three(own: Replicates) -> Labelled | None:
    """Return the mean of the three best seeds of a setting, each the mean over its folds.

    Of eight seeds or more, as in Jagannatha et al. 2021, appendix A.3; None for fewer.
    """
    by_seed: dict[str, list[Labelled]] = {}
    for point, results in own:
        score = score_of(results["finetuning"])
        if score is not None and number_of(score) is not None:
            by_seed.setdefault(_drawn(point)["seed"], []).append(score)
    if len(by_seed) < SEEDS_FOR_THE_BEST:
        return None
    every = [score for scores in by_seed.values() for score in scores]
    kind = next((type(v) for v in every if v.label is Label.OPERATOR), type(every[0]))
    means = sorted(math.fsum(v.value for v in s) / len(s) for s in by_seed.values())
    return kind(math.fsum(means[-3:]) / 3)


def _drawn(point: SweepPoint) -> dict[str, Any]:
    """Return which replicate of its setting a point is."""
    seed = f"{point.seed} {point.finetune_seed}"
    return {"seed": seed, "fold": point.fold or 0, "start": str(point.seed)}


def finetuned_by_setting(
    spec: SweepReportSpec, points: Iterable[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return the fine-tunings behind each row: where they are, and which replicates."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in points:
        if "finetuning" not in spec.results[name]:  # of a causal model
            continue
        told = {"uri": spec.results[name]["finetuning"], **_drawn(spec.points[name])}
        found.setdefault(spec.points[name].setting.name, []).append(told)
    return found
