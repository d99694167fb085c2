"""The accounts: data sets, their budgets, and how they stand."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from sqlalchemy import select

from dp_core.errors import BadInput
from dp_core.privacy.ledger import checks, rows
from dp_core.privacy.ledger import filter as privacy_filter
from dp_core.privacy.ledger.damage import RESTORE
from dp_core.privacy.ledger.database import Database
from dp_core.privacy.ledger.entry import Budget, Entry, Reservation, State, check_budget
from dp_core.privacy.ledger.filter import Cost, Remaining
from dp_core.privacy.ledger.integrity import faults
from dp_core.privacy.ledger.schema import BUDGETS, DATASETS, ENTRIES, identity_of
from dp_core.privacy.ledger.sources import Sources
from dp_core.privacy.mechanisms import MechanismEvent, NeighboringRelation, PrivacyUnit
from dp_core.privacy.seed_store import SeedStore

_ENTRY_KEY = re.compile(r"[0-9a-f]{32}")  # the deployment keeps other secrets among its seeds


class Accounts:
    """Which data sets there are, and what was spent on each. `Ledger` adds what spends."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, url: str) -> Self:
        """Open, or make, the ledger at a SQLAlchemy URL (SQLite or PostgreSQL).

        Raises:
            BadInput: not such a URL, or a newer release's ledger.
            LedgerUnavailable: the database does not answer; may be retried.
            LedgerDamaged: what is there is no whole ledger.
        """
        return cls(Database(url))

    @property
    def sources(self) -> Sources:
        """What is known of the files that data are read from."""
        return Sources(self._database)

    # --- what must not be forgotten

    def identity(self) -> str:
        """Return what no other ledger has: random, made with it, the same in its copies."""
        with self._database.transaction() as db:
            return identity_of(db)

    def confirm_memory(self, seeds: SeedStore) -> str:
        """Refuse a ledger that does not hold every release for which the store drew a seed.

        A ledger that was deleted, emptied, exchanged or put back to an older copy would let the
        same budget be spent again. An entry is committed before its seed is drawn, and no entry
        is ever deleted: a seed without its entry tells that the ledger forgot.

        Returns:
            The ledger's identity, for others to remember.

        Raises:
            BadInput: it has forgotten some, or the seeds were drawn under another one.
        """
        drawn = {key for key in seeds.drawn() if _ENTRY_KEY.fullmatch(key)}  # before the entries
        remembered = seeds.remembered_ledger()
        with self._database.transaction() as db:
            own = identity_of(db)
            held = set(db.execute(select(ENTRIES.c.seed_key)).scalars())
        where = f"privacy ledger {self._database.place}"
        if remembered not in (None, own):
            raise BadInput(
                "the seeds beside it were drawn under another ledger", where=where, fix=RESTORE
            )
        if forgotten := len(drawn - held):
            raise BadInput(
                f"seeds were drawn for {forgotten} releases that it does not hold",
                where=where,
                fix=RESTORE,
            )
        return own

    def faults(self, seeds: SeedStore) -> list[str]:
        """Look through the whole ledger, and say what is wrong with it: a line for each fault."""
        with self._database.transaction() as db:
            return list(faults(db, seeds))

    # --- data sets and budgets

    def register_dataset(
        self,
        name: str,
        unit: PrivacyUnit,
        budget_epsilon: float,
        budget_delta: float,
        *,
        relation: NeighboringRelation = NeighboringRelation.ADD_REMOVE,
        order: float | None = None,
        shares_budget_with: str | None = None,
    ) -> Budget:
        """Register a private data set and open its budget; repeating the same is no change.

        Args:
            name: of the data set, in every spec that uses it.
            unit: what is protected.
            budget_epsilon: ε that everything ever released from it may have together.
            budget_delta: δ of the same guarantee.
            relation: which data sets are neighbours.
            order: Rényi order of the filter (whole, from 2), or ∞ to add up (ε, δ); by default
                the order with most room for Gaussian mechanisms. It cannot be changed later.
            shares_budget_with: a registered data set that may hold the same people.

        Raises:
            BadInput: an impossible budget, or the name has another one already. A budget cannot
                be raised: what was released under it was promised to stay within it.
        """
        # A budget that an earlier version opened stands, also where it would be refused today.
        known = self.datasets().get(shares_budget_with or name)
        if known is None or (known.epsilon, known.delta) != (budget_epsilon, budget_delta):
            check_budget(budget_epsilon, budget_delta)
        if order is None:
            order = privacy_filter.best_order(budget_epsilon, budget_delta)
        privacy_filter.check_order(order, budget_epsilon, budget_delta)
        wanted = Budget(
            0,
            name,
            PrivacyUnit(unit),
            NeighboringRelation(relation),
            budget_epsilon,
            budget_delta,
            order,
        )
        return self._register(name, wanted, shares_budget_with)

    def register_made_up(self, name: str) -> Budget:
        """Register a data set that is made up or public: entries are kept, nothing is limited."""
        return self._register(name, Budget(0, name, None, None, None, None, math.inf), None)

    def datasets(self) -> dict[str, Budget]:
        """Return each registered data set with its budget, by name."""
        joined = select(DATASETS.c.name.label("dataset"), BUDGETS).join(BUDGETS)
        with self._database.transaction() as db:
            found = db.execute(joined.order_by(DATASETS.c.name)).all()
        return {row.dataset: rows.as_budget(row) for row in found}

    def _register(self, name: str, wanted: Budget, shared: str | None) -> Budget:
        if not 0 < len(name) <= 200:
            raise BadInput("a data set's name has 1 to 200 characters", where="ledger register")
        with self._database.alone() as db:
            found = rows.find_budget(db, name)
            if found is None:
                checks.refuse_alike(name, db.scalars(select(DATASETS.c.name)))
                return rows.insert_dataset(db, name, wanted, shared)
        alike = replace(wanted, id=found.id, name=found.name) == found
        if not alike or (shared is None) != (found.name == name):
            raise BadInput(
                f"{name} is registered already, with another budget",
                where="ledger register",
                fix="A budget is declared once: releases were made under it.",
            )
        return found

    # --- reading

    def entry(self, entry_id: str) -> Entry:
        """Return one entry.

        Raises:
            BadInput: there is none of that id.
        """
        with self._database.transaction() as db:
            return rows.find_entry(db, entry_id)

    def history(self, dataset: str) -> list[Entry]:
        """Return every entry of the data set's budget (all data sets that share it), in order.

        Raises:
            BadInput: the data set is not registered.
        """
        return self._account(dataset)[1]

    def remaining(self, dataset: str) -> Remaining:
        """Return how the data set's budget stands, by today's accounting of what is recorded."""
        return privacy_filter.standing(*self._account(dataset))

    def cost_of_next(self, dataset: str, events: Sequence[tuple[MechanismEvent, float]]) -> Cost:
        """Return what releases that the ledger has never seen would cost, as one plan.

        Args:
            dataset: registered name.
            events: each release with the δ at which it states its ε.

        Raises:
            BadInput: not registered, or an event that the budget cannot hold.
        """
        unit = self._account(dataset)[0].unit
        planned = [
            Reservation(dataset, unit or event.unit or PrivacyUnit.PATIENT, event, delta, "-")
            for event, delta in events
        ]
        return self.cost_of_plan(planned)

    def cost_of_plan(self, planned: Sequence[Reservation]) -> Cost:
        """Return what a planned run would cost and leave: warn before it is started.

        Args:
            planned: every release of the run, all of one data set. Those that the ledger holds
                already cost nothing again.

        Raises:
            BadInput: not registered, or an event that the budget cannot hold.
        """
        budget, held, fresh = self._compared(planned)
        return privacy_filter.cost_of(budget, held, privacy_filter.releases(fresh))

    def _compared(
        self, planned: Sequence[Reservation]
    ) -> tuple[Budget, list[Entry], list[Reservation]]:
        """Return the budget, what it holds, and what of the plan it does not hold."""
        budget, held = self._account(planned[0].dataset)
        for reservation in planned:
            checks.refuse_foreign(reservation, budget)
        known = {e.identity for e in held if e.state is not State.WITHDRAWN}
        return budget, held, [r for r in planned if r.identity not in known]

    def _account(self, dataset: str) -> tuple[Budget, list[Entry]]:
        with self._database.transaction() as db:
            budget = rows.budget_of(db, dataset)
            return budget, rows.entries_of(db, budget)
