"""Charges: the plan of each release, and its reservation in the ledger before the data is read.

The executed plan and the charged plan follow from a step's spec by the same function, before any
data is read. A whole run can therefore be registered in advance, and the cost of the next run can
be computed.

Each release has a separate seed, bound to a manifest (`tasks.releases.manifest`): keyed digests of
the inputs' content, the plan, and the code. If the manifest differs on a retry, the release cannot
continue. A new release with a new seed is then made and charged.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from dp_core.config.privacy import UnitConfig, refuse_large_delta
from dp_core.config.release import ReleaseRecord
from dp_core.errors import BadInput, ConfideError
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.accounting.calibration import least_error, noise_for, round_up, with_bands
from dp_core.privacy.batch_selection import PoissonSampling, TruncatedPoissonSampling
from dp_core.privacy.execution_plan import (
    AdaptiveClipping,
    BatchPhase,
    ExecutionPlan,
    growing_batches,
)
from dp_core.privacy.ledger import Budget, Entry, Ledger
from dp_core.privacy.matrix_factorization import Workload
from dp_core.privacy.mechanisms import MechanismEvent, PrivacyUnit, Unaccounted, compose
from dp_core.privacy.private_selection import selection_of
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.privacy.statement import epsilons
from dp_core.vocabulary import ngram_release as phrases
from dp_core.vocabulary.partition_selection import PartitionSelection
from dp_core.vocabulary.selection_calibration import selection_plan
from tasks.context import StepContext
from tasks.protocol import specs
from tasks.releases.deployment_ledger import confirm_releases, ledger_for, open_ledger
from tasks.releases.provenance import PrivateUnits, refuse_operator_ancestors
from tasks.runtime.log import log

MOST_NOISE = 1000.0  # largest noise multiplier of a setting; above it nothing is learned
_LABELLED = {"entities": "sentence", "classes": "text", "pairs": "pair"}  # an example, by head
_COUNT_NOISE = 1 / 20  # of the expected batch: Andrew et al. 2021, section 3


def planned_release(spec: specs.Charged) -> Entry:
    """Return the ledger entry of the release that a step with this spec makes, as a plan.

    It follows from the spec alone, before any data is read. `charge` compares it with the input.

    Raises:
        BadInput: a plan that contradicts itself or cannot be executed, a target that no noise
            reaches, a δ that is not below one in the declared number of units, or models to be kept
            that its one charge does not cover.
    """
    if isinstance(spec, specs.PretrainSpec | specs.FinetuneSpec):
        training_plan(spec).refuse_coarse_lattice()
    planned = _planned(spec)
    refuse_large_deltas({planned.dataset: [planned]})
    return planned


def _planned(spec: specs.Charged) -> Entry:
    match spec:
        case specs.VocabularySpec():
            selection = vocabulary_plan(spec)
            event, delta = selection.event(), selection.delta
            return _entry(spec, spec.dataset, spec.config, event, delta)
        case specs.PhrasesSpec():
            rounds = phrase_plan(spec)
            return _entry(spec, spec.dataset, spec.config, rounds.event(), rounds.delta)
        case specs.PretrainSpec():
            return _planned_training(spec)
        case specs.FinetuneSpec():
            made, plan = training_plan(spec), spec.private_plan
            return _entry(spec, plan.dataset, plan, made.event(), made.delta, made.declared_units)
        case specs.SelectSpec():
            return _planned_selection(spec)
    raise AssertionError(f"the step {spec.step} charges nothing")


def _planned_training(spec: specs.PretrainSpec) -> Entry:
    charged = spec.charged_as
    made, plan = training_plan(charged), charged.private_plan
    event = made.event()
    if spec.kept_updates and not event.covers_every_iterate:
        what = f"one charge of {event.kind} covers the last model alone, and not those before it"
        fix = "Keep the last model alone, or train for fewer epochs, as a separate charge."
        raise BadInput(what, where="kept_updates", fix=fix)
    return _entry(charged, plan.dataset, plan, event, made.delta, made.declared_units)


def _planned_selection(spec: specs.SelectSpec) -> Entry:
    points = [planned_release(candidate) for candidate in spec.candidates]
    alike = {
        (point.dataset, point.event.unit_in_words, point.declared_units, point.delta)
        for point in points
    }
    if len(alike) > 1:
        what = "the candidates are of several data sets, units, declared bounds or δ"
        raise BadInput(what, where="select spec")
    law, mean = spec.selection.selection_law, spec.selection.selection_mean
    event = selection_of([point.event for point in points], law, mean, spec.delta)
    plan, first = spec.candidates[0].private_plan, points[0]
    return _entry(spec, first.dataset, plan, event, spec.delta, first.declared_units)


def _entry(
    spec: specs.Charged,
    dataset: str,
    units: UnitConfig,
    event: MechanismEvent,
    delta: float,
    declared_units: int = 0,
) -> Entry:
    return Entry(
        dataset,
        PrivacyUnit(units.unit),
        _with_unit(spec, event, units),
        delta,
        spec.digest(),
        declared_units=declared_units or units.declared_units,
    )


def _with_unit(spec: specs.Charged, event: MechanismEvent, units: UnitConfig) -> MechanismEvent:
    """Return the event with its unit: an example of labels is one sentence, text or pair."""
    example = units.example
    if example and isinstance(spec, specs.FinetuneSpec):
        example = f"one labelled {_LABELLED[spec.head]}"
    return event.stating(PrivacyUnit(units.unit), example)


def refuse_large_deltas(
    plans: Mapping[str, Iterable[Entry]], inherited: Iterable[ReleaseRecord] = ()
) -> None:
    """Refuse releases whose total δ under a budget is not below one in the number of units.

    A step checks its release together with the releases of its inputs. A run's first step checks
    the whole run. All points of a sweep count, because they are released together.

    Args:
        plans: the releases to be charged, by the name of their budget.
        inherited: the earlier releases of their inputs; duplicates count once.

    Raises:
        PlanError: the total δ is 1/n or more.
    """
    inherited = {r.ledger_id: r for r in inherited}.values()
    for budget, plan in plans.items():
        inputs = (r for r in inherited if r.budget == budget)
        releases: list[Entry | ReleaseRecord] = [*plan, *inputs]
        units = max(r.declared_units for r in releases)
        refuse_large_delta((r.delta for r in releases), units, f"δ under the budget of {budget}")


def _by_budget(planned: Iterable[Entry], budgets: Mapping[str, Budget]) -> dict[str, list[Entry]]:
    """Return releases by the name of their budget; a data set without one shares none."""
    plans: dict[str, list[Entry]] = {}
    for release in planned:
        budget = budgets.get(release.dataset)
        plans.setdefault(budget.name if budget else release.dataset, []).append(release)
    return plans


def vocabulary_plan(spec: specs.VocabularySpec) -> PartitionSelection:
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


def phrase_plan(spec: specs.PhrasesSpec) -> phrases.PhrasePlan:
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
    spec: specs.PretrainSpec | specs.FinetuneSpec, max_examples_per_unit: int | None = None
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
    cap = plan.batch_cap  # above 0 for truncated batches alone
    adaptive = None
    if plan.clipping == "adaptive":
        adaptive = AdaptiveClipping(plan.clip_quantile, _COUNT_NOISE * batches.batch_size)
    made = ExecutionPlan(
        unit=PrivacyUnit(plan.unit),
        declared_units=plan.all_units,
        sampling=TruncatedPoissonSampling(cap) if cap else PoissonSampling(),
        clip_norm=plan.clip_norm,
        noise_multiplier=_noise_multiplier(spec),
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
    rates = (spec.training.learning_rate_at(t, spec.updates) for t in range(spec.updates))
    workload = Workload(tuple(rates), spec.training.beta1)
    if not plan.noise_bands:
        return least_error(made, workload)
    return with_bands(made, plan.noise_bands, workload)


def _noise_multiplier(spec: specs.PretrainSpec | specs.FinetuneSpec) -> float:
    """Return σ of a private training: as its plan states it, or calibrated to its target."""
    sigma = spec.private_plan.noise_multiplier
    if sigma is not None:
        return sigma
    if spec.target is None:
        raise BadInput("neither σ nor a target", where="training spec")
    others = map(planned_release, spec.target.alongside)
    return calibrated_noise(spec, spec.target.epsilon, others)


def calibrated_noise(
    spec: specs.PretrainSpec | specs.FinetuneSpec, epsilon: float, alongside: Iterable[Entry]
) -> float:
    """Return the least σ at which a training and other releases together cost at most ε.

    ε is by PLD, at the sum of the releases' δ. If the plan chooses its bands, σ is first computed
    for one band, and raised as long as the chosen bands compose to more than ε.

    Args:
        spec: the training; its σ and target have no part in this.
        epsilon: ε of all these releases.
        alongside: planned releases from the same data set.

    Raises:
        BadInput: the other releases exhaust ε, or nothing would be learned at such a σ.
    """
    others = list(alongside)
    return _calibrated(
        spec.model_copy(update={"target": None}),
        epsilon,
        tuple(release.event for release in others),
        math.fsum([spec.private_plan.delta, *(release.delta for release in others)]),
    )


@functools.lru_cache(maxsize=64)
def _calibrated(
    spec: specs.PretrainSpec | specs.FinetuneSpec,
    epsilon: float,
    others: tuple[MechanismEvent, ...],
    delta: float,
) -> float:
    def event_at(sigma: float, **changes: Any) -> MechanismEvent:
        plan = spec.private_plan.model_copy(update={"noise_multiplier": sigma, **changes})
        event = training_plan(spec.model_copy(update={"plan": plan})).event()
        return _with_unit(spec, event, plan)

    bands = spec.private_plan.noise_bands
    # A learned clip norm has the same event, but a plan of it refuses a small σ.
    alike = {"noise_bands": bands or 1, "clipping": "flat"}
    sigma = noise_for(lambda sigma: event_at(sigma, **alike), epsilon, delta, others)
    # Bands are chosen at the ε of the training, and their loss composes slightly differently.
    while not bands and sigma <= MOST_NOISE:
        spent = epsilon_pld(compose(*others, event_at(sigma)), delta)
        if spent <= epsilon:
            break
        sigma = round_up(sigma * max(spent / epsilon, 1 + 1e-4))
    if sigma > MOST_NOISE:
        raise BadInput(
            f"ε={epsilon:g} needs a noise multiplier of {sigma:g}, and a run takes "
            f"{MOST_NOISE:g} at most: nothing would be learned",
            where="target_epsilon" if spec.step == "pretrain" else "finetune_epsilon",
            fix="Choose a larger ε or fewer epochs, or train on public text alone.",
        )
    return sigma


def plan_until(plan: ExecutionPlan, updates: int) -> ExecutionPlan:
    """Return the plan's first updates, 1 or more, by the same sampling and schedule."""
    phases: list[BatchPhase] = []
    left = updates
    for phase in plan.schedule:
        if left > 0:
            phases.append(BatchPhase(min(left, phase.steps), phase.expected_batch))
            left -= phase.steps
    return dataclasses.replace(plan, schedule=tuple(phases))


# --- the charge


@dataclass(frozen=True)
class Charge:
    """A reserved release: its ledger entry, and the secret seed of its noise."""

    context: StepContext
    ledger: Ledger
    entry: Entry
    seed: PrivacySeed

    def settle(self, content: bytes) -> ReleaseRecord:
        """Settle the release; return the record that its output carries.

        Args:
            content: `weights_released` or `counts_released` of the output.

        Raises:
            BadInput: a different output was released under the same noise before.
        """
        entry = self.ledger.settle(self.entry.id, self.seed.derive("released", content))
        return _recorded(self.context, self.ledger, entry)


def plans_of(
    charged: Iterable[specs.Charged], budgets: Mapping[str, Budget], run: str = ""
) -> dict[str, list[Entry]]:
    """Return the planned releases of a run by the name of their budget, each with its own plan.

    Args:
        charged: specs of the charged steps.
        budgets: the registered budgets by data set.
        run: key of the run; empty for a query about a run.

    Raises:
        BadInput: as `planned_release`; the δ of all releases under a budget is not below one in
            the declared number of units; or a target ε leaves out a release under its budget.
    """
    by_hash = {spec.digest(): spec for spec in charged}
    plans = _by_budget(map(planned_release, by_hash.values()), budgets)
    refuse_large_deltas(plans)
    for budget, plan in plans.items():
        _refuse_uncounted(by_hash.values(), {release.spec_hash for release in plan}, budget)
        for release in plan:
            release.run, release.plan_key = run, run and f"{run} · {budget}"
    return plans


def _refuse_uncounted(charged: Iterable[specs.Charged], hashes: set[str], budget: str) -> None:
    """Refuse a target ε that leaves out some of the releases with these hashes under its budget."""
    for spec in charged:
        if isinstance(spec, specs.PretrainSpec) and spec.target and spec.digest() in hashes:
            counted = {part.digest() for part in (spec, *spec.target.alongside)}
            if hashes - counted:
                what = f"other releases of the run are charged to the budget of {budget}, too"
                fix = "Set noise_multiplier in its place, or give private labels another budget."
                raise BadInput(what, where="target_epsilon", fix=fix)


def refuse_unfit_plans(
    context: StepContext, charged: Iterable[specs.Charged]
) -> dict[str, list[Entry]]:
    """Return a run's plans if they fit, before it reads any data; nothing is registered.

    Raises:
        BudgetExceeded, BadInput: as `register_plans`.
    """
    ledger, plans = _plans_and_ledger(context, charged)
    for plan in plans.values():
        ledger.refuse_unfit(plan, context.run.has_ended)
    return plans


def _plans_and_ledger(
    context: StepContext, charged: Iterable[specs.Charged]
) -> tuple[Ledger, dict[str, list[Entry]]]:
    """Return the ledger and the plans of a run, whose data sets are registered as it needs them."""
    ledger = open_ledger(context.deployment, context.store)
    plans = plans_of(charged, ledger.datasets(), context.run.run_key)
    for plan in plans.values():
        for dataset in dict.fromkeys(release.dataset for release in plan):
            ledger_for(context, dataset, plan)
    return ledger, plans


def register_plans(context: StepContext, charged: Iterable[specs.Charged]) -> list[Entry]:
    """Register every release of a run before the first one; if one does not fit, charge none.

    Args:
        context: of the step that registers.
        charged: specs of all charged steps of the run.

    Raises:
        BudgetExceeded: the run does not fit; nothing changed.
        BadInput: as `plans_of`; or a data set is not registered, or registered differently.
    """
    entries: list[Entry] = []
    ledger, plans = _plans_and_ledger(context, charged)
    try:
        for plan in plans.values():
            entries += ledger.register_plan(plan, context.run.has_ended)
    except ConfideError:
        ledger.give_back(context.run.run_key)  # plans under other budgets: none has begun
        raise
    return entries


def charge(context: StepContext, units: PrivateUnits, planned: Entry, *, content: bytes) -> Charge:
    """Reserve a release; return it with its seed, bound to the manifest `content`.

    An entry that the run registered beforehand is not charged again.

    Args:
        context: of the step; every input has been opened.
        units: the private units of the input, as provenance derived them.
        planned: the planned release that follows from the spec.
        content: the manifest.

    Raises:
        BudgetExceeded: the release does not fit the data set's budget.
        BadInput: the plan is for other units; an input may not be released at all; δ in total is
            not below one in the number of units; the data set is not registered, or differently.
    """
    units.refuse_other(planned)
    refuse_operator_ancestors(context)
    ledger = ledger_for(context, units.dataset)
    refuse_large_deltas(_by_budget([planned], ledger.datasets()), context.releases)
    confirm_releases(ledger, context.releases, f"the inputs of {context.run.task}")
    for attempt in count():
        entry = ledger.reserve(planned.repeated(context.run.run_key, attempt))
        if not (changed := _changed_since(context, entry, content)):
            return Charge(context, ledger, entry, ledger.seed(entry, context.seeds, content))
        log(f"{changed}: a new release, charged as one", "warning")
    raise AssertionError("count() does not end")


def record_operator_use(
    context: StepContext, units: PrivateUnits, *, reason: str = "training without privacy"
) -> ReleaseRecord:
    """Record a use of private data without any guarantee; the output stays with the operator.

    The output and all its descendants carry the record, whose ε is infinite.
    """
    ledger = ledger_for(context, units.dataset)
    confirm_releases(ledger, context.releases, f"the inputs of {context.run.task}")
    if units.unit is None:
        raise BadInput("its unit was not chosen", where=units.dataset)
    event, run = Unaccounted(reason, unit=units.unit), context.run.run_key
    entry = ledger.reserve(
        Entry(units.dataset, units.unit, event, 0.0, context.spec_hash, run, run)
    )
    return _recorded(context, ledger, ledger.settle(entry.id))


def _recorded(context: StepContext, ledger: Ledger, entry: Entry) -> ReleaseRecord:
    """Return the record of a settled release, and add it to the ancestry of the step's output."""
    by_pld, by_rdp = epsilons(entry.event, entry.delta)
    budget = ledger.datasets()[entry.dataset]
    record = ReleaseRecord(
        ledger_id=entry.id,
        dataset=entry.dataset,
        budget=budget.name,
        unit=entry.unit.value,
        event=entry.event.to_json(),
        epsilon=by_pld,
        epsilon_rdp=by_rdp,
        delta=entry.delta,
        plan=entry.plan_key if entry.accounted and entry.whole_plan else "",
        declared_units=entry.declared_units,
        released=entry.released_hash,
        seed_known=entry.known_seed,
        of_study=budget.of_study,
    )
    context.descends_from(record)
    return record


def _changed_since(context: StepContext, entry: Entry, content: bytes) -> str:
    """Return the reason for which a release cannot continue, or an empty text.

    Raises:
        BadInput: its seed file is not lost and cannot be used; the operator can repair it.
    """
    if entry.seed_hash and entry.seed_key not in context.seeds.drawn():
        return f"the seed {entry.seed_key} of an earlier attempt is lost"
    if entry.seed_hash and not entry.is_bound_to(context.seeds.get(entry.seed_key), content):
        return "an earlier attempt had other inputs or code"
    return ""
