"""What the ledger holds: budgets and entries, as values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dp_core.errors import BadInput
from dp_core.privacy.mechanisms import MechanismEvent, NeighboringRelation, PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed

LARGEST_DELTA = 0.01  # a job's own δ is bounded by it too, and its units are ten at least


class State(StrEnum):
    """How far an entry has come. All but the last count as spent."""

    PLANNED = "planned"  # part of a plan registered whole; its step has not begun
    RESERVED = "reserved"  # the step may have read the data: unknown counts as spent
    SETTLED = "settled"  # the step reported its release
    WITHDRAWN = "withdrawn"  # planned, given up by the operator before its step began: nothing read


@dataclass(frozen=True)
class Reservation:
    """A release that is about to be made.

    Attributes:
        dataset: registered name of the private data set.
        unit: what is protected.
        event: the mechanism, with public parameters only.
        delta: the δ at which this release states its own ε; 0 for a release without guarantee.
        spec_hash: hash of the step's spec. The same data set, spec hash and attempt are the same
            release, with the same seed, however often they are reserved.
        plan_key: names the run or sweep that the release belongs to.
        run: where people find it (a DAG run's id).
        attempt: 0; a higher number asks for a fresh seed, and is a charge of its own.
    """

    dataset: str
    unit: PrivacyUnit
    event: MechanismEvent
    delta: float
    spec_hash: str
    plan_key: str = ""
    run: str = ""
    attempt: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", PrivacyUnit(self.unit))
        if not self.dataset or not self.spec_hash:
            raise BadInput("a reservation names its data set and its spec hash", where="ledger")
        if not 0 <= self.delta < 1 or (self.delta == 0 and is_accounted(self.event)):
            raise BadInput(f"delta {self.delta} is not in (0, 1)", where="ledger reservation")
        if self.event.unit not in (None, self.unit):
            raise BadInput(
                f"the event protects the unit {self.event.unit}, the reservation {self.unit}",
                where="ledger reservation",
            )
        object.__setattr__(self, "event", self.event.stating(self.unit))

    @property
    def identity(self) -> tuple[str, str, int]:
        """Return what makes two reservations the same release."""
        return self.dataset, self.spec_hash, self.attempt


@dataclass(frozen=True)
class Budget:
    """What may be spent on one data set, or on several that may share people.

    Attributes:
        name: of the budget: that of the first data set registered with it.
        unit, relation: what is protected, and which data sets are neighbours; None for made-up
            data, where every unit may be tried.
        epsilon, delta: the guarantee for everything released together; None: made-up data, on
            which nothing needs a limit.
        order: Rényi order of the filter, fixed here once and for all; ∞ adds (ε, δ).
    """

    id: int
    name: str
    unit: PrivacyUnit | None
    relation: NeighboringRelation | None
    epsilon: float | None
    delta: float | None
    order: float

    @property
    def made_up(self) -> bool:
        """Whether the data are made up, so that nothing is limited and nothing protected."""
        return self.epsilon is None


@dataclass(frozen=True)
class Entry:
    """One release in the ledger. `event` is the record; every ε is computed from it when asked.

    Attributes:
        seed_key: name of its privacy seed in the seed store.
        seed_hash: salted hash of that seed; empty until it is bound.
        manifest_hash: keyed digest of everything the seed was used with; empty until bound.
        released_hash: digest of what was released, keyed by the seed; empty until it is settled,
            and for a release without guarantee.
        known_seed: the seed was not secret: not private.
        whole_plan: registered together with all entries of the same plan_key before any ran.
    """

    id: str
    dataset: str
    unit: PrivacyUnit
    event: MechanismEvent
    delta: float
    spec_hash: str
    attempt: int
    state: State
    plan_key: str
    whole_plan: bool
    run: str
    seed_key: str
    seed_hash: str
    manifest_hash: str
    known_seed: bool
    reserved_at: str
    settled_at: str
    withdrawn_at: str
    released_hash: str

    @property
    def identity(self) -> tuple[str, str, int]:
        """Return what a reservation of this very release has, too."""
        return self.dataset, self.spec_hash, self.attempt

    @property
    def accounted(self) -> bool:
        """False for a release without guarantee: the operator's, not charged but listed."""
        return is_accounted(self.event)

    @property
    def charged(self) -> bool:
        """Whether it counts as spent: it has a guarantee, and was not withdrawn unread."""
        return self.accounted and self.state is not State.WITHDRAWN

    @property
    def open(self) -> bool:
        """Whether it holds some of the budget for a step that has not reported."""
        return self.charged and self.state is not State.SETTLED

    def is_bound_to(self, seed: PrivacySeed, manifest: bytes) -> bool:
        """Return whether this seed was bound to the entry, for this very manifest."""
        bound = (self.seed_hash, self.manifest_hash)
        return bound == (seed.salted_hash(), manifest_hash(seed, manifest))

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain JSON data, for reports and scripts."""
        return {
            "id": self.id,
            "dataset": self.dataset,
            "unit": self.unit.value,
            "relation": self.event.relation.value,
            "event": self.event.to_json(),
            "delta": self.delta,
            "spec_hash": self.spec_hash,
            "attempt": self.attempt,
            "state": self.state.value,
            "accounted": self.accounted,
            "plan_key": self.plan_key,
            "whole_plan": self.whole_plan,
            "run": self.run,
            "seed_hash": self.seed_hash,
            "known_seed": self.known_seed,
            "reserved_at": self.reserved_at,
            "settled_at": self.settled_at,
            "withdrawn_at": self.withdrawn_at,
            "released_hash": self.released_hash,
        }


def by_identity(entries: Iterable[Entry]) -> dict[tuple[str, str, int], Entry]:
    """Return the entries, to be found by a reservation's identity."""
    return {entry.identity: entry for entry in entries}


def manifest_hash(seed: PrivacySeed, manifest: bytes) -> str:
    """Return a digest of the manifest that only who holds the seed can confirm a guess by."""
    return seed.derive("ledger manifest", manifest).hex()


def is_accounted(event: MechanismEvent) -> bool:
    """Return whether the event has any guarantee at all."""
    return not event.is_unaccounted


def canonical(event: MechanismEvent) -> str:
    """Return the event as the one JSON text that equal events share."""
    return json.dumps(event.to_json(), sort_keys=True, separators=(",", ":"))


def check_budget(epsilon: float, delta: float) -> None:
    """Refuse a budget that is none.

    Raises:
        BadInput: ε is not a positive number, or δ not above 0 and at most LARGEST_DELTA.
    """
    if not math.isfinite(epsilon):
        raise BadInput(f"budget ε = {epsilon} is not finite", where="ledger register")
    if epsilon <= 0:
        raise BadInput(f"budget ε = {epsilon:g} is not above 0", where="ledger register")
    if not 0 < delta <= LARGEST_DELTA:
        raise BadInput(
            f"budget δ = {delta:g} is not above 0 and at most {LARGEST_DELTA:g}",
            where="ledger register",
            fix="δ must be far below one in the number of units, "
            "or giving one unit away whole would be private.",
        )
