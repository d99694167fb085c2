"""Admission: whether one more release, or one more plan, fits a privacy budget.

A budget (ε, δ) admits releases in one of two ways, and which one is decided before anything is
released (proof: docs/proofs.md, "Two ways to spend a budget"):

* `Way.SEQUENCE`: any adaptive sequence of releases within a Rényi filter. (ε, δ) is converted
  once, when the budget is opened, into a capacity (ρ, δ') at a fixed Rényi order; charges add up,
  and a release that would exceed either number is refused before the data is read.
* `Way.ONE_PLAN`: one group of releases, fixed before the first of them, whose privacy loss
  distribution (PLD) stays within (ε, δ). The budget is closed for everything else.

`decide` is the only function that admits. The command line, the first step of a run and the ledger
call it.

The filter follows Feldman and Zrnic (2021, arXiv:2008.11193). The coins of its approximate part
add up to at most δ' (Whitehouse et al. 2023, arXiv:2203.05481, for approximate zCDP; written out
for one order in docs/proofs.md). Releases may overlap in time (Haney et al. 2023,
arXiv:2309.05901).

The filter's unit of account is a charge (ρ, δ): the release is δ-approximately (α, ρ)-Rényi
private. A coin with probability δ, the same for both neighbours, can be tossed such that the Rényi
divergence of order α is at most ρ in both directions unless the coin comes up. δ = 0 is plain RDP
(Mironov 2017). α = ∞ is plain (ε, δ)-DP with ε = ρ (Kairouz, Oh and Viswanath 2015: every
(ε, δ)-DP mechanism has such a coin).
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from dp_core.errors import BadInput, BudgetExceeded
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.ledger.models import Budget, Entry, State, canonical, charged_groups
from dp_core.privacy.mechanisms import MechanismEvent, compose

LARGEST_ORDER = 512
LEAST_DELTA = 1e-300  # half of a smaller δ has no logarithm
LARGEST_DELTA = 0.01  # also the bound on a job's δ, which declares ten units or more


CLOSED = (
    "it was spent on one plan, fixed before its first release, and is closed for every other "
    "release (a lost seed that is drawn again is another release)"
)


class Way(StrEnum):
    """How a budget admits releases."""

    SEQUENCE = "any sequence"  # within the Rényi filter, each release chosen after earlier results
    ONE_PLAN = "one plan"  # fixed before its first release, by PLD; then the budget is closed


@dataclass(frozen=True)
class PrivacyCharge:
    """δ-approximate Rényi privacy (α, ρ), at an order that the context states."""

    rho: float
    delta: float


Releases = tuple[tuple[MechanismEvent, float], ...]  # each with the δ at which its ε is stated


@functools.lru_cache(maxsize=4096)
def charge(group: Releases, order: float) -> PrivacyCharge:
    """Return the charge of a group of releases that were fixed before the first of them.

    Args:
        group: the releases; more than one only if the plan was registered whole.
        order: Rényi order α > 1, or ∞.
    """
    if math.isinf(order):
        return pld_charge(group, math.fsum(delta for _, delta in group))
    return added([PrivacyCharge(*event.approximate_rdp(order, delta)) for event, delta in group])


@functools.lru_cache(maxsize=4096)
def pld_charge(group: Releases, delta: float) -> PrivacyCharge:
    """Return the (ε, δ) of a group of releases by PLD, at this δ for the whole group."""
    return PrivacyCharge(epsilon_pld(compose(*(event for event, _ in group)), delta), delta)


def added(charges: list[PrivacyCharge]) -> PrivacyCharge:
    """Return the sum of charges."""
    return PrivacyCharge(math.fsum(c.rho for c in charges), math.fsum(c.delta for c in charges))


@dataclass(frozen=True)
class Remaining:
    """The state of a budget.

    Attributes:
        way: how the budget admits releases; None while that is undecided.
        capacity, spent: in the unit of account of the way (of the filter while the way is
            undecided); None for made-up data, which has no limit.
        epsilon_so_far: the ε of `spent` at the budget's δ; None without a limit. It is for
            information only: the guarantee for all releases is the registered ε.
        share: spent share of the budget, by the scarcer of ρ and δ; of one plan, by ε.
        unsettled: planned or reserved entries whose step has not reported; they count as spent.
        operator_releases: releases without guarantee, listed and not charged.
    """

    budget: Budget
    way: Way | None
    capacity: PrivacyCharge | None
    spent: PrivacyCharge | None
    epsilon_so_far: float | None
    share: float
    charged_entries: int
    unsettled: int
    operator_releases: int

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data, with the capacity of both ways if the budget has a limit."""
        budget = self.budget
        limits = {Way.ONE_PLAN.value: pld_capacity, Way.SEQUENCE.value: filter_capacity}
        return vars(self) | {
            "capacity": None if self.capacity is None else vars(self.capacity),
            "spent": None if self.spent is None else vars(self.spent),
            "budget": budget.name,
            "unit": budget.unit,
            "relation": budget.relation,
            "epsilon": budget.epsilon,
            "of_study": budget.of_study,
            "delta": budget.delta,
            "renyi_order": "infinity" if math.isinf(budget.order) else budget.order,
            "ways": None
            if budget.made_up
            else {way: vars(limit(budget)) for way, limit in limits.items()},
        }


@dataclass(frozen=True)
class AdmissionDecision:
    """The decision on a planned group of releases, and the budget that it would leave.

    Attributes:
        way: how the budget would admit the group; None if it does not fit.
        charge: charge of the group, in the unit of account of the way (of the filter if the group
            does not fit); None without a limit.
        share: share of the whole budget that the group would take; 0 without a limit.
        left_after: share of the budget left after the group, not below 0. A budget that one plan
            has closed has nothing left.
        more_of_the_same: number of such groups that the budget still admits (0 if the group does
            not fit); None without a limit, or if none of its releases is new.
        new_releases: number of its releases that the ledger does not hold. The other releases are
            not charged again.
        refusal: the arithmetic of a refusal, in one clause; empty if the group fits.
    """

    way: Way | None
    charge: PrivacyCharge | None
    share: float
    left_after: float
    more_of_the_same: int | None
    new_releases: int
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether the group would be admitted now."""
        return self.way is not None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self) | {"fits": self.fits}


def best_order(epsilon: float, delta: float) -> float:
    """Return the Rényi order at which (ε, δ) admits the most Gaussian releases.

    ρ(α) of a Gaussian mechanism is proportional to α, so the best order has the largest capacity
    per α. If no order has room (tiny ε), the order is ∞, which adds (ε, δ).
    """
    rooms = {order: _renyi_room(epsilon, delta / 2, order) for order in range(2, LARGEST_ORDER)}
    best = max(rooms, key=lambda order: rooms[order] / order)
    return float(best) if rooms[best] > 0 else math.inf


def check_budget(epsilon: float, delta: float) -> None:
    """Refuse an invalid budget.

    Raises:
        BadInput: ε is not a positive number, or δ is not from LEAST_DELTA to LARGEST_DELTA.
    """
    if not 0 < epsilon < math.inf:
        raise BadInput(f"budget ε = {epsilon:g} is not finite and above 0", where="ledger register")
    if not LEAST_DELTA <= delta <= LARGEST_DELTA:
        raise BadInput(
            f"budget δ = {delta:g} is not from {LEAST_DELTA:g} to {LARGEST_DELTA:g}",
            where="ledger register",
            fix="δ must be far below one in the number of units, "
            "or giving one unit away whole would be private.",
        )


def check_order(order: float, epsilon: float, delta: float) -> None:
    """Refuse an order without computed charges, or one at which no release would fit.

    Raises:
        BadInput: the order is neither ∞ nor an integer from 2 to 512, or its conversion takes all
            of ε.
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


def capacity(budget: Budget) -> PrivacyCharge | None:
    """Return the upper bound on the sum of the budget's charges, or None without a limit."""
    if budget.made_up:
        return None
    return pld_capacity(budget) if budget.closed_for else filter_capacity(budget)


def filter_capacity(budget: Budget) -> PrivacyCharge:
    """Return the capacity of the filter.

    At a finite order, half of δ pays for the conversion of ρ to ε and half for the coins.
    """
    if math.isinf(budget.order):
        return pld_capacity(budget)
    whole = pld_capacity(budget)
    room = _renyi_room(whole.rho, whole.delta / 2, budget.order)
    return PrivacyCharge(max(0.0, room), whole.delta / 2)


def pld_capacity(budget: Budget) -> PrivacyCharge:
    """Return the capacity of one plan: (ε, δ) itself."""
    assert budget.epsilon is not None and budget.delta is not None  # noqa: S101 - not made up
    return PrivacyCharge(budget.epsilon, budget.delta)


def _renyi_room(epsilon: float, delta: float, order: float) -> float:
    """Return the ρ at which (α, ρ)-Rényi privacy still gives (ε, δ)-DP."""
    return epsilon - conversion(delta, order)


def conversion(delta: float, order: float) -> float:
    """Return ε − ρ, the cost of converting (α, ρ)-Rényi privacy to (ε, δ)-DP.

    ln(1 − 1/α) − (ln δ + ln α)/(α − 1): Canonne, Kamath and Steinke (2020), Proposition 12.
    """
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def releases(entries: Iterable[Entry]) -> Releases:
    """Return the releases with a guarantee, sorted, so that equal plans have equal charges."""
    held = [(entry.event, entry.delta) for entry in entries if entry.accounted]
    return tuple(sorted(held, key=lambda release: (canonical(release[0]), release[1])))


def spent_on(budget: Budget, entries: Iterable[Entry]) -> PrivacyCharge:
    """Return the total charge of all entries of a limited budget."""
    groups = [releases(group) for group in charged_groups(entries)]
    if budget.closed_for:
        return pld_charge(groups[0], pld_capacity(budget).delta)
    return added([charge(group, budget.order) for group in groups])


def decide(budget: Budget, held: Sequence[Entry], planned: Sequence[Entry]) -> AdmissionDecision:
    """Decide whether, and in which way, a budget admits a group of releases.

    The group is fixed before any of its releases. The filter decides first. A group that exceeds
    it is admitted as the budget's one plan if nothing else is charged to the budget.

    Args:
        budget: with the group that it is closed for, if any.
        held: all entries of the budget.
        planned: the releases of the group that the ledger does not hold yet.
    """
    room, more = capacity(budget), releases(planned)
    if room is None:
        return AdmissionDecision(Way.SEQUENCE, None, 0.0, 1.0, None, len(more))
    spent = spent_on(budget, held)
    left = 0.0 if budget.closed_for else max(0.0, 1 - _share(spent, room))
    if not more:
        way = _way(budget, held) or Way.SEQUENCE
        return AdmissionDecision(way, PrivacyCharge(0.0, 0.0), 0.0, left, None, 0)
    cost = charge(more, budget.order)
    if budget.closed_for:
        return AdmissionDecision(
            None, cost, _share(cost, filter_capacity(budget)), left, 0, len(more), CLOSED
        )
    total = added([spent, cost])
    if _within(total, room):
        again = min(
            _times(room.rho - spent.rho, cost.rho), _times(room.delta - spent.delta, cost.delta)
        )
        after = max(0.0, 1 - _share(total, room))
        return AdmissionDecision(Way.SEQUENCE, cost, _share(cost, room), after, again, len(more))
    refusal = _beyond(spent, cost, room, _currency(budget))
    if any(entry.charged for entry in held):
        return AdmissionDecision(None, cost, _share(cost, room), left, 0, len(more), refusal)
    limit = pld_capacity(budget)
    whole = pld_charge(more, limit.delta)
    share = whole.rho / limit.rho
    if whole.rho <= limit.rho:
        return AdmissionDecision(Way.ONE_PLAN, whole, share, 0.0, 1, len(more))
    refusal += f"; and as one plan ε {whole.rho:.5g} > {limit.rho:.5g} at δ = {limit.delta:g}"
    return AdmissionDecision(None, whole, share, left, 0, len(more), refusal)


def admit(budget: Budget, held: Sequence[Entry], planned: Sequence[Entry]) -> Way:
    """Return the way in which the budget admits the group.

    Raises:
        BudgetExceeded: the group does not fit; the message gives the arithmetic.
    """
    decision = decide(budget, held, planned)
    if decision.way is not None:
        return decision.way
    fix = "Nothing was read or charged. Use more noise or fewer updates, or stop here."
    if any(e.charged and e.state is State.PLANNED for e in held):
        fix += (
            " Planned releases hold some of the budget: `confide ledger withdraw DATASET RUN` gives"
            " back the plan of a run that has ended."
        )
    raise BudgetExceeded(
        f"the privacy budget (ε = {budget.epsilon:g}, δ = {budget.delta:g}) has no room: "
        f"{decision.refusal}{_held_open(held)}",
        where=f"data set {budget.name}",
        fix=fix,
    )


def _within(total: PrivacyCharge, room: PrivacyCharge) -> bool:
    return total.rho <= room.rho and total.delta <= room.delta


def _beyond(spent: PrivacyCharge, cost: PrivacyCharge, room: PrivacyCharge, currency: str) -> str:
    """Return the terms of a sum that exceeds the capacity."""
    total, terms = added([spent, cost]), []
    if not total.rho <= room.rho:
        terms.append(f"{currency} {spent.rho:.5g} + {cost.rho:.5g} > {room.rho:.5g}")
    if not total.delta <= room.delta:
        terms.append(f"δ {spent.delta:.3g} + {cost.delta:.3g} > {room.delta:.3g}")
    return f"spent + asked > capacity is {' and '.join(terms)}"


def _held_open(held: Sequence[Entry]) -> str:
    """Return a clause that names the runs whose unfinished steps hold some of the budget."""
    runs = Counter(e.run or "no run" for e in held if e.open)
    if not runs:
        return ""
    named = ", ".join(f"{n} of {run}" for run, n in runs.most_common(2))
    more = f" and {len(runs) - 2} more runs" if len(runs) > 2 else ""
    return f" ({sum(runs.values())} charged releases are planned or unfinished: {named}{more})"


def _currency(budget: Budget) -> str:
    if math.isinf(budget.order):
        return "ε"
    cost = conversion((budget.delta or 0.0) / 2, budget.order)
    return (
        f"ρ at Rényi order {budget.order:g} (capacity: ε = {budget.epsilon:g} less {cost:.5g} for "
        f"the conversion at δ = {(budget.delta or 0.0) / 2:g})"
    )


def _way(budget: Budget, held: Sequence[Entry]) -> Way | None:
    """Return the way in which the budget admits releases, or None while it holds none."""
    if budget.made_up or not any(entry.charged for entry in held):
        return None
    return Way.ONE_PLAN if budget.closed_for else Way.SEQUENCE


def standing(budget: Budget, entries: Sequence[Entry]) -> Remaining:
    """Return the state of the budget after these entries."""
    room = capacity(budget)
    spent = None if room is None else spent_on(budget, entries)
    share = _share(spent, room)
    if room is not None and spent is not None and budget.closed_for:
        share = spent.rho / room.rho
    return Remaining(
        budget=budget,
        way=_way(budget, entries),
        capacity=room,
        spent=spent,
        epsilon_so_far=_epsilon(budget, spent),
        share=share,
        charged_entries=sum(e.charged for e in entries),
        unsettled=sum(e.open for e in entries),
        operator_releases=sum(not e.accounted for e in entries),
    )


def _times(room: float, cost: float) -> int:
    if room < 0 or math.isinf(cost):
        return 0
    return 10**9 if cost <= room * 1e-9 else int(room / cost)


def _share(part: PrivacyCharge | None, whole: PrivacyCharge | None) -> float:
    if part is None or whole is None:
        return 0.0
    pairs = [(part.rho, whole.rho), (part.delta, whole.delta)]
    return max((p / w if w > 0 else math.inf for p, w in pairs if p > 0), default=0.0)


def _epsilon(budget: Budget, spent: PrivacyCharge | None) -> float | None:
    if spent is None or budget.delta is None:
        return None  # without a limit charges are not added up, and 0 would be a false ε
    if spent == PrivacyCharge(0.0, 0.0):
        return 0.0
    if budget.closed_for or math.isinf(budget.order):
        return spent.rho
    return max(0.0, spent.rho + conversion(budget.delta / 2, budget.order))
