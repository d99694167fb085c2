"""Between rows and values: what the ledger reads from its tables and writes into them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from dp_core.errors import BadInput
from dp_core.privacy.ledger.damage import RESTORE, LedgerDamaged
from dp_core.privacy.ledger.entry import Budget, Entry, Reservation, State, canonical
from dp_core.privacy.ledger.schema import BUDGETS, DATASETS, ENTRIES
from dp_core.privacy.mechanisms import MechanismEvent, NeighboringRelation, PrivacyUnit


def now() -> str:
    """Return the time, UTC, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def find_budget(db: Connection, dataset: str) -> Budget | None:
    """Return the budget of a data set, or None if it is not registered."""
    query = select(BUDGETS).join(DATASETS).where(DATASETS.c.name == dataset)
    row = db.execute(query).one_or_none()
    return None if row is None else as_budget(row)


def budget_of(db: Connection, dataset: str) -> Budget:
    """Return the budget of a registered data set.

    Raises:
        BadInput: it is not registered.
    """
    budget = find_budget(db, dataset)
    if budget is None:
        raise BadInput(
            "it is not registered in the privacy ledger",
            where=f"data set {dataset}",
            fix="Declare its unit and budget first: confide ledger register.",
        )
    return budget


def lock_budget(db: Connection, dataset: str) -> Budget:
    """Return the budget; on PostgreSQL, nobody else reserves from it until we commit.

    SQLite's transaction holds the whole file from its beginning, and ignores FOR UPDATE.
    """
    budget = budget_of(db, dataset)
    db.execute(select(BUDGETS.c.id).where(BUDGETS.c.id == budget.id).with_for_update()).one()
    return budget


def lock_entry(db: Connection, entry_id: str) -> tuple[Budget, Entry]:
    """Return an entry as it is now that its budget is locked, and the budget.

    Raises:
        BadInput: there is no such entry.
    """
    budget = lock_budget(db, find_entry(db, entry_id).dataset)
    return budget, find_entry(db, entry_id)


def find_entry(db: Connection, entry_id: str) -> Entry:
    """Return one entry.

    Raises:
        BadInput: there is none of that id.
    """
    row = db.execute(select(ENTRIES).where(ENTRIES.c.id == entry_id)).one_or_none()
    if row is None:
        raise BadInput("there is no such entry", where=f"ledger entry {entry_id}")
    return as_entry(row)


def entries_of(db: Connection, budget: Budget) -> list[Entry]:
    """Return every entry of a budget, in the order of reservation."""
    query = select(ENTRIES).where(ENTRIES.c.budget_id == budget.id).order_by(ENTRIES.c.number)
    return [as_entry(row) for row in db.execute(query)]


def insert_dataset(db: Connection, name: str, wanted: Budget, shared: str | None) -> Budget:
    """Register a data set, with a budget of its own or that of `shared`.

    Raises:
        BadInput: `shared` is not registered, or its budget is not the wanted one.
    """
    if shared is None:
        budget = replace(wanted, id=_insert_budget(db, wanted))
    else:
        budget = budget_of(db, shared)
        if replace(wanted, id=budget.id, name=budget.name) != budget:
            raise BadInput(
                f"it would share the budget of {shared}, which is a different one",
                where=f"data set {name}",
                fix=f"State the unit, ε, δ and order of {shared}.",
            )
    db.execute(insert(DATASETS).values(name=name, budget_id=budget.id, registered_at=now()))
    return budget


def _insert_budget(db: Connection, budget: Budget) -> int:
    values = {
        "name": budget.name,
        "unit": budget.unit,
        "relation": budget.relation,
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "renyi_order": budget.order,
        "opened_at": now(),
    }
    key = db.execute(insert(BUDGETS).values(values)).inserted_primary_key
    assert key is not None  # noqa: S101 - an INSERT of one row has one
    return int(key[0])


def revive_entry(db: Connection, entry: Entry, reservation: Reservation, whole: bool) -> None:
    """Ask again for what was withdrawn: it is charged from now on, like a new entry."""
    values = {
        "state": (State.PLANNED if whole else State.RESERVED).value,
        "plan_key": reservation.plan_key,
        "whole_plan": whole,
        "run": reservation.run,
        "reserved_at": now(),
        "withdrawn_at": "",
    }
    change_entry(db, entry.id, **values)


def insert_entry(db: Connection, reservation: Reservation, budget: Budget, whole: bool) -> None:
    """Write a new entry: planned if its plan is registered whole, reserved otherwise."""
    values = {
        "id": secrets.token_hex(16),
        "budget_id": budget.id,
        "dataset": reservation.dataset,
        "unit": reservation.unit.value,
        "event": canonical(reservation.event),
        "delta": reservation.delta,
        "spec_hash": reservation.spec_hash,
        "attempt": reservation.attempt,
        "state": (State.PLANNED if whole else State.RESERVED).value,
        "plan_key": reservation.plan_key,
        "whole_plan": whole,
        "run": reservation.run,
        "seed_key": secrets.token_hex(16),
        "seed_hash": "",
        "manifest_hash": "",
        "known_seed": False,
        "reserved_at": now(),
        "settled_at": "",
        "withdrawn_at": "",
        "released_hash": "",
    }
    db.execute(insert(ENTRIES).values(values))


def change_entry(db: Connection, entry_id: str, **values: Any) -> None:
    """Set columns of one entry."""
    db.execute(update(ENTRIES).where(ENTRIES.c.id == entry_id).values(values))


def as_budget(row: Row[Any]) -> Budget:
    """Return a row of `budgets` as a value.

    Raises:
        LedgerDamaged: it holds no budget.
    """
    with _readable(f"budget {row.id}"):
        return Budget(
            id=row.id,
            name=row.name,
            unit=None if row.unit is None else PrivacyUnit(row.unit),
            relation=None if row.relation is None else NeighboringRelation(row.relation),
            epsilon=row.epsilon,
            delta=row.delta,
            order=row.renyi_order,
        )


def as_entry(row: Row[Any]) -> Entry:
    """Return a row of `entries` as a value.

    Raises:
        LedgerDamaged: it holds no entry.
    """
    with _readable(f"entry {row.id}"):
        return Entry(
            id=row.id,
            dataset=row.dataset,
            unit=PrivacyUnit(row.unit),
            event=MechanismEvent.from_json(json.loads(row.event)),
            delta=row.delta,
            spec_hash=row.spec_hash,
            attempt=row.attempt,
            state=State(row.state),
            plan_key=row.plan_key,
            whole_plan=row.whole_plan,
            run=row.run,
            seed_key=row.seed_key,
            seed_hash=row.seed_hash,
            manifest_hash=row.manifest_hash,
            known_seed=row.known_seed,
            reserved_at=row.reserved_at,
            settled_at=row.settled_at,
            withdrawn_at=row.withdrawn_at,
            released_hash=row.released_hash,
        )


@contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError) as error:
        raise LedgerDamaged("it cannot be read", where=f"ledger {what}", fix=RESTORE) from error
