"""The ledger reserves releases before the data is read, and refuses releases beyond the budget."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from dp_core.errors import BadInput
from dp_core.privacy.ledger import privacy_filter
from dp_core.privacy.ledger.database import RESTORE, Database
from dp_core.privacy.ledger.dataset_sources import Sources
from dp_core.privacy.ledger.models import (
    Budget,
    Dataset,
    Entry,
    LedgerSchema,
    State,
    by_identity,
    charged_groups,
    create_tables,
    manifest_hash,
    now,
)
from dp_core.privacy.ledger.privacy_filter import AdmissionDecision, Remaining, Way
from dp_core.privacy.mechanisms import NeighboringRelation, PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed, SeedStore

_SEED_KEY = re.compile(r"[0-9a-f]{32}")  # the deployment keeps other secrets among its seeds


class Ledger:
    """Records the releases of each data set and decides whether its budget admits another one.

    Every change is one transaction. The ledger lists at least every release that was made, even
    after a crash: an entry is committed before the data is read and is never deleted.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, url: str) -> Ledger:
        """Open or create the ledger at a SQLAlchemy URL (SQLite or PostgreSQL).

        Raises:
            BadInput: the URL is invalid, or another release of Confide made the ledger.
            LedgerUnavailable: the database does not answer; may be retried.
            LedgerDamaged: the database does not hold a complete ledger.
        """
        database = Database(url)
        create_tables(database)
        return cls(database)

    @property
    def sources(self) -> Sources:
        """The records of the files that data are read from."""
        return Sources(self._database)

    # --- identity and completeness

    def identity(self) -> str:
        """Return the ledger's random identifier, drawn at its creation and equal in its copies."""
        with self._database.transaction() as db:
            return db.scalars(select(LedgerSchema.id)).one()

    def confirm_memory(self, seeds: SeedStore) -> str:
        """Refuse a ledger that does not hold every release for which the store drew a seed.

        A ledger that was deleted, emptied, exchanged or restored from an older copy would admit
        the same budget again. An entry is committed before its seed is drawn, and no entry is ever
        deleted. A seed without an entry therefore shows that the ledger has lost entries.

        Returns:
            The ledger's identity, which seeds and store remember.

        Raises:
            BadInput: entries are missing, or the seeds were drawn under another ledger.
        """
        drawn = {key for key in seeds.drawn() if _SEED_KEY.fullmatch(key)}  # before the entries
        remembered, identity = seeds.remembered_ledger(), self.identity()
        with self._database.transaction() as db:
            held = set(db.scalars(select(Entry.seed_key)))
        where = f"privacy ledger {self._database.location}"
        if remembered not in (None, identity):
            raise BadInput("the seeds were drawn under another ledger", where=where, fix=RESTORE)
        if forgotten := len(drawn - held):
            what = f"seeds were drawn for {forgotten} releases that it does not hold"
            raise BadInput(what, where=where, fix=RESTORE)
        return identity

    def faults(self, seeds: SeedStore) -> list[str]:
        """Check the whole ledger and return one line for each fault.

        Args:
            seeds: the operator's store. Each seed must be the one bound to its entry.
        """
        self.identity()
        with self._database.transaction() as db:
            return [
                *_faults_of_file(db),
                *_unreadable(db, Budget),
                *_unreadable(db, Entry),
                *_exchanged_seeds(db, seeds),
            ]

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
        """Register a private data set and open its budget; an identical repetition has no effect.

        Args:
            name: of the data set, in every spec that uses it.
            unit: the protected unit.
            budget_epsilon: ε of all releases from the data set together.
            budget_delta: δ of the same guarantee.
            relation: the neighbouring relation.
            order: Rényi order of the filter (whole, from 2), or ∞ to add up (ε, δ); by default
                the order with most room for Gaussian mechanisms. It cannot be changed later.
            shares_budget_with: a registered data set that may hold the same people.

        Raises:
            BadInput: the budget is invalid, or the name is registered with another one. A budget
                cannot be raised, because its ε was promised for all releases under it.
        """
        privacy_filter.check_budget(budget_epsilon, budget_delta)
        if order is None:
            order = privacy_filter.best_order(budget_epsilon, budget_delta)
        privacy_filter.check_order(order, budget_epsilon, budget_delta)
        wanted = Budget(
            name=name,
            unit=PrivacyUnit(unit),
            relation=NeighboringRelation(relation),
            epsilon=budget_epsilon,
            delta=budget_delta,
            order=order,
        )
        return self._register(name, wanted, shares_budget_with)

    def register_made_up(self, name: str) -> Budget:
        """Register a made-up or public data set: its entries are recorded without a limit."""
        return self._register(name, Budget(name=name), None)

    def datasets(self) -> dict[str, Budget]:
        """Return each registered data set with its budget, by name."""
        query = select(Dataset.name, Budget).join_from(Dataset, Budget).order_by(Dataset.name)
        with self._database.transaction() as db:
            return dict(db.execute(query).all())

    def _register(self, name: str, wanted: Budget, shared: str | None) -> Budget:
        if not 0 < len(name) <= 200:
            raise BadInput("a data set's name has 1 to 200 characters", where="ledger register")
        with self._database.alone() as db:
            known = db.get(Dataset, name)
            if known is not None:
                budget = db.get_one(Budget, known.budget_id)
                if budget.terms != wanted.terms or (shared is None) != (budget.name == name):
                    what = f"{name} is registered already, with another budget"
                    fix = "A budget is declared once: releases were made under it."
                    raise BadInput(what, where="ledger register", fix=fix)
                return budget
            _refuse_alike(name, db.scalars(select(Dataset.name)))
            if shared is None:
                budget = wanted
                db.add(budget)
                db.flush()  # assigns the budget's number
            else:
                budget = Budget.of_dataset(db, shared)
                if budget.terms != wanted.terms:
                    what = f"it would share the budget of {shared}, which is a different one"
                    fix = f"State the unit, ε, δ and order of {shared}."
                    raise BadInput(what, where=f"data set {name}", fix=fix)
            db.add(Dataset(name=name, budget_id=budget.id))
            return budget

    # --- reading

    def entry(self, entry_id: str) -> Entry:
        """Return one entry.

        Raises:
            BadInput: no entry has that id.
        """
        with self._database.transaction() as db:
            return _entry(db, entry_id)

    def history(self, dataset: str) -> list[Entry]:
        """Return every entry of the data set's budget, also of data sets that share it, in order.

        Raises:
            BadInput: the data set is not registered.
        """
        return self._account(dataset)[1]

    def remaining(self, dataset: str) -> Remaining:
        """Return the state of the data set's budget, computed by the current accounting."""
        return privacy_filter.standing(*self._account(dataset))

    def cost_of_plan(
        self, planned: Sequence[Entry], ended: Callable[[str], bool] = lambda _: False
    ) -> AdmissionDecision:
        """Return the decision on a planned run, as `register_plan` would make it now.

        Args:
            planned: every release of the run, new objects and all under one budget. Releases that
                the ledger holds are not charged again.
            ended: as in `register_plan`.

        Raises:
            BadInput: a data set is not registered or has another budget, or an event cannot be
                added to the budget.
        """
        return privacy_filter.decide(*self._replacing(planned, ended))

    def refuse_unfit(
        self, planned: Sequence[Entry], ended: Callable[[str], bool] = lambda _: False
    ) -> None:
        """Refuse a plan that `register_plan` would refuse now, without registering anything.

        Raises:
            BudgetExceeded, BadInput: as `register_plan`.
        """
        privacy_filter.admit(*self._replacing(planned, ended))

    def _replacing(
        self, planned: Sequence[Entry], ended: Callable[[str], bool]
    ) -> tuple[Budget, list[Entry], list[Entry]]:
        """Return the budget and its entries as a new plan would find them, and its new releases.

        Nothing is stored: these objects belong to no transaction.
        """
        budget, held = self._account(*(entry.dataset for entry in planned))
        budget.refuse_foreign(held, planned)
        if _not_held(held, planned):
            _give_back(budget, _replaced(held, planned, ended))
        return budget, held, _not_held(held, planned)

    def _account(self, *datasets: str) -> tuple[Budget, list[Entry]]:
        with self._database.transaction() as db:
            budget, *others = (Budget.of_dataset(db, name) for name in datasets)
            if any(other is not budget for other in others):
                raise BadInput("a plan is charged to one budget", where="ledger plan")
            return budget, _entries_of(db, budget)

    # --- reserving

    def reserve(self, planned: Entry) -> Entry:
        """Reserve a release before its data is read. Equal releases share one entry.

        If the run's plan with the release was withdrawn, the whole plan is admitted again. The
        release is refused if the plan does not fit, or if others of its releases are charged by
        PLD. A release that was withdrawn with the plan of another run is admitted alone.

        Returns:
            The given entry, or the existing entry of this data set, spec hash and attempt. Only a
            new entry is charged.

        Raises:
            BudgetExceeded: the release does not fit; nothing changed.
            BadInput: the data set is not registered, or has another unit or relation, or the
                same spec hash was reserved for a different mechanism; or its plan would grow.
        """
        self.cost_of_plan([planned])  # caches the charges before the lock is taken
        with self._database.transaction() as db:
            budget = lock_budget(db, planned.dataset)
            held = _entries_of(db, budget)
            budget.refuse_foreign(held, [planned])
            entry = by_identity(held).get(planned.identity)
            if entry is None:
                _admit(budget, held, [planned])
                db.add(planned)
                entry = planned
            entry.refuse_different(planned)
            if entry.state is State.WITHDRAWN:
                if entry.run != planned.run:
                    entry.plan_key, entry.whole_plan = planned.plan_key, False
                plan = [e for e in held if e.group == entry.group]
                if math.isinf(budget.order) and any(e.charged for e in plan):
                    raise _grown(entry.plan_key)
                plan = [e for e in plan if e.state is State.WITHDRAWN]
                _admit(budget, held, plan)
                for withdrawn in plan:
                    withdrawn.plan_again(planned.run)
            if entry.state is State.PLANNED:
                entry.state, entry.reserved_at = State.RESERVED, now()
            return entry

    def register_plan(
        self, planned: Sequence[Entry], ended: Callable[[str], bool] = lambda _: False
    ) -> list[Entry]:
        """Register all releases of a run or sweep before the first one; admit all or none.

        The entries are `planned` until `reserve` is called for each. All are charged now, and stay
        charged if they never run, unless the plan is withdrawn. The plan is admitted by the
        budget's filter or, if the budget holds nothing else, as its one plan. Releases that
        earlier runs reserved (a vocabulary) are not charged again.

        The new plan replaces earlier plans of which no release has begun: plans of ended runs,
        plans with the same plan key, and plans that it contains. They are withdrawn in the same
        transaction, so that no release is counted twice.

        Args:
            planned: new objects, all under one budget, with the same non-empty plan_key.
            ended: returns whether the run with a given name has ended. A killed run leaves its
                plan in the ledger.

        Raises:
            BudgetExceeded, BadInput: as `reserve`; or the plan grew after its first release.
        """
        if len({e.plan_key for e in planned}) != 1 or not planned[0].plan_key:
            raise BadInput("a plan has one plan_key", where="ledger plan")
        wanted = list(by_identity(planned).values())
        plan_key, run = wanted[0].plan_key, wanted[0].run
        self.cost_of_plan(wanted, ended)  # caches the charges before the lock is taken
        with self._database.transaction() as db:
            budget = lock_budget(db, wanted[0].dataset)
            held = _entries_of(db, budget)
            entries = by_identity(held)
            budget.refuse_foreign(held, wanted)
            for entry in wanted:
                entries.setdefault(entry.identity, entry).refuse_different(entry)
            _give_back(budget, _replaced(held, wanted, ended))
            fresh = [entries[entry.identity] for entry in _not_held(held, wanted)]
            if fresh and any(e.whole_plan and e.plan_key == plan_key and e.charged for e in held):
                raise _grown(plan_key)
            for entry in fresh:
                entry.plan_key, entry.whole_plan = plan_key, True
            _admit(budget, held, fresh)
            for entry in fresh:
                entry.plan_again(run)
            db.add_all(fresh)
        return [entries[entry.identity] for entry in planned]

    def withdraw_plan(self, dataset: str, plan_key: str) -> list[Entry]:
        """Withdraw the releases of a plan that have not begun; the entries stay on record.

        This is sound because no data was read for them: a step reserves its entry before it opens
        the data, under the lock of the same budget. A plan that is composed by PLD is withdrawn
        whole or not at all (see `Budget.refuse_partial_withdrawal`). The entries stay in the state
        `withdrawn`. If they are planned again, they are charged again.

        Returns:
            The newly withdrawn entries.

        Raises:
            BadInput: the plan holds no planned release, or it was charged as one and has begun.
        """
        with self._database.transaction() as db:
            budget = lock_budget(db, dataset)
            plan = [e for e in _entries_of(db, budget) if e.plan_key == plan_key]
            whole = [e for e in plan if e.whole_plan and e.charged]
            waiting = [e for e in whole if e.state is State.PLANNED]
            if not waiting:
                what = "it holds no planned release: a release that has begun stays charged"
                raise BadInput(what, where=f"ledger plan {plan_key}")
            budget.refuse_partial_withdrawal(whole)
            _give_back(budget, waiting)
            return waiting

    def give_back(self, run: str) -> list[Entry]:
        """Withdraw every plan of a run of which no release has begun.

        Called at the end of a run, successful or not. A plan that has begun stays charged whole.

        Returns:
            The newly withdrawn entries.
        """
        given_back: list[Entry] = []
        with self._database.transaction() as db:
            planned = select(Entry.dataset).where(Entry.run == run, Entry.state == State.PLANNED)
            datasets = sorted(set(db.scalars(planned)))
        for dataset in datasets:
            with self._database.transaction() as db:
                budget = lock_budget(db, dataset)
                groups = _untouched(_entries_of(db, budget))
                entries = [e for group in groups if group[0].run == run for e in group]
                _give_back(budget, entries)
                given_back += entries
        return given_back

    # --- releasing

    def seed(self, entry: Entry, seeds: SeedStore, manifest: bytes) -> PrivacySeed:
        """Return the entry's secret seed, bound to this use of it.

        The first call draws the seed and records its salted hash and a keyed digest of the
        manifest. Every later call must match both. One charge therefore never pays for two
        different noises (a lost seed file), and one noise never serves two different inputs.

        Args:
            entry: as `reserve` returned it.
            seeds: the operator's protected store.
            manifest: digests of everything that shapes the release: content of the inputs,
                plan, code, kernel and RNG versions, dtype.

        Raises:
            BadInput: seed or manifest differ from the first call; the seed is known and the data
                are not made up; the release was made and its digest was not recorded; or the
                store remembers releases that this ledger does not hold.
        """
        seeds.remember_ledger(self.confirm_memory(seeds))  # written before the first seed
        secret = seeds.get(entry.seed_key) if entry.seed_hash else seeds.create(entry.seed_key)
        return self.bind(entry.id, secret, manifest)

    def bind(self, entry_id: str, seed: PrivacySeed, manifest: bytes) -> PrivacySeed:
        """Bind a seed that the caller drew; most callers use `seed` instead."""
        seed_hash = seed.salted_hash()
        manifest_digest = manifest_hash(seed, manifest)
        with self._database.transaction() as db:
            budget, entry = _locked_entry(db, entry_id)
            if entry.state in (State.PLANNED, State.WITHDRAWN):
                raise BadInput("reserve it before it draws noise", where=f"ledger entry {entry_id}")
            if seed.known and not budget.made_up:
                raise BadInput("a known seed gives no privacy", where=f"ledger entry {entry_id}")
            entry.refuse_unrecorded()
            entry.refuse_rebinding(seed_hash, manifest_digest)
            entry.seed_hash, entry.manifest_hash = seed_hash, manifest_digest
            entry.known_seed = seed.known
        return seed

    def settle(self, entry_id: str, released: bytes = b"") -> Entry:
        """Record the digest of a release, before its output is published.

        The first call decides, inside its transaction. If two processes obtained different results
        under one seed, one of the results is accepted. A repeated call with the same digest has no
        effect.

        Args:
            entry_id: of the entry.
            released: digest of the output, keyed by the seed; empty for a release without
                guarantee.

        Raises:
            BadInput: no such entry; it was planned and never reserved; no seed is bound to the
                private release; or another result was accepted before.
        """
        where = f"ledger entry {entry_id}"
        with self._database.transaction() as db:
            _, entry = _locked_entry(db, entry_id)
            if entry.state in (State.PLANNED, State.WITHDRAWN):
                raise BadInput("it was never reserved", where=where)
            if entry.accounted and not entry.seed_hash:
                what = "no seed is bound to it"
                fix = "Take the seed by Ledger.seed, which records its manifest."
                raise BadInput(what, where=where, fix=fix)
            if entry.accounted != bool(released):
                raise BadInput(
                    "a release has a digest if and only if it has a guarantee", where=where
                )
            entry.verify_reproduced_release(released.hex())
            if entry.state is State.RESERVED:
                entry.state, entry.settled_at = State.SETTLED, now()
                entry.released_hash = released.hex()
            return entry


def lock_budget(db: Session, dataset: str) -> Budget:
    """Return the budget, locked on PostgreSQL until this transaction ends.

    SQLite's transaction locks the whole file from its beginning and ignores FOR UPDATE. The
    budget is read again under the lock, and callers read the entries after this call, because a
    session does not reload objects it has read before.
    """
    budget = Budget.of_dataset(db, dataset)
    db.refresh(budget, with_for_update=True)
    return budget


def _locked_entry(db: Session, entry_id: str) -> tuple[Budget, Entry]:
    """Lock an entry's budget; return the budget and the entry as it is under the lock.

    Raises:
        BadInput: there is no such entry.
    """
    entry = _entry(db, entry_id)
    budget = lock_budget(db, entry.dataset)
    db.refresh(entry)
    return budget, entry


def _entry(db: Session, entry_id: str) -> Entry:
    entry = db.scalars(select(Entry).where(Entry.id == entry_id)).one_or_none()
    if entry is None:
        raise BadInput("there is no such entry", where=f"ledger entry {entry_id}")
    return entry


def _entries_of(db: Session, budget: Budget) -> list[Entry]:
    query = select(Entry).where(Entry.budget_id == budget.id).order_by(Entry.number)
    return list(db.scalars(query))


def _admit(budget: Budget, held: Sequence[Entry], group: Sequence[Entry]) -> None:
    """Admit a group of entries that are not charged yet, and close the budget for one plan.

    Raises:
        BudgetExceeded: the group does not fit.
    """
    way = privacy_filter.admit(budget, held, group)
    if way is Way.ONE_PLAN and not budget.closed_for:
        budget.closed_for = group[0].group
    for entry in group:
        entry.budget_id = budget.id


def _grown(plan_key: str) -> BadInput:
    return BadInput(
        "the plan was registered whole and has grown since its first release",
        where=f"ledger plan {plan_key}",
        fix="Register the new releases as another plan.",
    )


def _give_back(budget: Budget, entries: Sequence[Entry]) -> None:
    """Withdraw planned entries, and reopen the budget if it was closed for them."""
    for entry in entries:
        entry.withdraw()
        if entry.group == budget.closed_for:
            budget.closed_for = ""


def _untouched(held: Sequence[Entry]) -> list[list[Entry]]:
    """Return the plans that were registered whole and of which no release has begun."""
    plans = [group for group in charged_groups(held) if group[0].whole_plan]
    return [plan for plan in plans if all(e.state is State.PLANNED for e in plan)]


def _replaced(
    held: Sequence[Entry], wanted: Sequence[Entry], ended: Callable[[str], bool]
) -> list[Entry]:
    """Return the entries of the plans that a new plan replaces (`Ledger.register_plan`)."""
    asked, key = {r.identity for r in wanted}, wanted[0].plan_key

    def is_replaced(plan: list[Entry]) -> bool:
        if plan[0].plan_key == key:
            return set(by_identity(plan)) != asked  # a retry changes nothing
        return ended(plan[0].run) or asked.issuperset(by_identity(plan))

    return [entry for plan in _untouched(held) if is_replaced(plan) for entry in plan]


def _not_held(held: Sequence[Entry], wanted: Sequence[Entry]) -> list[Entry]:
    known = {e.identity for e in held if e.state is not State.WITHDRAWN}
    return [entry for entry in wanted if entry.identity not in known]


def _refuse_alike(name: str, registered: Iterator[str]) -> None:
    """Refuse a name that differs from a registered one only by case or Unicode form.

    Raises:
        BadInput: `Ward` and `ward` could give the same people two budgets by mistake.
    """
    for other in registered:
        if other != name and _folded(other) == _folded(name):
            what = f"{name} differs from the registered data set {other} by its spelling alone"
            fix = f"Use {other}, or a clearly different name."
            raise BadInput(what, where="ledger register", fix=fix)


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


# --- faults


def _faults_of_file(db: Session) -> Iterator[str]:
    if db.get_bind().dialect.name != "sqlite":
        return  # PostgreSQL checks its pages and references
    lines = db.scalars(text("PRAGMA integrity_check")).all()
    yield from (f"the file: {line.splitlines()[0]}" for line in lines if line != "ok")
    broken = db.execute(text("PRAGMA foreign_key_check")).all()
    yield from (f"a row of {row[0]} names a row of {row[2]} that is gone" for row in broken)
    numbers = db.scalars(select(Entry.number)).all()
    if numbers and len(numbers) != max(numbers):  # SQLite numbers them in sequence; none is deleted
        yield f"{max(numbers) - len(numbers)} entries are gone"


def _unreadable(db: Session, table: type[Budget | Entry]) -> Iterator[str]:
    for row_id in db.scalars(select(table.id)).all():
        try:
            db.scalars(select(table).where(table.id == row_id)).one()
        except BadInput as error:
            yield f"ledger {table.__name__.lower()} {row_id}: {error.what}"


def _exchanged_seeds(db: Session, seeds: SeedStore) -> Iterator[str]:
    drawn = seeds.drawn()
    bound = select(Entry.id, Entry.seed_key, Entry.seed_hash).where(Entry.seed_hash != "")
    for entry_id, key, seed_hash in db.execute(bound):
        if key not in drawn:
            continue  # a lost seed is not a fault of the ledger
        try:
            if seeds.get(key).salted_hash() != seed_hash:
                yield f"the seed of entry {entry_id} is not the one that it was bound to"
        except BadInput as error:
            yield f"the seed of entry {entry_id}: {error.what}"
