"""Releases of private data: reserved in the ledger, with a seed of their own, before any reading.

The seed is bound to a manifest: keyed digests of the inputs' content, the plan, and the code. If
anything in it differs, what was begun cannot go on: it is a new release, with a new seed, and is
charged as one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import count

from dp_core.errors import BadInput, ConfideError
from dp_core.privacy.accounting import epsilon_pld, epsilon_rdp
from dp_core.privacy.events import MechanismEvent, Unaccounted
from dp_core.privacy.ledger import Entry, Ledger, Reservation
from dp_core.privacy.seeds import PrivacySeed
from dp_core.privacy.units import PrivacyUnit
from tasks.deployment import CHECKOUT
from tasks.plans import PlannedRelease
from tasks.specs import ReleaseRecord
from tasks.speech import say
from tasks.workbench import Workbench

MADE_UP = "synthetic-notes"  # the settings keep this name for the project's own notes
_PACKAGES = CHECKOUT / "dp_core"


@dataclass(frozen=True)
class Charge:
    """A release that may be made now: its entry, and the secret seed of its noise."""

    ledger: Ledger
    entry: Entry
    seed: PrivacySeed

    def settle(self) -> ReleaseRecord:
        """Record that the release was made; return the record that travels with it."""
        self.ledger.settle(self.entry.id)
        event, delta = self.entry.event, self.entry.delta
        return ReleaseRecord(
            ledger_id=self.entry.id,
            dataset=self.entry.dataset,
            unit=self.entry.unit.value,
            event=event.to_json(),
            epsilon=epsilon_pld(event, delta),
            epsilon_rdp=epsilon_rdp(event, delta),
            delta=delta,
            plan=self.entry.plan_key if self.entry.whole_plan else "",
            seed_known=self.seed.known,
        )


def manifest(**parts: str | int | float | dict[str, object]) -> bytes:
    """Return everything that noise is drawn for, as canonical JSON; the code is always in it."""
    body = {**parts, "code": code_digest()}
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


@cache
def code_digest() -> str:
    """Return SHA-256 over the sources of the algorithms: the kernels' and generators' version."""
    digest = hashlib.sha256()
    for file in sorted(_PACKAGES.rglob("*.py")):
        name = file.relative_to(_PACKAGES).as_posix().encode()
        content = file.read_bytes()
        digest.update(len(name).to_bytes(4, "big") + name + len(content).to_bytes(8, "big"))
        digest.update(content)
    return digest.hexdigest()


def register_plan(bench: Workbench, planned: Mapping[str, PlannedRelease]) -> list[Entry]:
    """Register every release of a run before the first: all of it fits, or nothing is charged.

    Args:
        bench: of the step that registers.
        planned: spec hash of each step -> what it will charge.

    Raises:
        BudgetExceeded: it does not fit; nothing changed.
        BadInput: a data set is not registered, or registered for something else.
    """
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
    bench: Workbench, dataset: str, planned: Mapping[str, PlannedRelease]
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
    bench: Workbench,
    *,
    dataset: str,
    unit: PrivacyUnit,
    event: MechanismEvent,
    delta: float,
    content: bytes,
) -> Charge:
    """Reserve a release; return it with its seed, bound to the manifest `content`.

    What the run registered beforehand is found, and not charged again.

    Raises:
        BudgetExceeded: it does not fit the data set's budget.
        BadInput: the data set is not registered, or registered for something else.
    """
    ledger = ledger_for(bench, dataset)
    for attempt in count():
        reservation = Reservation(
            dataset=dataset,
            unit=unit,
            event=event,
            delta=delta,
            spec_hash=bench.spec_hash,
            plan_key=bench.context.run_key,
            run=bench.context.run_key,
            attempt=attempt,
        )
        entry = ledger.reserve(reservation)
        if _may_continue(bench, entry, content):
            return Charge(ledger, entry, ledger.seed(entry, bench.seeds, content))
        say("an earlier attempt had other inputs or code: a new release, charged as one", "warning")
    raise AssertionError("count() does not end")


def record_operator_use(
    bench: Workbench,
    *,
    dataset: str,
    unit: PrivacyUnit,
    reason: str = "training without privacy",
) -> str:
    """List a use of private data without any guarantee: the operator's own; return its entry."""
    ledger = ledger_for(bench, dataset)
    entry = ledger.reserve(
        Reservation(
            dataset=dataset,
            unit=unit,
            event=Unaccounted(reason, unit=unit),
            delta=0.0,
            spec_hash=bench.spec_hash,
            plan_key=bench.context.run_key,
            run=bench.context.run_key,
        )
    )
    ledger.settle(entry.id)
    return entry.id


def _may_continue(bench: Workbench, entry: Entry, content: bytes) -> bool:
    if not entry.seed_hash:
        return True
    try:
        seed = bench.seeds.get(entry.seed_key)
    except BadInput:
        return False  # the seed is lost, and with it the noise that was begun
    return entry.is_bound_to(seed, content)


def ledger_for(bench: Workbench, dataset: str) -> Ledger:
    """Return the ledger, in which the data set is registered as what the run says it is.

    Raises:
        BadInput: it has no budget, or is registered as made up and called private.
    """
    ledger = Ledger.open(bench.deployment.ledger)
    budget = ledger.datasets().get(dataset)
    if bench.made_up or dataset == MADE_UP:
        if budget is None:
            ledger.register_made_up(dataset)
    elif budget is None:
        raise BadInput(
            f"the data set {dataset} has no privacy budget yet",
            where="ledger",
            fix=f"Set one: confide ledger register {dataset} --unit … --epsilon … --delta …",
        )
    elif budget.made_up:
        raise BadInput(
            f"the data set {dataset} is registered as made up, but this run calls it private",
            where="ledger",
            fix="Give the private data set a name of its own.",
        )
    return ledger
