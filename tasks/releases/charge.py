"""Releases of private data: reserved in the ledger, with a seed of their own, before any reading.

The seed is bound to a manifest (`tasks.releases.manifest`): keyed digests of the inputs' content,
the plan, and the code. If anything in it differs, what was begun cannot go on: it is a new release,
with a new seed, and is charged as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from dp_core.errors import BadInput, ConfideError
from dp_core.privacy.accounting import epsilon_pld, epsilon_rdp
from dp_core.privacy.ledger import Entry, Ledger, Reservation
from dp_core.privacy.mechanisms import MechanismEvent, PrivacyUnit, Unaccounted
from dp_core.privacy.seed_store import PrivacySeed
from tasks.context import StepContext
from tasks.protocol import Charged, ReleaseRecord
from tasks.releases.ledger import ledger_for
from tasks.releases.plans import PlannedRelease, planned_release, refuse_large_deltas
from tasks.releases.provenance import PrivateUnits, refuse_operator_ancestors
from tasks.releases.restored_state import confirm_releases
from tasks.runtime.log import log


@dataclass(frozen=True)
class Charge:
    """A release that may be made now: its entry, and the secret seed of its noise."""

    context: StepContext
    ledger: Ledger
    entry: Entry
    seed: PrivacySeed
    declared_units: int

    def settle(self, content: bytes) -> ReleaseRecord:
        """Record what is released; return the record that travels with it.

        Args:
            content: `weights_released` or `counts_released`, of what is handed out after this.

        Raises:
            BadInput: something else was released under the same noise before.
        """
        entry = self.ledger.settle(self.entry.id, self.seed.derive("released", content))
        return _recorded(self.context, entry, self.declared_units, self.seed.known)


def reservations_of(charged: Iterable[Charged], run: str = "") -> dict[str, list[Reservation]]:
    """Return the reservations of a run's releases, by data set; each data set has its own plan.

    Args:
        charged: specs of the charged steps.
        run: key of the run; empty for a run that is only asked about.

    Raises:
        BadInput: as `planned_release`; or the δ of all releases of a data set is not below one in
            the declared number of units.
    """
    planned = {spec.digest(): planned_release(spec) for spec in charged}
    refuse_large_deltas(planned.values())
    plans: dict[str, list[Reservation]] = {}
    for spec_hash, release in planned.items():
        plan_key = f"{run} · {release.dataset}" if run else ""
        reservation = Reservation(
            release.dataset, release.unit, release.event, release.delta, spec_hash, plan_key, run
        )
        plans.setdefault(release.dataset, []).append(reservation)
    return plans


def refuse_unfit_plans(context: StepContext, charged: Iterable[Charged]) -> None:
    """Refuse a run whose releases do not fit, before it reads anything; nothing is registered.

    Raises:
        BudgetExceeded, BadInput: as `register_plans`.
    """
    for name, plan in reservations_of(charged, context.run.run_key).items():
        ledger_for(context, name).refuse_unfit(plan, context.run.has_ended)


def register_plans(context: StepContext, charged: Iterable[Charged]) -> list[Entry]:
    """Register every release of a run before the first: all of it fits, or nothing is charged.

    Args:
        context: of the step that registers.
        charged: specs of all charged steps of the run.

    Raises:
        BudgetExceeded: it does not fit; nothing changed.
        BadInput: as `reservations_of`; or a data set is not registered, or registered for
            something else.
    """
    entries: list[Entry] = []
    registered: list[tuple[Ledger, str, str]] = []
    for name, plan in reservations_of(charged, context.run.run_key).items():
        ledger = ledger_for(context, name)
        try:
            entries += ledger.register_plan(plan, context.run.has_ended)
        except ConfideError:
            for earlier, dataset, plan_key in registered:  # nothing of it has begun
                with suppress(BadInput):  # all of its releases were registered before
                    earlier.withdraw_plan(dataset, plan_key)
            raise
        registered.append((ledger, name, plan[0].plan_key))
    return entries


def charge(
    context: StepContext,
    units: PrivateUnits,
    planned: PlannedRelease,
    *,
    content: bytes,
    charged_as: str = "",
) -> Charge:
    """Reserve a release; return it with its seed, bound to the manifest `content`.

    What the run registered beforehand is found, and not charged again. Of the plan, only the
    mechanism counts: data set, unit and bound are those of the input that is read.

    Args:
        context: of the step; every input has been opened.
        units: that are read, as provenance derived them.
        planned: what the spec says will be charged.
        content: the manifest.
        charged_as: spec hash that the entry was registered under; by default the step's own.

    Raises:
        BudgetExceeded: it does not fit the data set's budget.
        BadInput: the plan is for other units; an input may not be released at all; δ in total is
            not below one in the units; the data set is not registered, or for something else.
    """
    units.refuse_other(planned)
    refuse_operator_ancestors(context)
    refuse_large_deltas([planned], context.releases)
    ledger = ledger_for(context, units.dataset)
    confirm_releases(ledger, context.releases, f"the inputs of {context.run.task}")
    for attempt in count():
        unit = units.unit or planned.unit
        entry = ledger.reserve(
            _reservation(
                context, units.dataset, unit, planned.event, planned.delta, attempt, charged_as
            )
        )
        if _may_continue(context, entry, content):
            seed = ledger.seed(entry, context.seeds, content)
            return Charge(context, ledger, entry, seed, planned.declared_units)
        log("an earlier attempt had other inputs or code: a new release, charged as one", "warning")
    raise AssertionError("count() does not end")


def record_operator_use(
    context: StepContext, units: PrivateUnits, *, reason: str = "training without privacy"
) -> ReleaseRecord:
    """List a use of private data without any guarantee; it stays with the operator.

    The output, and whatever descends from it, carries the record: its ε is infinite.
    """
    ledger = ledger_for(context, units.dataset)
    confirm_releases(ledger, context.releases, f"the inputs of {context.run.task}")
    if units.unit is None:
        raise BadInput("nobody has chosen its unit", where=units.dataset)
    unit = units.unit
    event = Unaccounted(reason, unit=unit)
    entry = ledger.reserve(_reservation(context, units.dataset, unit, event, 0.0))
    ledger.settle(entry.id)
    return _recorded(context, entry)


def _reservation(
    context: StepContext,
    dataset: str,
    unit: PrivacyUnit,
    event: MechanismEvent,
    delta: float,
    attempt: int = 0,
    charged_as: str = "",
) -> Reservation:
    run, spec_hash = context.run.run_key, charged_as or context.spec_hash
    return Reservation(dataset, unit, event, delta, spec_hash, run, run, attempt)


def _recorded(
    context: StepContext, entry: Entry, declared_units: int = 0, seed_known: bool = False
) -> ReleaseRecord:
    """Return a settled release as a record, which the step's output carries from now on."""
    record = ReleaseRecord(
        ledger_id=entry.id,
        dataset=entry.dataset,
        unit=entry.unit.value,
        event=entry.event.to_json(),
        epsilon=epsilon_pld(entry.event, entry.delta) if entry.accounted else math.inf,
        epsilon_rdp=epsilon_rdp(entry.event, entry.delta) if entry.accounted else None,
        delta=entry.delta,
        plan=entry.plan_key if entry.accounted and entry.whole_plan else "",
        declared_units=declared_units,
        released=entry.released_hash,
        seed_known=seed_known,
    )
    context.descends_from(record)
    return record


def _may_continue(context: StepContext, entry: Entry, content: bytes) -> bool:
    if not entry.seed_hash:
        return True
    try:
        seed = context.seeds.get(entry.seed_key)
    except BadInput:
        return False  # the seed is lost, and with it the noise that was begun
    return entry.is_bound_to(seed, content)
