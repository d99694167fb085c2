"""What a reservation must agree with, apart from the budget's size."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence

from dp_core.errors import BadInput
from dp_core.privacy.ledger.entry import Budget, Entry, Reservation, State, canonical, is_accounted


def refuse_alike(name: str, registered: Iterable[str]) -> None:
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


def refuse_foreign(reservation: Reservation, budget: Budget) -> None:
    """Refuse what cannot be added up with the rest of the budget.

    Raises:
        BadInput: another unit, or another neighbour relation.
    """
    if budget.made_up or not is_accounted(reservation.event):
        return
    if reservation.unit is not budget.unit:
        raise BadInput(
            f"its budget protects the unit {budget.unit}, this release {reservation.unit}",
            where=f"data set {reservation.dataset}",
            fix="Guarantees for different units do not add up: use the budget's unit.",
        )
    if reservation.event.relation is not budget.relation:
        raise BadInput(
            f"its budget is for {budget.relation} neighbours, this release for "
            f"{reservation.event.relation}",
            where=f"data set {reservation.dataset}",
            fix="Use a sampler with the budget's relation.",
        )


def refuse_different(reservation: Reservation, entry: Entry) -> None:
    """Refuse a reservation that is not the one the entry was made for.

    Raises:
        BadInput: same spec hash, other mechanism: the charge would not be that of the release.
    """
    asked = (reservation.unit, canonical(reservation.event), reservation.delta)
    if asked != (entry.unit, canonical(entry.event), entry.delta):
        raise BadInput(
            "the same spec hash was reserved for another mechanism",
            where=f"ledger entry {entry.id}",
            fix="A spec hash must determine the mechanism.",
        )


def refuse_growth(held: Iterable[Entry], plan_key: str) -> None:
    """Refuse to add to a plan that was registered whole, and so composed as one.

    Raises:
        BadInput: it was.
    """
    if any(e.whole_plan and e.plan_key == plan_key and e.charged for e in held):
        raise BadInput(
            "the plan was registered whole and has grown since",
            where=f"ledger plan {plan_key}",
            fix="Register what is new as a plan of its own.",
        )


def refuse_partial_withdrawal(plan: Sequence[Entry], budget: Budget) -> None:
    """Refuse to give back a part of a plan that was composed as one release.

    At α = ∞ a plan is charged the PLD of all its releases, which presumes that all were fixed
    beforehand. To stop after looking at the first ones, and to pay for those alone, would make a
    filter of PLDs, which is none. At a finite order charges add up release by release, and a
    release that was never made costs nothing.

    Raises:
        BadInput: one of the plan's releases has begun.
    """
    begun = [e for e in plan if e.state in (State.RESERVED, State.SETTLED)]
    if math.isinf(budget.order) and begun:
        raise BadInput(
            f"{len(begun)} of its {len(plan)} releases have begun, and it was charged as one",
            where=f"ledger plan {plan[0].plan_key}",
            fix="It stays charged: at Rényi order infinity only an untouched plan is given back.",
        )


def refuse_rebinding(entry: Entry, seed_hash: str, manifest_hash: str) -> None:
    """Refuse a second seed for one charge, or a second input for one noise.

    Raises:
        BadInput: the entry is bound to others.
    """
    for bound, given, what in (
        (entry.seed_hash, seed_hash, "its seed is not the one it began with"),
        (entry.manifest_hash, manifest_hash, "its inputs are not those it began with"),
    ):
        if bound and bound != given:
            raise BadInput(
                what,
                where=f"ledger entry {entry.id}",
                fix="One charge pays for one noise: reserve a new attempt, which is charged.",
            )


def refuse_unrecorded(entry: Entry) -> None:
    """Refuse to make again what was released without a record: it could not be handed out.

    Raises:
        BadInput: an older version settled it, and kept no digest of what came out.
    """
    if entry.state is State.SETTLED and entry.accounted and not entry.released_hash:
        raise BadInput(
            "this was released before, and nothing tells any more what came out",
            where=f"ledger entry {entry.id}",
            fix="Restore the output from a copy, or use another seed: a new charge.",
        )


def refuse_other_release(entry: Entry, released_hash: str) -> None:
    """Refuse a second release under one noise and one charge.

    Two models that share their noise and differ by the rounding of their sums, two histograms
    that share it and differ by a word: the difference is the data's own, without noise.

    Raises:
        BadInput: something else came out before.
    """
    refuse_unrecorded(entry)
    if entry.released_hash and entry.released_hash != released_hash:
        raise BadInput(
            "this was released before, and came out otherwise this time",
            where=f"ledger entry {entry.id}",
            fix="Restore the output from a copy, or use another seed: a new charge.",
        )
