"""The ledger: reserve before the data is read, settle after; refuse what does not fit."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from dp_core.errors import BadInput
from dp_core.privacy.ledger import privacy_filter
from dp_core.privacy.ledger.database import RESTORE, Database
from dp_core.privacy.ledger.models import (
    Budget,
    Dataset,
    Entry,
    LedgerIdentity,
    Reservation,
    State,
    by_identity,
    manifest_hash,
    now,
)
from dp_core.privacy.ledger.privacy_filter import Cost, Remaining
from dp_core.privacy.ledger.sources import Sources
from dp_core.privacy.mechanisms import MechanismEvent, NeighboringRelation, PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed, SeedStore

_SEED_KEY = re.compile(r"[0-9a-f]{32}")  # the deployment keeps other secrets among its seeds


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
            return db.scalars(select(LedgerIdentity.id)).one()

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
        drawn = {key for key in seeds.drawn() if _SEED_KEY.fullmatch(key)}  # before the entries
        remembered = seeds.remembered_ledger()
        with self._database.transaction() as db:
            identity = db.scalars(select(LedgerIdentity.id)).one()
            held = set(db.scalars(select(Entry.seed_key)))
        where = f"privacy ledger {self._database.location}"
        if remembered not in (None, identity):
            raise BadInput(
                "the seeds beside it were drawn under another ledger", where=where, fix=RESTORE
            )
        if forgotten := len(drawn - held):
            raise BadInput(
                f"seeds were drawn for {forgotten} releases that it does not hold",
                where=where,
                fix=RESTORE,
            )
        return identity

    def faults(self, seeds: SeedStore) -> list[str]:
        """Look through the whole ledger, and say what is wrong with it: a line for each fault.

        Args:
            seeds: the operator's store; a seed must be the one that its entry was bound to.
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
        """Register a data set that is made up or public: entries are kept, nothing is limited."""
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
                    raise BadInput(
                        f"{name} is registered already, with another budget",
                        where="ledger register",
                        fix="A budget is declared once: releases were made under it.",
                    )
                return budget
            _refuse_alike(name, db.scalars(select(Dataset.name)))
            if shared is None:
                budget = wanted
                db.add(budget)
                db.flush()  # which numbers it
            else:
                budget = Budget.of_dataset(db, shared)
                if budget.terms != wanted.terms:
                    raise BadInput(
                        f"it would share the budget of {shared}, which is a different one",
                        where=f"data set {name}",
                        fix=f"State the unit, ε, δ and order of {shared}.",
                    )
            db.add(Dataset(name=name, budget_id=budget.id))
            return budget

    # --- reading

    def entry(self, entry_id: str) -> Entry:
        """Return one entry.

        Raises:
            BadInput: there is none of that id.
        """
        with self._database.transaction() as db:
            entry = db.scalars(select(Entry).where(Entry.id == entry_id)).one_or_none()
        if entry is None:
            raise _no_such_entry(entry_id)
        return entry

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
            budget.refuse_foreign(reservation)
        budget.refuse_other_examples(held, planned)
        return budget, held, _not_held(held, planned)

    def _prepare(self, planned: Sequence[Reservation]) -> None:
        """Refuse what the budget cannot hold, and compute all charges before taking the lock.

        Charges are cached, so that inside the lock only those of entries that others added
        meanwhile are computed.
        """
        budget, held, fresh = self._compared(planned)
        if fresh:
            privacy_filter.cost_of(budget, held, privacy_filter.releases(fresh))

    def _account(self, dataset: str) -> tuple[Budget, list[Entry]]:
        with self._database.transaction() as db:
            budget = Budget.of_dataset(db, dataset)
            return budget, _entries_of(db, budget)

    # --- reserving

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
        self._prepare([reservation])
        with self._database.transaction() as db:
            budget = lock_budget(db, reservation.dataset)
            held = _entries_of(db, budget)
            entry = by_identity(held).get(reservation.identity)
            budget.refuse_other_examples(held, [reservation])
            if entry is None:
                privacy_filter.admit(budget, held, privacy_filter.releases([reservation]))
                entry = Entry.of(reservation, budget.id, whole_plan=False)
                db.add(entry)
                return entry
            entry.refuse_different(reservation)
            if entry.state is State.WITHDRAWN:
                privacy_filter.admit(budget, held, privacy_filter.releases([reservation]))
                entry.revive(reservation, whole_plan=False)
            if entry.state is State.PLANNED:
                entry.state, entry.reserved_at = State.RESERVED, now()
            return entry

    def register_plan(self, reservations: Sequence[Reservation]) -> list[Entry]:
        """Reserve a run or a sweep whole, before its first release: all of it fits, or none.

        Its entries wait as `planned` until `reserve` is called for each. All are charged now,
        and stay charged if they never run, unless `withdraw_plan` gives them back. Where the
        budget adds up (ε, δ), the plan counts as one release, composed by PLD: that is sound
        because nothing in it was chosen after looking at results. Releases that were reserved
        before (a vocabulary that an earlier run made) are not charged again.

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
        plan_key = wanted[0].plan_key
        self._prepare(wanted)
        with self._database.transaction() as db:
            budget = lock_budget(db, wanted[0].dataset)
            held = _entries_of(db, budget)
            entries = by_identity(held)
            budget.refuse_other_examples(held, wanted)
            fresh = _not_held(held, wanted)
            if fresh and any(e.whole_plan and e.plan_key == plan_key and e.charged for e in held):
                raise BadInput(
                    "the plan was registered whole and has grown since",
                    where=f"ledger plan {plan_key}",
                    fix="Register what is new as a plan of its own.",
                )
            privacy_filter.admit(budget, held, privacy_filter.releases(fresh))
            for reservation in fresh:
                entry = entries.get(reservation.identity)
                if entry is None:
                    entry = Entry.of(reservation, budget.id, whole_plan=True)
                    entries[reservation.identity] = entry
                    db.add(entry)
                else:
                    entry.refuse_different(reservation)
                    entry.revive(reservation, whole_plan=True)
            for reservation in reservations:
                entries[reservation.identity].refuse_different(reservation)
        return [entries[r.identity] for r in reservations]

    def withdraw_plan(self, dataset: str, plan_key: str) -> list[Entry]:
        """Give back what a plan registered and never began; an operator's act, on the record.

        Sound because nothing was read: a step reserves its entry before it opens the data, and in
        the same transaction as this. At Rényi order infinity only an untouched plan can be given
        back (see `Budget.refuse_partial_withdrawal`). The entries stay, as `withdrawn`; asked for
        again, they are charged again.

        Returns:
            The entries that are withdrawn now.

        Raises:
            BadInput: no planned release of that plan, or a part of what was charged as one.
        """
        with self._database.transaction() as db:
            budget = lock_budget(db, dataset)
            plan = [e for e in _entries_of(db, budget) if e.plan_key == plan_key]
            whole = [e for e in plan if e.whole_plan and e.charged]
            waiting = [e for e in whole if e.state is State.PLANNED]
            if not waiting:
                raise BadInput(
                    "it holds no planned release: what was begun stays charged",
                    where=f"ledger plan {plan_key}",
                )
            budget.refuse_partial_withdrawal(whole)
            withdrawn_at = now()
            for entry in waiting:
                entry.state, entry.withdrawn_at = State.WITHDRAWN, withdrawn_at
            return waiting

    # --- releasing

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
                and the data are not made up; the release was made and nothing tells what came
                out; or the store remembers releases that this ledger does not hold.
        """
        seeds.remember_ledger(self.confirm_memory(seeds))  # on disk before the first seed is
        secret = seeds.get(entry.seed_key) if entry.seed_hash else seeds.create(entry.seed_key)
        return self.bind(entry.id, secret, manifest)

    def bind(self, entry_id: str, seed: PrivacySeed, manifest: bytes) -> PrivacySeed:
        """Bind a seed that the caller drew; `seed` is what most callers want."""
        seed_hash = seed.salted_hash()
        manifest_digest = manifest_hash(seed, manifest)
        with self._database.transaction() as db:
            budget, entry = _locked_entry(db, entry_id)
            if entry.state in (State.PLANNED, State.WITHDRAWN):
                raise BadInput("reserve it before it draws noise", where=f"ledger entry {entry_id}")
            if seed.known and not budget.made_up:
                raise BadInput("a known seed protects nobody", where=f"ledger entry {entry_id}")
            entry.refuse_unrecorded()
            entry.refuse_rebinding(seed_hash, manifest_digest)
            entry.seed_hash, entry.manifest_hash = seed_hash, manifest_digest
            entry.known_seed = seed.known
        return seed

    def settle(self, entry_id: str, released: bytes = b"") -> Entry:
        """Record what the release is; only then may it be handed out.

        The first call decides, inside its transaction: of two processes that worked under one
        seed and came to different results, one is accepted. Settling the same again changes
        nothing.

        Args:
            entry_id: of the entry.
            released: digest of what is about to be handed out, keyed by the seed; empty for a
                release without guarantee, which has none.

        Raises:
            BadInput: no such entry, or it was planned and never reserved, or it is a private
                release that no seed was bound to; or another result was accepted before.
        """
        where = f"ledger entry {entry_id}"
        with self._database.transaction() as db:
            _, entry = _locked_entry(db, entry_id)
            if entry.state in (State.PLANNED, State.WITHDRAWN):
                raise BadInput("it was never reserved", where=where)
            if entry.accounted and not entry.seed_hash:
                raise BadInput(
                    "no seed is bound to it",
                    where=where,
                    fix="Take the seed by Ledger.seed, which records what it was used for.",
                )
            if entry.accounted != bool(released):
                raise BadInput(
                    "what is released with a guarantee, and only that, has a digest", where=where
                )
            entry.verify_reproduced_release(released.hex())
            if entry.state is State.RESERVED:
                entry.state, entry.settled_at = State.SETTLED, now()
                entry.released_hash = released.hex()
            return entry


def lock_budget(db: Session, dataset: str) -> Budget:
    """Return the budget; on PostgreSQL, nobody else reserves from it until we commit.

    SQLite's transaction holds the whole file from its beginning, and ignores FOR UPDATE. Entries
    are read after this: those that a session read before it would not be read again.
    """
    budget = Budget.of_dataset(db, dataset)
    db.execute(select(Budget.id).where(Budget.id == budget.id).with_for_update()).one()
    return budget


def _locked_entry(db: Session, entry_id: str) -> tuple[Budget, Entry]:
    """Return an entry as it is now that its budget is locked, and the budget.

    Raises:
        BadInput: there is no such entry.
    """
    dataset = db.scalars(select(Entry.dataset).where(Entry.id == entry_id)).one_or_none()
    if dataset is None:
        raise _no_such_entry(entry_id)
    budget = lock_budget(db, dataset)
    return budget, db.scalars(select(Entry).where(Entry.id == entry_id)).one()


def _no_such_entry(entry_id: str) -> BadInput:
    return BadInput("there is no such entry", where=f"ledger entry {entry_id}")


def _entries_of(db: Session, budget: Budget) -> list[Entry]:
    query = select(Entry).where(Entry.budget_id == budget.id).order_by(Entry.number)
    return list(db.scalars(query))


def _not_held(held: Sequence[Entry], asked: Sequence[Reservation]) -> list[Reservation]:
    known = {e.identity for e in held if e.state is not State.WITHDRAWN}
    return [r for r in asked if r.identity not in known]


def _refuse_alike(name: str, registered: Iterator[str]) -> None:
    """Refuse a name that people cannot tell from a registered one: case, or form of Unicode.

    Raises:
        BadInput: `Ward` beside `ward` would be a second budget for the same people by a slip.
    """
    for other in registered:
        if other != name and _folded(other) == _folded(name):
            raise BadInput(
                f"{name} differs from the registered data set {other} by its spelling alone",
                where="ledger register",
                fix=f"Use {other}, or a name that nobody confuses with it.",
            )


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


# --- faults


def _faults_of_file(db: Session) -> Iterator[str]:
    if db.get_bind().dialect.name != "sqlite":
        return  # PostgreSQL keeps its pages and references itself
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
            continue  # a lost seed is no fault of the ledger's
        try:
            if seeds.get(key).salted_hash() != seed_hash:
                yield f"the seed of entry {entry_id} is not the one that it was bound to"
        except BadInput as error:
            yield f"the seed of entry {entry_id}: {error.what}"
