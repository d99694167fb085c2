"""Charges: each release of private data is reserved in the ledger before the data is read.

Each release has a separate seed, bound to a manifest (`tasks.releases.manifest`): keyed digests of
the inputs' content, the plan, and the code. If the manifest differs on a retry, the release cannot
continue. A new release with a new seed is then made and charged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from dp_core.errors import BadInput, ConfideError
from dp_core.privacy.ledger import Entry, Ledger
from dp_core.privacy.mechanisms import Unaccounted
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.privacy.statement import epsilons
from tasks.context import StepContext
from tasks.protocol import Charged, ReleaseRecord
from tasks.releases.deployment_ledger import confirm_releases, ledger_for
from tasks.releases.plans import planned_release, refuse_large_deltas
from tasks.releases.provenance import PrivateUnits, refuse_operator_ancestors
from tasks.runtime.log import log


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
        return _recorded(self.context, entry)


def plans_of(charged: Iterable[Charged], run: str = "") -> dict[str, list[Entry]]:
    """Return the planned releases of a run, by data set; each data set has its own plan.

    Args:
        charged: specs of the charged steps.
        run: key of the run; empty for a query about a run.

    Raises:
        BadInput: as `planned_release`; or the δ of all releases of a data set is not below one in
            the declared number of units.
    """
    planned = {spec.digest(): planned_release(spec) for spec in charged}.values()
    refuse_large_deltas(planned)
    plans: dict[str, list[Entry]] = {}
    for release in planned:
        release.run, release.plan_key = run, run and f"{run} · {release.dataset}"
        plans.setdefault(release.dataset, []).append(release)
    return plans


def refuse_unfit_plans(context: StepContext, charged: Iterable[Charged]) -> None:
    """Refuse a run whose releases do not fit, before it reads any data; nothing is registered.

    Raises:
        BudgetExceeded, BadInput: as `register_plans`.
    """
    for name, plan in plans_of(charged, context.run.run_key).items():
        ledger_for(context, name).refuse_unfit(plan, context.run.has_ended)


def register_plans(context: StepContext, charged: Iterable[Charged]) -> list[Entry]:
    """Register every release of a run before the first one; if one does not fit, charge none.

    Args:
        context: of the step that registers.
        charged: specs of all charged steps of the run.

    Raises:
        BudgetExceeded: the run does not fit; nothing changed.
        BadInput: as `plans_of`; or a data set is not registered, or registered differently.
    """
    entries: list[Entry] = []
    for name, plan in plans_of(charged, context.run.run_key).items():
        ledger = ledger_for(context, name)
        try:
            entries += ledger.register_plan(plan, context.run.has_ended)
        except ConfideError:
            ledger.give_back(context.run.run_key)  # plans of other data sets: none has begun
            raise
    return entries


def charge(
    context: StepContext,
    units: PrivateUnits,
    planned: Entry,
    *,
    content: bytes,
) -> Charge:
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
    refuse_large_deltas([planned], context.releases)
    ledger = ledger_for(context, units.dataset)
    confirm_releases(ledger, context.releases, f"the inputs of {context.run.task}")
    for attempt in count():
        entry = ledger.reserve(planned.repeated(context.run.run_key, attempt))
        if _may_continue(context, entry, content):
            return Charge(context, ledger, entry, ledger.seed(entry, context.seeds, content))
        log("an earlier attempt had other inputs or code: a new release, charged as one", "warning")
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
    return _recorded(context, ledger.settle(entry.id))


def _recorded(context: StepContext, entry: Entry) -> ReleaseRecord:
    """Return the record of a settled release, and add it to the ancestry of the step's output."""
    by_pld, by_rdp = epsilons(entry.event, entry.delta)
    record = ReleaseRecord(
        ledger_id=entry.id,
        dataset=entry.dataset,
        unit=entry.unit.value,
        event=entry.event.to_json(),
        epsilon=by_pld,
        epsilon_rdp=by_rdp,
        delta=entry.delta,
        plan=entry.plan_key if entry.accounted and entry.whole_plan else "",
        declared_units=entry.declared_units,
        released=entry.released_hash,
        seed_known=entry.known_seed,
    )
    context.descends_from(record)
    return record


def _may_continue(context: StepContext, entry: Entry, content: bytes) -> bool:
    if not entry.seed_hash:
        return True
    try:
        seed = context.seeds.get(entry.seed_key)
    except BadInput:
        return False  # the noise cannot be drawn again without the lost seed
    return entry.is_bound_to(seed, content)
