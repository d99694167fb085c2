"""Releases of private data: reserved in the ledger, with a seed of their own, before any reading.

The seed is bound to a manifest (`tasks.releases.manifest`): keyed digests of the inputs' content,
the plan, and the code. If anything in it differs, what was begun cannot go on: it is a new release,
with a new seed, and is charged as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from dp_core.errors import BadInput, ConfideError
from dp_core.privacy.accounting import epsilon_pld, epsilon_rdp
from dp_core.privacy.ledger import Budget, Entry, Ledger, Reservation
from dp_core.privacy.mechanisms import Unaccounted
from dp_core.privacy.seed_store import PrivacySeed
from tasks.protocol import ReleaseRecord
from tasks.releases.ledger_identity import open_ledger
from tasks.releases.plans import PlannedRelease, refuse_large_deltas
from tasks.releases.provenance import PrivateUnits, refuse_operator_ancestors
from tasks.runtime.context import StepContext
from tasks.runtime.messages import say

MADE_UP = "synthetic-notes"  # the settings keep this name for the project's own notes


@dataclass(frozen=True)
class Charge:
    """A release that may be made now: its entry, and the secret seed of its noise."""

    bench: StepContext
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
        self.ledger.settle(self.entry.id, self.seed.derive("released", content))
        event, delta = self.entry.event, self.entry.delta
        record = ReleaseRecord(
            ledger_id=self.entry.id,
            dataset=self.entry.dataset,
            unit=self.entry.unit.value,
            event=event.to_json(),
            epsilon=epsilon_pld(event, delta),
            epsilon_rdp=epsilon_rdp(event, delta),
            delta=delta,
            plan=self.entry.plan_key if self.entry.whole_plan else "",
            declared_units=self.declared_units,
            seed_known=self.seed.known,
        )
        self.bench.descends_from(record)
        return record


def register_plan(bench: StepContext, planned: Mapping[str, PlannedRelease]) -> list[Entry]:
    """Register every release of a run before the first: all of it fits, or nothing is charged.

    Args:
        bench: of the step that registers.
        planned: spec hash of each step -> what it will charge.

    Raises:
        BudgetExceeded: it does not fit; nothing changed.
        BadInput: a data set is not registered, or registered for something else; or the δ of all
            of it is not below one in the declared number of units.
    """
    refuse_large_deltas(planned.values())
    datasets = dict.fromkeys(release.dataset for release in planned.values())
    plans = {name: _plan_of(bench, name, planned) for name in datasets}
    entries: list[Entry] = []
    done: list[tuple[Ledger, str, str]] = []
    for name, reservations in plans.items():
        ledger = ledger_for(bench, name)
        try:
            entries += ledger.register_plan(reservations)
        except ConfideError:
            for earlier, dataset, plan_key in done:  # nothing of it has begun
                with suppress(BadInput):  # it was all there before
                    earlier.withdraw_plan(dataset, plan_key)
            raise
        done.append((ledger, name, reservations[0].plan_key))
    return entries


def _plan_of(
    bench: StepContext, dataset: str, planned: Mapping[str, PlannedRelease]
) -> list[Reservation]:
    run = bench.context.run_key
    return [
        Reservation(
            dataset=dataset,
            unit=release.unit,
            event=release.event,
            delta=release.delta,
            spec_hash=spec_hash,
            plan_key=f"{run} · {dataset}",  # data sets that share a budget are plans of their own
            run=run,
        )
        for spec_hash, release in planned.items()
        if release.dataset == dataset
    ]


def charge(
    bench: StepContext, units: PrivateUnits, planned: PlannedRelease, *, content: bytes
) -> Charge:
    """Reserve a release; return it with its seed, bound to the manifest `content`.

    What the run registered beforehand is found, and not charged again. Of the plan, only the
    mechanism counts: data set, unit and bound are those of the input that is read.

    Args:
        bench: of the step; every input has been opened.
        units: that are read, as provenance derived them.
        planned: what the spec says will be charged.
        content: the manifest.

    Raises:
        BudgetExceeded: it does not fit the data set's budget.
        BadInput: the plan is for other units; an input may not be released at all; δ in total is
            not below one in the units; the data set is not registered, or for something else.
    """
    units.refuse_other(planned)
    refuse_operator_ancestors(bench)
    refuse_large_deltas([planned], bench.releases)
    ledger = ledger_for(bench, units.dataset)
    for attempt in count():
        reservation = Reservation(
            dataset=units.dataset,
            unit=units.unit or planned.unit,
            event=planned.event,
            delta=planned.delta,
            spec_hash=bench.spec_hash,
            plan_key=bench.context.run_key,
            run=bench.context.run_key,
            attempt=attempt,
        )
        entry = ledger.reserve(reservation)
        if _may_continue(bench, entry, content):
            seed = ledger.seed(entry, bench.seeds, content)
            return Charge(bench, ledger, entry, seed, planned.declared_units)
        say("an earlier attempt had other inputs or code: a new release, charged as one", "warning")
    raise AssertionError("count() does not end")


def record_operator_use(
    bench: StepContext, units: PrivateUnits, *, reason: str = "training without privacy"
) -> ReleaseRecord:
    """List a use of private data without any guarantee; it stays with the operator.

    The output, and whatever descends from it, carries the record: its ε is infinite.
    """
    ledger = ledger_for(bench, units.dataset)
    if units.unit is None:
        raise BadInput("nobody has chosen its unit", where=units.dataset)
    unit = units.unit
    entry = ledger.reserve(
        Reservation(
            dataset=units.dataset,
            unit=unit,
            event=Unaccounted(reason, unit=unit),
            delta=0.0,
            spec_hash=bench.spec_hash,
            plan_key=bench.context.run_key,
            run=bench.context.run_key,
        )
    )
    ledger.settle(entry.id)
    record = ReleaseRecord(
        ledger_id=entry.id,
        dataset=units.dataset,
        unit=unit.value,
        event=entry.event.to_json(),
        epsilon=math.inf,
        epsilon_rdp=None,
        delta=0.0,
    )
    bench.descends_from(record)
    return record


def _may_continue(bench: StepContext, entry: Entry, content: bytes) -> bool:
    if not entry.seed_hash:
        return True
    try:
        seed = bench.seeds.get(entry.seed_key)
    except BadInput:
        return False  # the seed is lost, and with it the noise that was begun
    return entry.is_bound_to(seed, content)


def ledger_for(bench: StepContext, dataset: str) -> Ledger:
    """Return the ledger, in which the data set is registered as what the run says it is.

    A run registers nothing but the project's own notes: what is public, the operator says.

    Raises:
        BadInput: it is not registered; or registered as public and called private, or the other
            way round; or the ledger is not the one that seeds and store remember.
    """
    ledger = refuse_unregistered(bench, dataset)
    if dataset == MADE_UP and dataset not in ledger.datasets():
        ledger.register_made_up(dataset)
    return ledger


def refuse_unregistered(bench: StepContext, dataset: str) -> Ledger:
    """Check that the data set is registered as what the run says it is; only read the ledger.

    The project's own notes may be registered later, by who may write.

    Raises:
        BadInput: as `ledger_for`.
    """
    ledger = open_ledger(bench.deployment, bench.store)
    if dataset != MADE_UP:
        standing = ledger.datasets().get(dataset)
        refuse_another_standing(standing, dataset, made_up=bench.made_up)
    return ledger


def refuse_another_standing(budget: Budget | None, dataset: str, *, made_up: bool) -> None:
    """Refuse a data set that is not registered as what a run says it is: private or public.

    Raises:
        BadInput: says which command the operator runs.
    """
    if dataset == MADE_UP and budget is not None:
        return  # no file is ever read under that name as private: tasks/releases/declarations.py
    if budget is None and made_up:
        raise BadInput(
            f"nobody has registered the data set {dataset} as public, as this run calls it",
            where="ledger",
            fix=f"If it is, the operator says so: confide ledger register {dataset} --public",
        )
    if budget is None:
        raise BadInput(
            f"the data set {dataset} has no privacy budget yet",
            where="ledger",
            fix=f"Set one: confide ledger register {dataset} --unit … --epsilon … --delta …",
        )
    if made_up and not budget.made_up:
        raise BadInput(
            f"the data set {dataset} is registered as private, but this run calls it public",
            where="ledger",
            fix="A budget is declared once: leave all_public unset.",
        )
    if budget.made_up and not made_up:
        raise BadInput(
            f"the data set {dataset} is registered as made up or public, but this run calls it "
            "private",
            where="ledger",
            fix="Give the private data set a name of its own.",
        )
