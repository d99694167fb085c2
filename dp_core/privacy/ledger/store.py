"""The ledger itself: reserve before the data is read, settle after; refuse what does not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import select

from dp_core.errors import BadInput
from dp_core.privacy.events import MechanismEvent, Relation
from dp_core.privacy.ledger import checks, rows
from dp_core.privacy.ledger import filter as privacy_filter
from dp_core.privacy.ledger.database import Database
from dp_core.privacy.ledger.entry import (
    Budget,
    Entry,
    Reservation,
    State,
    by_identity,
    check_budget,
    manifest_hash,
)
from dp_core.privacy.ledger.filter import Cost, Remaining
from dp_core.privacy.ledger.schema import BUDGETS, DATASETS
from dp_core.privacy.seeds import PrivacySeed, SeedStore
from dp_core.privacy.units import PrivacyUnit


class Ledger:
    """What was spent on each data set, and whether more may be.

    Every change is one transaction. Whatever kills a process, whenever, the ledger then shows at
    least what was released: an entry is there before the data is read, and stays.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, url: str) -> Ledger:
        """Open, or make, the ledger at a SQLAlchemy URL (SQLite or PostgreSQL).

        Raises:
            BadInput: not such a URL, or a newer release's ledger.
            LedgerUnavailable: the database does not answer; may be retried.
        """
        return cls(Database(url))

    # --- data sets and budgets

    def register_dataset(
        self,
        name: str,
        unit: PrivacyUnit,
        budget_epsilon: float,
        budget_delta: float,
        *,
        relation: Relation = Relation.ADD_REMOVE,
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
        check_budget(budget_epsilon, budget_delta)
        if order is None:
            order = privacy_filter.best_order(budget_epsilon, budget_delta)
        privacy_filter.check_order(order, budget_epsilon, budget_delta)
        wanted = Budget(
            0, name, PrivacyUnit(unit), Relation(relation), budget_epsilon, budget_delta, order
        )
        return self._register(name, wanted, shares_budget_with)

    def register_made_up(self, name: str) -> Budget:
        """Register a data set of made-up people: entries are kept, nothing is limited."""
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
                return rows.insert_dataset(db, name, wanted, shared)
        alike = replace(wanted, id=found.id, name=found.name) == found
        if not alike or (shared is None) != (found.name == name):
            raise BadInput(
                f"{name} is registered already, with another budget",
                where="ledger register",
                fix="A budget is declared once: releases were made under it.",
            )
        return found

    # --- reserve, bind the seed, settle

    def reserve(self, reservation: Reservation) -> Entry:
        """Reserve a release before its data is read. The same reservation is the same entry.

        Returns:
            The entry: new, or the one that this data set, spec hash and attempt have already.
            Only a new one is charged.

        Raises:
            BudgetExceeded: it does not fit; nothing changed.
            BadInput: the data set is not registered, or has another unit or relation, or the
                same spec hash was reserved for a different mechanism.
        """
        self._warm([reservation])
        with self._database.transaction() as db:
            budget = rows.lock_budget(db, reservation.dataset)
            held = rows.entries_of(db, budget)
            entry = by_identity(held).get(reservation.identity)
            if entry is None:
                privacy_filter.admit(budget, held, privacy_filter.releases([reservation]))
                rows.insert_entry(db, reservation, budget, whole=False)
                return rows.entries_of(db, budget)[-1]
            checks.refuse_different(reservation, entry)
            if entry.state is State.PLANNED:
                rows.change_entry(db, entry.id, state=State.RESERVED.value, reserved_at=rows.now())
            return rows.find_entry(db, entry.id)

    def register_plan(self, reservations: Sequence[Reservation]) -> list[Entry]:
        """Reserve a run or a sweep whole, before its first release: all of it fits, or none.

        Its entries wait as `planned` until `reserve` is called for each. All are charged now,
        and stay charged if they never run. Where the budget adds up (ε, δ), the plan counts as
        one release, composed by PLD: that is sound because nothing in it was chosen after
        looking at results. Releases that were reserved before (a vocabulary that an earlier run
        made) are not charged again.

        Args:
            reservations: all on one data set, with the same non-empty plan_key.

        Raises:
            BudgetExceeded, BadInput: as `reserve`; or a plan that grew after it was registered.
        """
        if (
            len({(r.dataset, r.plan_key) for r in reservations}) != 1
            or not reservations[0].plan_key
        ):
            raise BadInput("a plan has one data set and one plan_key", where="ledger plan")
        wanted = list({r.identity: r for r in reservations}.values())
        self._warm(wanted)
        with self._database.transaction() as db:
            budget = rows.lock_budget(db, wanted[0].dataset)
            held = rows.entries_of(db, budget)
            known = by_identity(held)
            fresh = [r for r in wanted if r.identity not in known]
            if fresh:
                checks.refuse_growth(held, wanted[0].plan_key)
            privacy_filter.admit(budget, held, privacy_filter.releases(fresh))
            for reservation in fresh:
                rows.insert_entry(db, reservation, budget, whole=True)
            entries = by_identity(rows.entries_of(db, budget))
            for reservation in reservations:
                checks.refuse_different(reservation, entries[reservation.identity])
        return [entries[r.identity] for r in reservations]

    def seed(self, entry: Entry, seeds: SeedStore, manifest: bytes) -> PrivacySeed:
        """Return the entry's secret seed, bound to this use of it.

        The first call draws the seed and records its salted hash and a keyed digest of the
        manifest; every later call must match both. So one charge never pays for two different
        noises (a lost seed file), nor one noise for two different inputs.

        Args:
            entry: as `reserve` returned it.
            seeds: the operator's protected store.
            manifest: digests of everything that shapes the release: content of the inputs,
                plan, code, kernel and RNG versions, dtype.

        Raises:
            BadInput: seed or manifest are not those of the first call, or the seed is known
                and the data are not made up.
        """
        secret = seeds.get(entry.seed_key) if entry.seed_hash else seeds.create(entry.seed_key)
        return self.bind(entry.id, secret, manifest)

    def bind(self, entry_id: str, seed: PrivacySeed, manifest: bytes) -> PrivacySeed:
        """Bind a seed that the caller drew; `seed` is what most callers want."""
        seed_hash = seed.salted_hash()
        manifest_digest = manifest_hash(seed, manifest)
        with self._database.transaction() as db:
            budget, entry = rows.lock_entry(db, entry_id)
            if entry.state is State.PLANNED:
                raise BadInput("reserve it before it draws noise", where=f"ledger entry {entry_id}")
            if seed.known and not budget.made_up:
                raise BadInput("a known seed protects nobody", where=f"ledger entry {entry_id}")
            checks.refuse_rebinding(entry, seed_hash, manifest_digest)
            rows.change_entry(
                db,
                entry_id,
                seed_hash=seed_hash,
                manifest_hash=manifest_digest,
                known_seed=seed.known,
            )
        return seed

    def settle(self, entry_id: str) -> Entry:
        """Record that the release was made. Settling again changes nothing.

        Raises:
            BadInput: no such entry, or it was planned and never reserved, or it is a private
                release that no seed was bound to.
        """
        with self._database.transaction() as db:
            _, entry = rows.lock_entry(db, entry_id)
            if entry.state is State.PLANNED:
                raise BadInput("it was never reserved", where=f"ledger entry {entry_id}")
            if entry.accounted and not entry.seed_hash:
                raise BadInput(
                    "no seed is bound to it",
                    where=f"ledger entry {entry_id}",
                    fix="Take the seed by Ledger.seed, which records what it was used for.",
                )
            if entry.state is State.RESERVED:
                rows.change_entry(db, entry_id, state=State.SETTLED.value, settled_at=rows.now())
            return rows.find_entry(db, entry_id)

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
        """Return what a planned run would cost and leave: warn before it is started.

        Args:
            dataset: registered name.
            events: each release of the run with the δ at which it states its ε.

        Raises:
            BadInput: not registered, or an event that the budget cannot hold.
        """
        budget, entries = self._account(dataset)
        planned = [
            Reservation(
                dataset, budget.unit or event.unit or PrivacyUnit.PATIENT, event, delta, "-"
            )
            for event, delta in events
        ]
        for reservation in planned:
            checks.refuse_foreign(reservation, budget)
        return privacy_filter.cost_of(budget, entries, privacy_filter.releases(planned))

    # --- how

    def _account(self, dataset: str) -> tuple[Budget, list[Entry]]:
        with self._database.transaction() as db:
            budget = rows.budget_of(db, dataset)
            return budget, rows.entries_of(db, budget)

    def _warm(self, asked: Sequence[Reservation]) -> None:
        """Refuse what the budget cannot hold, and compute all charges before taking the lock.

        Charges are cached, so that inside the lock only those of entries that others added
        meanwhile are computed.
        """
        budget, held = self._account(asked[0].dataset)
        for reservation in asked:
            checks.refuse_foreign(reservation, budget)
        known = by_identity(held)
        fresh = privacy_filter.releases([r for r in asked if r.identity not in known])
        privacy_filter.cost_of(budget, held, fresh)
