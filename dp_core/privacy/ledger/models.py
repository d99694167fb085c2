"""The ledger's tables as SQLAlchemy mapped classes, with the consistency rules of their rows."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import Dialect, Double, ForeignKey, Text, UniqueConstraint, inspect, select
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column
from sqlalchemy.types import TypeDecorator

from dp_core.config.privacy import MOST_CLAIM
from dp_core.errors import BadInput
from dp_core.privacy.ledger.database import RESTORE, Database, LedgerDamaged
from dp_core.privacy.mechanisms import MechanismEvent, NeighboringRelation, PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed

_SHOWN = (  # what an entry shows of itself, without the key of its seed and its manifest
    "id", "dataset", "unit", "delta", "spec_hash", "attempt", "state", "accounted", "plan_key",
    "whole_plan", "run", "seed_hash", "known_seed", "reserved_at", "settled_at", "withdrawn_at",
    "released_hash",
)  # fmt: skip
SCHEMA_VERSION = 7  # of the tables; a ledger of another version is refused


class State(StrEnum):
    """Progress of an entry. All states except the last count as spent."""

    PLANNED = "planned"  # part of a plan registered whole; its step has not begun
    RESERVED = "reserved"  # the step may have read the data, and counts as if it had
    SETTLED = "settled"  # the step reported its release
    WITHDRAWN = "withdrawn"  # planned, and given back before its step began: nothing was read


def now() -> str:
    """Return the time, UTC, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def canonical(event: MechanismEvent) -> str:
    """Return the event as canonical JSON: equal events have equal texts."""
    return json.dumps(event.to_json(), sort_keys=True, separators=(",", ":"))


def manifest_hash(seed: PrivacySeed, manifest: bytes) -> str:
    """Return the manifest's digest, keyed by the seed so that guesses cannot be confirmed."""
    return seed.derive("ledger manifest", manifest).hex()


class _Stored(TypeDecorator[Any]):
    """A text column that is parsed into a value; an unreadable value means a damaged ledger."""

    impl = Text
    cache_ok = True

    def __init__(self, read: Callable[[str], Any], write: Callable[[Any], str] = str) -> None:
        super().__init__()
        self.read, self.write = read, write

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else self.write(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        try:
            return self.read(value)
        except (ValueError, TypeError) as error:
            where = "an entry or budget of the privacy ledger"
            raise LedgerDamaged("it cannot be read", where=where, fix=RESTORE) from error


class Base(MappedAsDataclass, DeclarativeBase):
    """Root of the mapped classes. A change of a column is another version of the schema."""

    type_annotation_map = {  # noqa: RUF012 - as SQLAlchemy declares it
        float: Double,
        PrivacyUnit: _Stored(PrivacyUnit),
        NeighboringRelation: _Stored(NeighboringRelation),
        State: _Stored(State),
        MechanismEvent: _Stored(lambda text: MechanismEvent.from_json(json.loads(text)), canonical),
    }


class LedgerSchema(Base, kw_only=True):
    """The version of the tables and the ledger's random identifier, in a single row.

    Every release of Confide can read the version. Copies of the ledger share the identifier.
    """

    __tablename__ = "ledger_schema"

    version: Mapped[int] = mapped_column(primary_key=True, default=SCHEMA_VERSION)
    id: Mapped[str] = mapped_column(default_factory=lambda: secrets.token_hex(16))


class Budget(Base, kw_only=True):
    """Privacy budget of one data set, or of several that may share people.

    Attributes:
        name: the name of the first data set registered with it.
        unit, relation: the protected unit and the neighbouring relation; None for made-up data,
            which accepts every unit.
        epsilon, delta: the guarantee for all releases together; None for made-up data, which
            needs no limit.
        order: Rényi order of the filter, fixed when the budget is opened; ∞ adds (ε, δ).
        closed_for: the group of entries (`Entry.group`) that was admitted as the budget's one plan
            and closed it for every other release; empty for a filter, and while nothing is
            charged.
    """

    __tablename__ = "budgets"

    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    name: Mapped[str] = mapped_column(unique=True)
    unit: Mapped[PrivacyUnit | None] = mapped_column(default=None)
    relation: Mapped[NeighboringRelation | None] = mapped_column(default=None)
    epsilon: Mapped[float | None] = mapped_column(default=None)
    delta: Mapped[float | None] = mapped_column(default=None)
    order: Mapped[float] = mapped_column("renyi_order", default=math.inf)
    opened_at: Mapped[str] = mapped_column(default_factory=now)
    closed_for: Mapped[str] = mapped_column(default="")

    @classmethod
    def of_dataset(cls, db: Session, name: str) -> Budget:
        """Return the budget of a registered data set.

        Raises:
            BadInput: it is not registered.
        """
        query = select(Budget).join(Dataset).where(Dataset.name == name)
        budget = db.scalars(query).one_or_none()
        if budget is None:
            what = "it is not registered in the privacy ledger"
            fix = "Declare its unit and budget first: confide ledger register."
            raise BadInput(what, where=f"data set {name}", fix=fix)
        return budget

    @property
    def made_up(self) -> bool:
        """Whether the data are made up, so that releases are neither limited nor protected."""
        return self.epsilon is None

    @property
    def of_study(self) -> bool:
        """Whether ε has no meaning, so that all releases stay with the operator."""
        return self.epsilon is not None and self.epsilon > MOST_CLAIM

    @property
    def terms(self) -> tuple[object, ...]:
        """The promised guarantee: two budgets with the same terms differ only by their names."""
        return self.unit, self.relation, self.epsilon, self.delta, self.order

    def refuse_foreign(self, held: Sequence[Entry], planned: Sequence[Entry]) -> None:
        """Refuse releases whose guarantees do not add up with the rest of the budget.

        Args:
            held: the entries of this budget.
            planned: the releases to be added.

        Raises:
            BadInput: the unit, what an example is, or the neighbouring relation differs.
        """
        if self.made_up:
            return
        accounted = [entry for entry in planned if entry.accounted]
        for release in accounted:
            if release.unit is not self.unit:
                what = f"its budget protects the unit {self.unit}, this release {release.unit}"
                fix = "Guarantees for different units do not add up: use the budget's unit."
                raise BadInput(what, where=f"data set {release.dataset}", fix=fix)
            if release.event.relation is not self.relation:
                raise BadInput(
                    f"its budget is for {self.relation} neighbours, this release for "
                    f"{release.event.relation}",
                    where=f"data set {release.dataset}",
                    fix="Use a sampler with the budget's relation.",
                )
        events = [entry.event for entry in (*(e for e in held if e.charged), *accounted)]
        units = sorted({event.unit_in_words for event in events})
        if len(units) > 1:
            raise BadInput(
                f"its releases would protect different units: {', '.join(units)}",
                where=f"budget {self.name}",
                fix="Guarantees for different units do not add up: set words_per_unit to the value"
                " of the earlier releases, or register another budget.",
            )

    def refuse_partial_withdrawal(self, plan: Sequence[Entry]) -> None:
        """Refuse to withdraw a part of a plan that is composed by PLD.

        Such a plan is charged the PLD of all its releases, which presumes that all were fixed
        before the first. To stop after the first results and pay only for the finished releases
        would be a PLD filter, which is unsound. The charges of a Rényi filter add up release by
        release, so a release that was never made costs nothing.

        Raises:
            BadInput: one of the plan's releases has begun.
        """
        begun = [e for e in plan if e.begun]
        if begun and (math.isinf(self.order) or self.closed_for == plan[0].group):
            raise BadInput(
                f"{len(begun)} of its {len(plan)} releases have begun, and it was charged as one",
                where=f"ledger plan {plan[0].plan_key}",
                fix="It stays charged: a plan that is composed by PLD is given back whole or not "
                "at all.",
            )


class Dataset(Base, kw_only=True):
    """A registered data set, and the budget that its releases are charged to."""

    __tablename__ = "datasets"

    name: Mapped[str] = mapped_column(primary_key=True)
    budget_id: Mapped[int] = mapped_column(ForeignKey(Budget.id))
    registered_at: Mapped[str] = mapped_column(default_factory=now)


class Entry(Base):
    """One release of private data: planned, reserved before the data is read, and then settled.

    A new object is a plan. The ledger stores it (`Ledger.reserve`, `Ledger.register_plan`). Every
    ε is computed from `event` on demand.

    Attributes:
        number: the order of reservation.
        dataset: registered name of the private data set.
        unit: the protected unit.
        event: the mechanism, with public parameters only.
        delta: the δ at which this release's ε is stated; 0 for a release without guarantee.
        spec_hash: hash of the step's spec. Entries with the same data set, spec hash and attempt
            are one release with one seed.
        plan_key: names the run or sweep that the release belongs to.
        run: the run's name for operators (a DAG run's id).
        attempt: 0 at first. A higher number gets a fresh seed and is charged separately.
        declared_units: public upper bound on the number of units; 0 if it is not known.
        whole_plan: all entries of the same plan_key were registered before the first one ran.
        seed_key: name of its privacy seed in the seed store.
        seed_hash: salted hash of that seed; empty until it is bound.
        manifest_hash: keyed digest of everything the seed was used with; empty until bound.
        known_seed: the seed was not secret, so the release is not private.
        released_hash: digest of the output, keyed by the seed; empty until it is settled, and for
            a release without guarantee.
    """

    __tablename__ = "entries"
    __table_args__ = (UniqueConstraint("dataset", "spec_hash", "attempt"),)

    number: Mapped[int] = mapped_column(primary_key=True, init=False)
    budget_id: Mapped[int] = mapped_column(ForeignKey(Budget.id), index=True, init=False)
    dataset: Mapped[str] = mapped_column(ForeignKey(Dataset.name))
    unit: Mapped[PrivacyUnit]
    event: Mapped[MechanismEvent]
    delta: Mapped[float]
    spec_hash: Mapped[str]
    plan_key: Mapped[str] = mapped_column(default="")
    run: Mapped[str] = mapped_column(default="")
    attempt: Mapped[int] = mapped_column(default=0)
    declared_units: Mapped[int] = mapped_column(default=0)
    state: Mapped[State] = mapped_column(default=State.PLANNED)
    whole_plan: Mapped[bool] = mapped_column(default=False)
    id: Mapped[str] = mapped_column(unique=True, default_factory=lambda: secrets.token_hex(16))
    seed_key: Mapped[str] = mapped_column(default_factory=lambda: secrets.token_hex(16))
    seed_hash: Mapped[str] = mapped_column(default="")
    manifest_hash: Mapped[str] = mapped_column(default="")
    known_seed: Mapped[bool] = mapped_column(default=False)
    reserved_at: Mapped[str] = mapped_column(default_factory=now)
    settled_at: Mapped[str] = mapped_column(default="")
    withdrawn_at: Mapped[str] = mapped_column(default="")
    released_hash: Mapped[str] = mapped_column(default="")

    def __post_init__(self) -> None:
        """Refuse a plan that contradicts itself, and write the unit into the event."""
        self.unit = PrivacyUnit(self.unit)
        if not self.dataset or not self.spec_hash:
            raise BadInput("a release names its data set and its spec hash", where="ledger")
        if not 0 <= self.delta < 1 or (self.delta == 0 and self.accounted):
            raise BadInput(f"delta {self.delta} is not in (0, 1)", where="ledger entry")
        if self.event.unit not in (None, self.unit):
            what = f"the event protects the unit {self.event.unit}, the release {self.unit}"
            raise BadInput(what, where="ledger entry")
        self.event = self.event.stating(self.unit)

    def repeated(self, run: str, attempt: int) -> Entry:
        """Return a new plan of the same release, as an attempt of this run."""
        new_id, seed_key = secrets.token_hex(16), secrets.token_hex(16)
        return replace(self, plan_key=run, run=run, attempt=attempt, id=new_id, seed_key=seed_key)

    def plan_again(self, run: str) -> None:
        """Plan a withdrawn release again: it is charged from now on, like a new entry."""
        self.state, self.run, self.reserved_at, self.withdrawn_at = State.PLANNED, run, now(), ""

    def withdraw(self) -> None:
        """Withdraw a planned release."""
        self.state, self.withdrawn_at = State.WITHDRAWN, now()

    @property
    def group(self) -> str:
        """Key of the releases that were fixed together with this one, before the first of them."""
        return f"plan {self.plan_key}" if self.whole_plan else f"entry {self.id}"

    @property
    def begun(self) -> bool:
        """Whether the step may have read the data."""
        return self.state in (State.RESERVED, State.SETTLED)

    @property
    def identity(self) -> tuple[str, str, int]:
        """The key by which two entries are the same release."""
        return self.dataset, self.spec_hash, self.attempt

    @property
    def accounted(self) -> bool:
        """Whether the release has a guarantee; the operator's other releases are only listed."""
        return not self.event.is_unaccounted

    @property
    def charged(self) -> bool:
        """Whether the entry counts as spent: it has a guarantee and was not withdrawn."""
        return self.accounted and self.state is not State.WITHDRAWN

    @property
    def open(self) -> bool:
        """Whether the entry holds a part of the budget for a step that has not reported."""
        return self.charged and self.state is not State.SETTLED

    def is_bound_to(self, seed: PrivacySeed, manifest: bytes) -> bool:
        """Return whether this seed was bound to the entry with this manifest."""
        bound = (self.seed_hash, self.manifest_hash)
        return bound == (seed.salted_hash(), manifest_hash(seed, manifest))

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain JSON data, for reports and scripts."""
        return {name: getattr(self, name) for name in _SHOWN} | {
            "event": self.event.to_json(),
            "relation": self.event.relation,
        }

    # --- consistency checks

    def refuse_different(self, planned: Entry) -> None:
        """Refuse a plan that differs from the plan that created the entry.

        Raises:
            BadInput: the spec hash is the same and the mechanism differs, so the charge would not
                match the release.
        """
        mechanism = (planned.unit, canonical(planned.event), planned.delta)
        if mechanism != (self.unit, canonical(self.event), self.delta):
            self._refuse(
                "the same spec hash was reserved for another mechanism",
                "A spec hash must determine the mechanism.",
            )

    def refuse_rebinding(self, seed_hash: str, manifest_hash: str) -> None:
        """Refuse a second seed for one charge, or a second input for one noise.

        Raises:
            BadInput: the entry is bound to another seed or manifest.
        """
        for bound, given, what in (
            (self.seed_hash, seed_hash, "its seed is not the one it began with"),
            (self.manifest_hash, manifest_hash, "its inputs are not those it began with"),
        ):
            if bound and bound != given:
                fix = "One charge pays for one noise: reserve a new attempt, which is charged."
                self._refuse(what, fix)

    def refuse_unrecorded(self) -> None:
        """Refuse to repeat a release whose output was not recorded, since it cannot be verified.

        Raises:
            BadInput: the entry is settled without a digest of its output.
        """
        if self.state is State.SETTLED and self.accounted and not self.released_hash:
            self._refuse(
                "this was released before, and the digest of its output is lost",
                "Restore the output from a copy, or use another seed: a new charge.",
            )

    def verify_reproduced_release(self, released_hash: str) -> None:
        """Refuse a second release under one noise and one charge.

        If two outputs share their noise, their difference reveals the data without noise: for
        example two models that differ by the rounding of their sums, or two histograms that differ
        by a word.

        Raises:
            BadInput: the recorded output differs.
        """
        self.refuse_unrecorded()
        if self.released_hash and self.released_hash != released_hash:
            self._refuse(
                "this was released before, and its output differs this time",
                "Restore the output from a copy, or use another seed: a new charge.",
            )

    def _refuse(self, what: str, fix: str) -> None:
        raise BadInput(what, where=f"ledger entry {self.id}", fix=fix)


def by_identity(entries: Iterable[Entry]) -> dict[tuple[str, str, int], Entry]:
    """Return the entries by `Entry.identity`."""
    return {entry.identity: entry for entry in entries}


def charged_groups(entries: Iterable[Entry]) -> list[list[Entry]]:
    """Return the charged entries by group. A plan that was registered whole is one group."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.charged:
            groups.setdefault(entry.group, []).append(entry)
    return list(groups.values())


def create_tables(database: Database) -> None:
    """Create the tables of an empty database, and refuse tables of another version.

    Raises:
        BadInput: another release of Confide made the ledger.
    """
    if not (version := _version_of(database)):
        with database.alone() as db:
            if not _has_version(db):  # no other process was faster
                Base.metadata.create_all(db.connection(), checkfirst=False)
                db.add(LedgerSchema())
        version = _version_of(database)
    if version != SCHEMA_VERSION:
        release = "newer" if version > SCHEMA_VERSION else "older"
        what = f"its schema has version {version}, this release reads {SCHEMA_VERSION}"
        fix = f"Use the {release} release of Confide that made it."
        raise BadInput(what, where="privacy ledger", fix=fix)


def _version_of(database: Database) -> int:
    """Return the version of the tables; 0 for an empty database."""
    with database.transaction() as db:
        return db.scalars(select(LedgerSchema.version)).one() if _has_version(db) else 0


def _has_version(db: Session) -> bool:
    return inspect(db.connection()).has_table(LedgerSchema.__tablename__)
