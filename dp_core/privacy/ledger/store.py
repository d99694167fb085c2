"""The ledger itself: reserve before the data is read, settle after; refuse what does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dp_core.errors import BadInput
from dp_core.privacy.ledger import checks, rows
from dp_core.privacy.ledger import filter as privacy_filter
from dp_core.privacy.ledger.accounts import Accounts
from dp_core.privacy.ledger.entry import Entry, Reservation, State, by_identity, manifest_hash
from dp_core.privacy.seed_store import PrivacySeed, SeedStore


class Ledger(Accounts):
    """What was spent on each data set, and whether more may be.

    Every change is one transaction. Whatever kills a process, whenever, the ledger then shows at
    least what was released: an entry is there before the data is read, and stays.
    """

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
            if entry.state is State.WITHDRAWN:
                privacy_filter.admit(budget, held, privacy_filter.releases([reservation]))
                rows.revive_entry(db, entry, reservation, whole=False)
            if entry.state is State.PLANNED:
                rows.change_entry(db, entry.id, state=State.RESERVED.value, reserved_at=rows.now())
            return rows.find_entry(db, entry.id)

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
        self._warm(wanted)
        with self._database.transaction() as db:
            budget = rows.lock_budget(db, wanted[0].dataset)
            held = rows.entries_of(db, budget)
            known = by_identity(held)
            fresh = [r for r in wanted if not _holds(known, r)]
            if fresh:
                checks.refuse_growth(held, wanted[0].plan_key)
            privacy_filter.admit(budget, held, privacy_filter.releases(fresh))
            for reservation in fresh:
                if reservation.identity in known:
                    checks.refuse_different(reservation, known[reservation.identity])
                    rows.revive_entry(db, known[reservation.identity], reservation, whole=True)
                else:
                    rows.insert_entry(db, reservation, budget, whole=True)
            entries = by_identity(rows.entries_of(db, budget))
            for reservation in reservations:
                checks.refuse_different(reservation, entries[reservation.identity])
        return [entries[r.identity] for r in reservations]

    def withdraw_plan(self, dataset: str, plan_key: str) -> list[Entry]:
        """Give back what a plan registered and never began; an operator's act, on the record.

        Sound because nothing was read: a step reserves its entry before it opens the data, and in
        the same transaction as this. At Rényi order infinity only an untouched plan can be given
        back (see `checks.refuse_partial_withdrawal`). The entries stay, as `withdrawn`; asked for
        again, they are charged again.

        Returns:
            The entries that are withdrawn now.

        Raises:
            BadInput: no planned release of that plan, or a part of what was charged as one.
        """
        with self._database.transaction() as db:
            budget = rows.lock_budget(db, dataset)
            plan = [e for e in rows.entries_of(db, budget) if e.plan_key == plan_key]
            whole = [e for e in plan if e.whole_plan and e.charged]
            waiting = [e for e in whole if e.state is State.PLANNED]
            if not waiting:
                raise BadInput(
                    "it holds no planned release: what was begun stays charged",
                    where=f"ledger plan {plan_key}",
                )
            checks.refuse_partial_withdrawal(whole, budget)
            gone = {"state": State.WITHDRAWN.value, "withdrawn_at": rows.now()}
            for entry in waiting:
                rows.change_entry(db, entry.id, **gone)
            return [rows.find_entry(db, entry.id) for entry in waiting]

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
            budget, entry = rows.lock_entry(db, entry_id)
            if entry.state in (State.PLANNED, State.WITHDRAWN):
                raise BadInput("reserve it before it draws noise", where=f"ledger entry {entry_id}")
            if seed.known and not budget.made_up:
                raise BadInput("a known seed protects nobody", where=f"ledger entry {entry_id}")
            checks.refuse_unrecorded(entry)
            checks.refuse_rebinding(entry, seed_hash, manifest_digest)
            rows.change_entry(
                db,
                entry_id,
                seed_hash=seed_hash,
                manifest_hash=manifest_digest,
                known_seed=seed.known,
            )
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
        with self._database.transaction() as db:
            _, entry = rows.lock_entry(db, entry_id)
            if entry.state in (State.PLANNED, State.WITHDRAWN):
                raise BadInput("it was never reserved", where=f"ledger entry {entry_id}")
            if entry.accounted and not entry.seed_hash:
                raise BadInput(
                    "no seed is bound to it",
                    where=f"ledger entry {entry_id}",
                    fix="Take the seed by Ledger.seed, which records what it was used for.",
                )
            if entry.accounted != bool(released):
                raise BadInput(
                    "what is released with a guarantee, and only that, has a digest",
                    where=f"ledger entry {entry_id}",
                )
            checks.refuse_other_release(entry, released.hex())
            if entry.state is State.RESERVED:
                rows.change_entry(
                    db,
                    entry_id,
                    state=State.SETTLED.value,
                    settled_at=rows.now(),
                    released_hash=released.hex(),
                )
            return rows.find_entry(db, entry_id)

    def _warm(self, asked: Sequence[Reservation]) -> None:
        """Refuse what the budget cannot hold, and compute all charges before taking the lock.

        Charges are cached, so that inside the lock only those of entries that others added
        meanwhile are computed.
        """
        budget, held, fresh = self._compared(asked)
        if fresh:
            privacy_filter.cost_of(budget, held, privacy_filter.releases(fresh))


def _holds(known: Mapping[tuple[str, str, int], Entry], reservation: Reservation) -> bool:
    entry = known.get(reservation.identity)
    return entry is not None and entry.state is not State.WITHDRAWN
