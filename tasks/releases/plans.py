"""Plans: the executed plan and the charged plan are derived from a spec by the same function.

A plan follows from the spec alone, before any data is read. A whole run can therefore be registered
in advance, and the cost of the next run can be computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import singledispatch

from dp_core.config.privacy import UnitConfig, refuse_large_delta
from dp_core.config.training import OptimizerConfig
from dp_core.errors import BadInput
from dp_core.phrases import ngram_release as phrases
from dp_core.privacy.accounting.calibration import least_error, with_bands
from dp_core.privacy.batch_selection import sampling_law
from dp_core.privacy.execution_plan import (
    AdaptiveClipping,
    BatchPhase,
    ExecutionPlan,
    growing_batches,
)
from dp_core.privacy.ledger import Entry
from dp_core.privacy.matrix_factorization import Workload
from dp_core.privacy.mechanisms import MechanismEvent, NeighboringRelation, PrivacyUnit, under
from dp_core.privacy.private_selection import selection_of
from dp_core.vocabulary.partition_selection import PartitionSelection
from dp_core.vocabulary.selection_calibration import selection_plan
from tasks.protocol import (
    Charged,
    FinetuneSpec,
    PhrasesSpec,
    PretrainSpec,
    ReleaseRecord,
    SelectSpec,
    VocabularySpec,
)

_COUNT_NOISE = 1 / 20  # of the expected batch: Andrew et al. 2021, section 3


def planned_release(spec: Charged) -> Entry:
    """Return the ledger entry of the release that a step with this spec makes, as a plan.

    It follows from the spec alone, before any data is read. `charge` compares it with the input.

    Raises:
        BadInput: a plan that contradicts itself, a target that no noise reaches, a δ that is not
            below one in the declared number of units, or models to be kept that its one charge
            does not cover.
    """
    planned = _planned(spec)
    refuse_large_deltas([planned])
    return planned


@singledispatch
def _planned(spec: Charged) -> Entry:
    raise AssertionError(f"the step {spec.step} charges nothing")


@_planned.register
def _(spec: VocabularySpec) -> Entry:
    plan = vocabulary_plan(spec)
    event = under(plan.event(), NeighboringRelation(spec.relation), plan.delta)
    assert event is not None  # noqa: S101 - a selection is converted to every relation
    return _entry(spec, spec.dataset, spec.config, event, event.stated_delta(plan.delta))


@_planned.register
def _(spec: PhrasesSpec) -> Entry:
    plan = phrase_plan(spec)
    return _entry(spec, spec.dataset, spec.config, plan.event(), plan.delta)


@_planned.register
def _(spec: PretrainSpec) -> Entry:
    charged = spec.charged_as
    made, plan = training_plan(charged), charged.private_plan
    event = made.event()
    if spec.kept_updates and not event.covers_every_iterate:
        raise BadInput(
            f"one charge of {event.kind} covers the last model alone, and not those before it",
            where="kept_updates",
            fix="Keep the last model alone, or train for fewer epochs, as a separate charge.",
        )
    return _entry(charged, plan.dataset, plan, event, made.delta, made.declared_units)


@_planned.register
def _(spec: FinetuneSpec) -> Entry:
    made = training_plan(spec)
    return Entry(  # its examples are labelled sentences or texts, which have no fixed length
        spec.private_plan.dataset,
        made.unit,
        made.event(),
        made.delta,
        spec.digest(),
        declared_units=made.declared_units,
    )


@_planned.register
def _(spec: SelectSpec) -> Entry:
    points = [planned_release(candidate) for candidate in spec.candidates]
    alike = {
        (point.dataset, point.event.unit_in_words, point.declared_units, point.delta)
        for point in points
    }
    if len(alike) > 1:
        raise BadInput(
            "the candidates are of several data sets, units, declared bounds or δ",
            where="select spec",
        )
    law, mean = spec.selection.selection_law, spec.selection.selection_mean
    event = selection_of([point.event for point in points], law, mean, spec.delta)
    plan, first = spec.candidates[0].private_plan, points[0]
    return _entry(spec, first.dataset, plan, event, spec.delta, first.declared_units)


def _entry(
    spec: Charged,
    dataset: str,
    units: UnitConfig,
    event: MechanismEvent,
    delta: float,
    declared_units: int = 0,
) -> Entry:
    unit = PrivacyUnit(units.unit)
    return Entry(
        dataset,
        unit,
        event.stating(unit, units.example_words),
        delta,
        spec.digest(),
        declared_units=declared_units or units.declared_units,
    )


def refuse_large_deltas(planned: Iterable[Entry], inherited: Iterable[ReleaseRecord] = ()) -> None:
    """Refuse releases whose total δ for a data set is not below one in its number of units.

    A step checks its release together with the releases of its inputs. A run's first step checks
    the whole run. All points of a sweep count, because they are released together.

    Args:
        planned: the releases to be charged.
        inherited: the earlier releases of their inputs; duplicates count once.

    Raises:
        PlanError: the total δ is 1/n or more.
    """
    planned, inherited = list(planned), {r.ledger_id: r for r in inherited}.values()
    for dataset in dict.fromkeys(release.dataset for release in planned):
        every: list[Entry | ReleaseRecord] = [*planned, *inherited]
        own = [r for r in every if r.dataset == dataset]
        units = max(r.declared_units for r in own)
        refuse_large_delta((r.delta for r in own), units, f"δ of the data set {dataset}")


def vocabulary_plan(spec: VocabularySpec) -> PartitionSelection:
    """Return the mechanism that releases a vocabulary's words, calibrated.

    Raises:
        PlanError: the paper's mechanism has no guarantee for this number of units.
    """
    config = spec.config
    return selection_plan(
        config.vocabulary_mechanism,
        config.vocabulary_epsilon,
        config.vocabulary_delta,
        config.words_per_unit,
        unit=PrivacyUnit(config.unit),
        declared_units=config.declared_units,
    )


def phrase_plan(spec: PhrasesSpec) -> phrases.PhrasePlan:
    """Return the mechanism of all rounds of a phrase release, calibrated together."""
    config = spec.config
    return phrases.calibrate(
        config.phrases_epsilon,
        config.phrases_delta,
        config.lengths,
        config.phrases_per_unit,
        unit=PrivacyUnit(config.unit),
        declared_units=config.declared_units,
    )


def training_plan(
    spec: PretrainSpec | FinetuneSpec, max_examples_per_unit: int | None = None
) -> ExecutionPlan:
    """Return the plan of a private training.

    Args:
        spec: with a privacy plan.
        max_examples_per_unit: rows per unit in the token store, if it exists already.
    """
    plan, batches = spec.private_plan, spec.batches
    rows = [batches.examples_per_step, max_examples_per_unit]
    if plan.unit == "example":
        rows.append(1)  # the unit `example` is a single row
    schedule: tuple[BatchPhase, ...] = (BatchPhase(spec.updates, batches.batch_size),)
    if batches.first_batch_size:
        schedule = growing_batches(batches.first_batch_size, batches.batch_size, spec.updates)
    cap = {"cap": plan.batch_cap} if plan.batch_cap else {}
    adaptive = None
    if plan.clipping == "adaptive":
        adaptive = AdaptiveClipping(plan.clip_quantile, _COUNT_NOISE * batches.batch_size)
    made = ExecutionPlan(
        unit=PrivacyUnit(plan.unit),
        declared_units=plan.all_units,
        sampling=sampling_law(plan.sampling, **cap),
        clip_norm=plan.clip_norm,
        noise_multiplier=plan.noise_multiplier,
        schedule=schedule,
        delta=plan.delta,
        examples_per_step=min(n for n in rows if n is not None),
        maskings_per_example=batches.maskings_per_example,
        max_examples_per_unit=max_examples_per_unit,
        clipping="automatic" if plan.clipping == "automatic" else "flat",
        adaptive=adaptive,
    )
    if plan.noise_bands == 1:
        return made
    workload = _workload(spec.training, spec.updates)
    if not plan.noise_bands:
        return least_error(made, workload)
    return with_bands(made, plan.noise_bands, workload)


def _workload(optimizer: OptimizerConfig, updates: int) -> Workload:
    rates = (optimizer.learning_rate_at(t, updates) for t in range(updates))
    return Workload(tuple(rates), optimizer.beta1)


def plan_until(plan: ExecutionPlan, updates: int) -> ExecutionPlan:
    """Return the plan's first updates, 1 or more, by the same sampling and schedule."""
    phases: list[BatchPhase] = []
    left = updates
    for phase in plan.schedule:
        if left > 0:
            phases.append(BatchPhase(min(left, phase.steps), phase.expected_batch))
            left -= phase.steps
    return dataclasses.replace(plan, schedule=tuple(phases))
