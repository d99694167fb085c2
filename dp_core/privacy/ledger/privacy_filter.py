"""The privacy filter: whether one more release fits, however the releases were chosen.

The budget (ε, δ) is turned, once, when it opens, into a capacity (ρ, δ') at a fixed Rényi order.
Releases add up; one that would pass either number is refused before the data is read.
Feldman and Zrnic (2021, arXiv:2008.11193) for the Rényi part; the coins of the approximate part
add up to at most δ' (Whitehouse et al. 2023, arXiv:2203.05481, for approximate zCDP; written out
for one order in docs/adr/0005-ledger-composition.md). Releases may overlap in time (Haney et al.
2023, arXiv:2309.05901).

The currency is a charge (ρ, δ): the release is δ-approximately (α, ρ)-Rényi private. That is, one
can toss a coin with probability δ, the same for both neighbours, such that while it does not come
up the Rényi divergence of order α between them is at most ρ, in both directions. δ = 0 is plain
RDP (Mironov 2017). For α = ∞ it is plain (ε, δ)-DP with ε = ρ (Kairouz, Oh and Viswanath 2015:
every (ε, δ)-DP mechanism has such a coin).
"""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dp_core.errors import BadInput, BudgetExceeded
from dp_core.privacy.accounting import epsilon_pld
from dp_core.privacy.ledger.models import Budget, Entry, Reservation, State, canonical
from dp_core.privacy.mechanisms import MechanismEvent, compose

LARGEST_ORDER = 512
LEAST_DELTA = 1e-300  # below it half of δ has no logarithm
LARGEST_DELTA = 0.01  # a job's own δ is bounded by it too, and its units are ten at least


@dataclass(frozen=True)
class Charge:
    """δ-approximate Rényi privacy (α, ρ), at an order that the context tells."""

    rho: float
    delta: float

    def __add__(self, other: Charge) -> Charge:
        return Charge(self.rho + other.rho, self.delta + other.delta)


Release = tuple[str, float]  # canonical JSON of an event, and the δ of its own (ε, δ)


@functools.lru_cache(maxsize=4096)
def charge(group: tuple[Release, ...], order: float) -> Charge:
    """Return what a group of releases, fixed together before the first of them, costs.

    Args:
        group: the releases; more than one only if the plan was registered whole.
        order: Rényi order α > 1, or ∞.
    """
    events = [(MechanismEvent.from_json(json.loads(text)), delta) for text, delta in group]
    if math.isinf(order):
        total = math.fsum(delta for _, delta in events)
        return Charge(epsilon_pld(compose(*(event for event, _ in events)), total), total)
    return added([Charge(*event.approximate_rdp(order, delta)) for event, delta in events])


def added(charges: list[Charge]) -> Charge:
    """Return the charge of everything together."""
    return Charge(math.fsum(c.rho for c in charges), math.fsum(c.delta for c in charges))


@dataclass(frozen=True)
class Remaining:
    """How a budget stands.

    Attributes:
        capacity, spent: at the budget's order; None for made-up data, which has no limit.
        epsilon_so_far: the ε that `spent` amounts to at the budget's δ; None without a limit.
            Bookkeeping: what may be claimed for everything together is the budget's own ε, fixed
            before the first release.
        share: of the budget that is spent, from 0 to 1, by the scarcer of ρ and δ.
        unsettled: entries planned or reserved whose step has not reported; they count as spent.
        operator_releases: releases without guarantee, listed and not charged.
    """

    budget: Budget
    capacity: Charge | None
    spent: Charge | None
    epsilon_so_far: float | None
    share: float
    charged_entries: int
    unsettled: int
    operator_releases: int

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; an infinite order is the word "infinity"."""
        return {
            "budget": self.budget.name,
            "unit": self.budget.unit,
            "relation": self.budget.relation,
            "epsilon": self.budget.epsilon,
            "delta": self.budget.delta,
            "renyi_order": order_in_words(self.budget.order),
            "capacity": None if self.capacity is None else vars(self.capacity),
            "spent": None if self.spent is None else vars(self.spent),
            "epsilon_so_far": self.epsilon_so_far,
            "share": self.share,
            "charged_entries": self.charged_entries,
            "unsettled": self.unsettled,
            "operator_releases": self.operator_releases,
        }


@dataclass(frozen=True)
class Cost:
    """What a planned release would cost, and what it would leave.

    Attributes:
        charge: what it would take, at the budget's order; None where there is no limit.
        share: of the whole budget that it would take; 0 where there is no limit.
        fits: whether it would be admitted now.
        left_after: share of the budget left after it, not below 0.
        more_of_the_same: how many such releases the budget admits from now on (0 if it does
            not fit); None where there is no limit, or nothing of it is new.
        new_releases: how many of its releases the ledger does not hold yet. Those that it holds
            cost nothing again.
    """

    charge: Charge | None
    share: float
    fits: bool
    left_after: float
    more_of_the_same: int | None
    new_releases: int


def best_order(epsilon: float, delta: float) -> float:
    """Return the order at which (ε, δ) has room for most Gaussian releases.

    ρ(α) of a Gaussian mechanism is a multiple of α, so that is the order with the largest
    capacity per α. Where no order has room (ε tiny), ∞: sums of (ε, δ).
    """
    rooms = {order: _renyi_room(epsilon, delta / 2, order) for order in range(2, LARGEST_ORDER)}
    best = max(rooms, key=lambda order: rooms[order] / order)
    return float(best) if rooms[best] > 0 else math.inf


def check_budget(epsilon: float, delta: float) -> None:
    """Refuse a budget that is none.

    Raises:
        BadInput: ε is not a positive number, or δ is not from LEAST_DELTA to LARGEST_DELTA.
    """
    if not math.isfinite(epsilon):
        raise BadInput(f"budget ε = {epsilon} is not finite", where="ledger register")
    if epsilon <= 0:
        raise BadInput(f"budget ε = {epsilon:g} is not above 0", where="ledger register")
    if not LEAST_DELTA <= delta <= LARGEST_DELTA:
        raise BadInput(
            f"budget δ = {delta:g} is not from {LEAST_DELTA:g} to {LARGEST_DELTA:g}",
            where="ledger register",
            fix="δ must be far below one in the number of units, "
            "or giving one unit away whole would be private.",
        )


def check_order(order: float, epsilon: float, delta: float) -> None:
    """Refuse an order that the charges are not computed at, or at which nothing would fit.

    Raises:
        BadInput: neither ∞ nor a whole number from 2 to 512; or its conversion takes all of ε.
    """
    if math.isinf(order) and order > 0:
        return
    if not (2 <= order <= LARGEST_ORDER and order == int(order)):
        raise BadInput(
            f"Rényi order {order} is neither infinity nor a whole number from 2 to {LARGEST_ORDER}",
            where="ledger register",
        )
    if _renyi_room(epsilon, delta / 2, order) <= 0:
        raise BadInput(
            f"at Rényi order {order:g} the budget ε = {epsilon:g} has no room at all: "
            f"conversion takes {conversion(delta / 2, order):.4g}",
            where="ledger register",
            fix="Leave the order out, or take a higher one.",
        )


def capacity(budget: Budget) -> Charge | None:
    """Return what the budget's releases may add up to, or None without a limit.

    At a finite order half of δ pays for turning ρ into ε, and half for the coins.
    """
    if budget.epsilon is None or budget.delta is None:
        return None
    if math.isinf(budget.order):
        return Charge(budget.epsilon, budget.delta)
    room = _renyi_room(budget.epsilon, budget.delta / 2, budget.order)
    return Charge(max(0.0, room), budget.delta / 2)


def _renyi_room(epsilon: float, delta: float, order: float) -> float:
    """Return the ρ at which (α, ρ)-Rényi privacy still gives (ε, δ)-DP."""
    return epsilon - conversion(delta, order)


def conversion(delta: float, order: float) -> float:
    """Return ε − ρ: what it costs to state (α, ρ)-Rényi privacy as (ε, δ)-DP.

    ln(1 − 1/α) − (ln δ + ln α)/(α − 1): Canonne, Kamath and Steinke (2020), Proposition 12.
    """
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def groups_of(entries: Iterable[Entry]) -> list[tuple[Release, ...]]:
    """Return the charged releases, those of one plan that was registered whole together."""
    groups: dict[str, list[Release]] = {}
    for entry in entries:
        if entry.charged:
            key = f"plan {entry.plan_key}" if entry.whole_plan else f"entry {entry.id}"
            groups.setdefault(key, []).append((canonical(entry.event), entry.delta))
    return [tuple(sorted(releases)) for releases in groups.values()]


def releases(reservations: Iterable[Reservation]) -> tuple[Release, ...]:
    """Return what is charged, in an order of its own, so that equal plans have equal charges."""
    return tuple(sorted((canonical(r.event), r.delta) for r in reservations if r.accounted))


def spent_on(groups: Sequence[tuple[Release, ...]], order: float) -> Charge:
    """Return the sum of what the groups cost."""
    return added([charge(group, order) for group in groups])


def admit(budget: Budget, held: Sequence[Entry], more: tuple[Release, ...]) -> None:
    """Refuse a release, or a plan as a whole, that does not fit beside what is held.

    Raises:
        BudgetExceeded: with the arithmetic.
    """
    room = capacity(budget)
    if room is None or not more:
        return
    spent = spent_on(groups_of(held), budget.order)
    cost = charge(more, budget.order)
    total = spent + cost
    if total.rho <= room.rho and total.delta <= room.delta:
        return
    terms = []
    if not total.rho <= room.rho:
        terms.append(f"{_currency(budget)} {spent.rho:.5g} + {cost.rho:.5g} > {room.rho:.5g}")
    if not total.delta <= room.delta:
        terms.append(f"δ {spent.delta:.3g} + {cost.delta:.3g} > {room.delta:.3g}")
    fix = "Nothing was read or charged. Use more noise or fewer updates, or stop here."
    if any(e.charged and e.state is State.PLANNED for e in held):
        fix += (
            " Planned releases hold some of it: those of a run that failed are given back by "
            "`confide ledger withdraw DATASET RUN`."
        )
    raise BudgetExceeded(
        f"the privacy budget (ε = {budget.epsilon:g}, δ = {budget.delta:g}) has no room: "
        f"spent + asked > capacity is {' and '.join(terms)}{_held_open(held)}",
        where=f"data set {budget.name}",
        fix=fix,
    )


def _held_open(held: Sequence[Entry]) -> str:
    """Say which other runs hold some of the budget for steps that have not reported."""
    runs = Counter(e.run or "no run" for e in held if e.open)
    if not runs:
        return ""
    named = ", ".join(f"{n} of {run}" for run, n in runs.most_common(2))
    more = f" and {len(runs) - 2} more runs" if len(runs) > 2 else ""
    return f" ({sum(runs.values())} of what is spent are planned or unfinished: {named}{more})"


def _currency(budget: Budget) -> str:
    if math.isinf(budget.order):
        return "ε"
    cost = conversion((budget.delta or 0.0) / 2, budget.order)
    return (
        f"ρ at Rényi order {budget.order:g} (capacity: ε = {budget.epsilon:g} less {cost:.5g} for "
        f"the conversion at δ = {(budget.delta or 0.0) / 2:g})"
    )


def standing(budget: Budget, entries: Sequence[Entry]) -> Remaining:
    """Return how the budget stands after these entries."""
    room = capacity(budget)
    spent = None if room is None else spent_on(groups_of(entries), budget.order)
    return Remaining(
        budget=budget,
        capacity=room,
        spent=spent,
        epsilon_so_far=_epsilon(budget, spent),
        share=_share(spent, room),
        charged_entries=sum(e.charged for e in entries),
        unsettled=sum(e.open for e in entries),
        operator_releases=sum(not e.accounted for e in entries),
    )


def cost_of(budget: Budget, entries: Sequence[Entry], more: tuple[Release, ...]) -> Cost:
    """Return what the releases, as one plan, would cost beside the entries."""
    room = capacity(budget)
    if room is None:
        return Cost(None, 0.0, True, 1.0, None, len(more))
    spent = spent_on(groups_of(entries), budget.order)
    if not more:
        left = max(0.0, 1 - _share(spent, room))
        return Cost(Charge(0.0, 0.0), 0.0, True, left, None, 0)
    cost = charge(more, budget.order)
    total = spent + cost
    return Cost(
        charge=cost,
        share=_share(cost, room),
        fits=total.rho <= room.rho and total.delta <= room.delta,
        left_after=max(0.0, 1 - _share(total, room)),
        more_of_the_same=min(
            _times(room.rho - spent.rho, cost.rho), _times(room.delta - spent.delta, cost.delta)
        ),
        new_releases=len(more),
    )


def _times(room: float, cost: float) -> int:
    if room < 0 or math.isinf(cost):
        return 0
    return 10**9 if cost <= room * 1e-9 else int(room / cost)


def _share(part: Charge | None, whole: Charge | None) -> float:
    if part is None or whole is None:
        return 0.0
    pairs = [(part.rho, whole.rho), (part.delta, whole.delta)]
    return max((p / w if w > 0 else math.inf for p, w in pairs if p > 0), default=0.0)


def _epsilon(budget: Budget, spent: Charge | None) -> float | None:
    if spent is None or budget.delta is None:
        return None  # nothing is added up where there is no limit: 0 would be a false ε
    if spent == Charge(0.0, 0.0):
        return 0.0
    if math.isinf(budget.order):
        return spent.rho
    return max(0.0, spent.rho + conversion(budget.delta / 2, budget.order))


def order_in_words(order: float) -> float | str:
    """Return the order as JSON can hold it."""
    return "infinity" if math.isinf(order) else order
