"""Builds the report of a sweep from the results of its points."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dp_core.labels import Label, Labelled
from dp_core.privacy.statement import PrivacyStatement
from dp_core.training.bootstrap import MeanF1, Replicate, mean_f1, mean_over_seeds
from tasks.context import StepContext
from tasks.protocol import (
    ReleaseRecord,
    ReportSpec,
    SweepPoint,
    SweepSettings,
    names_of,
    point_and_task,
)
from tasks.protocol.sweep import FINETUNING_AXES, TRAINING_AXES
from tasks.releases.provenance import operator_only
from tasks.report.job_results import (
    Results,
    header_of,
    last_values,
    measured_of,
    omission_facts,
    released_models,
    releases_of,
    score_of,
)
from tasks.report.model import ModelRow, Report, number_of
from tasks.results import Input, read_result

DOCUMENTS_FILE = "documents.json"  # for the operator: counts of a fine-tuning by test document
SEEDS_FOR_THE_BEST = 8


class _StatementForTheOperator(PrivacyStatement):
    """The statement of a sweep of which only models without privacy have finished."""

    @property
    def paragraphs(self) -> list[str]:
        """One paragraph, because no guarantee is given."""
        return [
            "No training with differential privacy of this sweep has finished. The models trained "
            "without privacy read private text; only the operator of the data may have them."
        ]


def sweep_report(
    spec: ReportSpec,
    context: StepContext,
    points: Mapping[str, Results],
    missing: Sequence[str],
) -> Report:
    """Return the report of a sweep, with its finished points and the names of the missing ones."""
    first = next(iter(points.values()))
    releases = released_by_sweep(spec, points)
    header = header_of(spec, context, first, releases)
    nonprivate = (
        operator_only(results["pretraining"].result.releases) for results in points.values()
    )
    if not releases and any(nonprivate):
        header["statement"] = _StatementForTheOperator(header["statement"].data)
    return Report(
        **header,
        omissions=omission_facts(
            {
                name: result
                for name, uri in spec.results.items()
                if not point_and_task(name)[0]
                and (result := read_result(context.store, uri)) is not None
            }
        ),
        is_sweep=True,
        models=tuple(_sweep_row(spec, replicates) for replicates in _by_setting(spec, points)),
        notes=tuple(f"Missing, because it did not finish: {name}." for name in missing),
    )


def released_by_sweep(spec: ReportSpec, points: Mapping[str, Results]) -> list[ReleaseRecord]:
    """Return the releases of the publishable models of all points.

    Models of baselines without privacy are for the operator only, and are not included.
    """
    return releases_of(
        model
        for name, results in points.items()
        for model in released_models(results["pretraining"], results.get("finetuning"))
        if spec.points[name].baseline is None or not operator_only(model.result.releases)
    )


Replicates = list[tuple[SweepPoint, Results]]


def _by_setting(spec: ReportSpec, points: Mapping[str, Results]) -> list[Replicates]:
    """Return the finished points, grouped by settings other than seeds and fold."""
    settings: dict[SweepPoint, Replicates] = {}
    for name, results in points.items():
        point = spec.points[name]
        settings.setdefault(point.setting, []).append((point, results))
    return list(settings.values())


def _sweep_row(spec: ReportSpec, replicates: Replicates) -> ModelRow:
    """Return the row of one setting from its finished points."""
    setting, first = replicates[0][0].setting, replicates[0][1]
    # Points with the same seed of the private training share its model and audit.
    models = {point.seed: results["pretraining"] for point, results in replicates}
    audited = {point.seed: results["exposure"] for point, results in replicates}
    tuned = [results["finetuning"] for _, results in replicates if "finetuning" in results]
    model, varied = first["pretraining"], spec.points.values()
    # The accuracies of a training belong to its last model.
    scored = [] if setting.is_on_the_way else list(models.values())
    # A private selection reports the settings of the selected training.
    training = model.facts.get("chosen") or setting.model_dump(include=set(TRAINING_AXES))
    schedule = (model.facts.get("plan") or {}).get("schedule", ())
    batch_size, updates = training["batch_size"], sum(phase["steps"] for phase in schedule)
    if setting.mode == "nonprivate" or setting.is_on_the_way:
        job = SweepSettings.model_validate(spec.settings).job(setting)
        assert setting.mode != "public"  # noqa: S101 - narrows the type: its training has no epochs
        updates = job.updates_after(setting.mode, setting.epochs)
        if setting.mode == "nonprivate":
            batch_size = job.nonprivate_batch_size
    return ModelRow(
        **measured_of(
            first["vocabulary"], list(models.values()), list(audited.values()), tuned, scored
        ),
        kind=setting.mode,
        name=setting.name,
        baseline=setting.baseline,
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
        spread=_spread(replicates) if tuned else _spread_of_perplexity(scored),
        best_three=_best_three(replicates) if tuned else None,
    )


def _spread(replicates: Replicates) -> MeanF1 | None:
    """Return the spread of the score over seeds and folds, or None if a seed lacks a fold."""
    counts = [_replicate(point, results["finetuning"]) for point, results in replicates]
    try:
        return mean_f1([replicate for replicate in counts if replicate is not None])
    except ValueError:
        return None


def _spread_of_perplexity(models: Iterable[Input]) -> MeanF1 | None:
    """Return the spread of perplexity on private text over seeds, or None for a single seed."""
    values = [last_values(model.result).get("perplexity_private") for model in models]
    known = [value.value for value in values if value is not None]
    return mean_over_seeds(known) if len(known) == len(values) > 1 else None


def _replicate(point: SweepPoint, finetuned: Input) -> Replicate | None:
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
    kind = next((type(v) for v in all_scores if v.label is Label.OPERATOR), type(all_scores[0]))
    means = sorted(math.fsum(v.value for v in s) / len(s) for s in by_seed.values())
    return kind(math.fsum(means[-3:]) / 3)


def _drawn(point: SweepPoint) -> dict[str, Any]:
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
        if uri is None:  # causal models are not fine-tuned
            continue
        finetuning = {"uri": uri, **_drawn(spec.points[name])}
        finetunings.setdefault(spec.points[name].setting.name, []).append(finetuning)
    return finetunings
