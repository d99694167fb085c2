"""Differentially private partition selection: which of the items that units hold may be named.

Also called private set union (Gopi et al. 2020, arXiv:2002.09745). Items are words, phrases, or
whatever text a unit's content is made of. Every mechanism works alike:

1. *Bound.* `item_sets` keeps at most N distinct items of each unit, drawn by the unit's own coins.
2. *Weigh.* `weigh` is a function of one shard of units and of what earlier rounds came to; sums of
   several shards are added up by item (`release` does, for shards in memory).
3. *Noise*, once for the sum, a discrete Gaussian on the lattice of the weights, from the seed of
   the reservation; what reaches the threshold is released.
4. *Estimate.* A last round of little noise budget counts the units of what was released: `released`
   items come with an estimate of how many units hold them. All after noise is post-processing.

What is drawn is what `event()` says, and the accounting reads nothing else.
"""

from __future__ import annotations

import abc
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from dp_core.data.hashing import digest64
from dp_core.data.privacy_units import bounded_sample
from dp_core.errors import BadInput, PlanError
from dp_core.privacy.discrete_gaussian import lattice_gaussian
from dp_core.privacy.mechanisms import (
    MechanismEvent,
    NoisedWeights,
    PrivacyUnit,
    ThresholdedHistogram,
)
from dp_core.vocabulary.calibration import HistogramPlan, refuse_unearned
from dp_core.vocabulary.dp_histogram import release as release_counts

if TYPE_CHECKING:
    from dp_core.privacy.seed_store import PrivacySeed

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
Flags = NDArray[np.bool_]
DROP = 1.0  # deviations of all noise so far: evidence below is given up (elimination)
HOPELESS = 2.0  # deviations by which the first round may have been too low (mad2r)
ABOVE = 2.0  # deviations above the threshold: the level of mad; 3 for policy (Gopi et al.)


@dataclass(frozen=True)
class ItemSets:
    """One shard: units' sets of items, bounded, each unit once. Private.

    Attributes:
        items: distinct items of the shard. starts: int64 `[units + 1]`; unit u holds the items
            `members[starts[u]:starts[u + 1]]`, int32.
        order: uint64 `[units]`, public coins: the order in which a sequential mechanism takes them.
        items_per_unit: N, most distinct items of a unit. declared_units: most units, if checked.
    """

    items: list[str] = field(repr=False)
    starts: NDArray[np.int64] = field(repr=False)
    members: NDArray[np.int32] = field(repr=False)
    order: NDArray[np.uint64] = field(repr=False)
    items_per_unit: int
    declared_units: int | None = None

    @property
    def units(self) -> int:
        """How many units the shard holds. Private."""
        return len(self.order)

    @property
    def owners(self) -> NDArray[np.int64]:
        """The unit of each of `members`."""
        return np.repeat(np.arange(self.units), np.diff(self.starts))


def item_sets(
    units: Iterable[tuple[str, Iterable[str]]],
    items_per_unit: int,
    key: bytes,
    *,
    declared_units: int | None = None,
    exclude: Collection[str] = frozenset(),
) -> ItemSets:
    """Return the units' sets of items, bounded before anything is counted.

    Items of `exclude` are nobody's: they are taken out of a unit before its items are bounded, so
    that all N of them may be others. **This leaves the sensitivity as it is**: for a list that is
    fixed before the private text is read, what a unit brings is still a function of that unit alone
    (its items without the list's, bounded), and still N of them at most. A list that depends on the
    private text would break both, so it is made of public text, and the release's manifest holds
    its digest.

    Args:
        units: (id, items) of every unit of the shard, once.
        items_per_unit: N; where a unit has more distinct items, N of them are drawn uniformly, by
            the unit's own coins.
        key: public coins for that draw, and for the order of units.
        declared_units: the public upper bound on the number of units (of this shard).
        exclude: public items, which need no release: they count nowhere.

    Raises:
        BadInput: more units than declared. (How many there are is private, and not said.)
    """
    if items_per_unit < 1:
        raise BadInput(f"{items_per_unit} is below 1", where="items_per_unit", fix="Use 1 or more.")
    public = frozenset(exclude)
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__  # an item met first gets the next number
    members: list[int] = []
    starts, order = [0], []
    for count, (unit_id, items) in enumerate(units, 1):
        if declared_units is not None and count > declared_units:
            raise BadInput(
                f"the corpus holds more units than the declared bound of {declared_units}",
                where="declared_units",
                fix="Declare a higher bound, from public knowledge.",
            )
        distinct: Collection[str] = set(items)
        if public:
            distinct = {item for item in distinct if item not in public}
        if len(distinct) > items_per_unit:
            # Sorted: the order of a set differs between processes.
            distinct = bounded_sample(sorted(distinct), items_per_unit, unit_id, key)
        members.extend(map(numbers.__getitem__, distinct))
        starts.append(len(members))
        order.append(digest64(key, "order of units", unit_id))
    return ItemSets(
        list(numbers),
        np.array(starts, np.int64),
        np.array(members, np.int32),
        np.array(order, np.uint64),
        items_per_unit,
        declared_units,
    )


@dataclass(frozen=True)
class PartitionSelection(abc.ABC):
    """A mechanism that releases items, with all its numbers, and the (ε, δ) that it earns.

    Attributes:
        items_per_unit: N. epsilon, delta: claimed. unit: what is added or removed.
        declared_units: public upper bound on the number of units.
    """

    items_per_unit: int
    epsilon: float
    delta: float
    unit: PrivacyUnit | None
    declared_units: int

    @abc.abstractmethod
    def event(self) -> MechanismEvent:
        """Return the mechanism, for the ledger."""

    @abc.abstractmethod
    def release(
        self, shards: Sequence[ItemSets], seed: PrivacySeed, context: bytes
    ) -> dict[str, int]:
        """Return the released items, sorted, each with an estimate of how many units hold it.

        Only this result is released. The same seed and context give the same noise, so that a
        retry of the same release reveals nothing more.

        Args:
            shards: every unit in one of them, once.
            seed: the privacy seed of this reservation.
            context: what the noise is bound to (a digest of data and plan).

        Raises:
            PlanError: a shard was bounded more loosely than the plan assumes.
        """

    def check(self, shards: Sequence[ItemSets]) -> None:
        """Refuse shards that the plan is not for.

        Raises:
            PlanError: bounded more loosely, or by another declared number of units.
        """
        for shard in shards:
            if not 1 <= shard.items_per_unit <= self.items_per_unit:
                raise PlanError(
                    f"the counts allow {shard.items_per_unit} items per unit, the plan assumes "
                    f"{self.items_per_unit}",
                    where="items_per_unit",
                    fix="Count and calibrate with the same bound.",
                )
        if sum(shard.units for shard in shards) > self.declared_units:
            raise BadInput(
                f"the shards hold more units than the declared bound of {self.declared_units}",
                where="declared_units",
                fix="Declare a higher bound, from public knowledge.",
            )


@dataclass(frozen=True)
class Counted(PartitionSelection):
    """Plain counts: each unit adds 1 to each of its items (Hoory et al. 2021; `dp_histogram`).

    What is released is the noised count itself, unbiased but for having passed the threshold.
    """

    sigma: float
    threshold: int

    def plan(self) -> HistogramPlan:
        """Return the histogram's plan; it refuses numbers that do not earn (ε, δ)."""
        return HistogramPlan(
            self.items_per_unit,
            self.sigma,
            self.threshold,
            self.epsilon,
            self.delta,
            unit=self.unit,
            declared_units=self.declared_units,
        )

    def event(self) -> ThresholdedHistogram:
        """Return the histogram."""
        return self.plan().event()

    def release(
        self, shards: Sequence[ItemSets], seed: PrivacySeed, context: bytes
    ) -> dict[str, int]:
        """Return items and noised counts."""
        self.check(shards)
        counts: Counter[str] = Counter()
        for shard in shards:
            held = np.bincount(shard.members, minlength=len(shard.items))
            counts.update(dict(zip(shard.items, held.tolist(), strict=True)))
        return release_counts(counts, self.plan(), seed, context)


@dataclass(frozen=True)
class _Round:
    """What a round may know when it weighs: nothing that is not noised, but the shard itself."""

    number: int
    live: Flags  # of the shard's items: they still count


@dataclass(frozen=True)
class Weighted(PartitionSelection):
    """Weights of a unit's items with norm 1: 1/√d each of d items (Gopi et al. 2020, section 4).

    The base of all mechanisms of weights; the others say how a round is weighed (`weigh`), and
    what rounds make of the evidence so far (`keep`).
    """

    spread: ClassVar[float] = 0.1  # share by which evidence misses counts: for the estimate
    what: NoisedWeights

    def __post_init__(self) -> None:
        refuse_unearned(self.what, self.epsilon, self.delta, self.declared_units)

    def event(self) -> NoisedWeights:
        """Return the mechanism, for the ledger."""
        return self.what

    # --- what a mechanism is

    def weigh(self, shard: ItemSets, now: _Round) -> Places:
        """Return the places that each item of the shard gets: whole, so that any sum is exact.

        Rounded down, so that no unit's norm passes the scale.
        """
        share = np.floor(self._scale(now) * self._shares(shard, now)).astype(np.int64)
        return _added(shard, share, now.live)

    def _scale(self, now: _Round) -> int:
        return self.what.scales[now.number]

    def _shares(self, shard: ItemSets, now: _Round) -> Floats:
        """Return the weight of one item of each unit."""
        held = np.bincount(shard.owners, now.live[shard.members], minlength=shard.units)
        shares: Floats = np.minimum(self.what.largest, 1 / np.sqrt(np.maximum(held, 1)))
        return shares

    def weigh_all(
        self, shards: Sequence[ItemSets], places: Sequence[Places], now: Sequence[_Round], size: int
    ) -> Places:
        """Return the sum over shards, by item: `weigh` of each, merged."""
        total = np.zeros(size, np.int64)
        for shard, place, known in zip(shards, places, now, strict=True):
            total[place] += self.weigh(shard, known)
        return total

    def keep(self, number: int, evidence: Sequence[Places]) -> Flags:
        """Return the items that count on after a round: by default all."""
        return np.ones(len(evidence[0]), np.bool_)

    # --- what all do alike

    def release(
        self, shards: Sequence[ItemSets], seed: PrivacySeed, context: bytes
    ) -> dict[str, int]:
        """Return the released items, each with an estimate of how many units hold it."""
        self.check(shards)
        items = sorted(set().union(*(shard.items for shard in shards)))
        if not items:
            return {}
        index = {item: i for i, item in enumerate(items)}
        places = [np.array([index[i] for i in s.items], np.int64) for s in shards]
        live = np.ones(len(items), np.bool_)
        passed_in = np.full(len(items), -1)
        evidence: list[Places] = []
        *rounds, last = range(len(self.what.scales))

        def noised(number: int, sums: Places) -> Places:
            out = np.zeros(len(items), np.int64)
            bound = context + f" round {number}".encode()
            size = int(live.sum())
            out[live] = sums[live] + lattice_gaussian(self.what.levels, size, seed, bound)
            return out

        for number in rounds:
            now = [_Round(number, live[place]) for place in places]
            evidence.append(noised(number, self.weigh_all(shards, places, now, len(items))))
            for first, until, threshold in self.what.checks:
                if until == number:
                    total = np.sum(evidence[first : until + 1], axis=0)
                    passes = live & (total >= threshold)
                    passed_in[passes] = number
            live = live & (passed_in < 0)
            live &= self.keep(number, evidence)
        live = passed_in >= 0
        each = self.what.scales[last] // np.ceil(np.sqrt(self.items_per_unit)).astype(int)
        sums = np.zeros(len(items), np.int64)
        for shard, place in zip(shards, places, strict=True):
            ones = np.full(shard.units, each, np.int64)
            sums[place] += _added(shard, ones, live[place])
        counted = noised(last, sums)[live] / each
        total = np.sum(evidence, axis=0)[live]
        units = _estimates(
            counted, total, passed_in[live], self.what.deviation / each, each, self.spread
        )
        chosen = np.flatnonzero(live)
        return {items[i]: n for i, n in zip(chosen, units.tolist(), strict=True)}


def _added(shard: ItemSets, shares: Places, live: Flags) -> Places:
    """Return of each item the sum of its live units' shares, exactly."""
    mine = live[shard.members]
    total = np.zeros(len(shard.items), np.int64)
    np.add.at(total, shard.members[mine], shares[shard.owners[mine]])
    return total


def _estimates(
    counted: Floats,
    evidence: Places,
    passed_in: NDArray[np.int64],
    noise: float,
    each: int,
    spread: float,
) -> Places:
    """Return how many units hold each released item, at least 1: post-processing.

    Two estimates, weighed by their variances: the count of the last round, unbiased, whose `noise`
    is in units, a unit being `each` places; and the evidence by which the item passed, less noisy,
    in units by the factor that the counts of all items that passed in the same round give.
    """
    estimate = np.zeros(len(counted))
    overall = max(float(counted.sum()), 1.0) / max(float(evidence.sum()), 1.0)
    for number in np.unique(passed_in):
        group = passed_in == number
        sum_counted, sum_evidence = float(counted[group].sum()), float(evidence[group].sum())
        known = sum_counted > 5 * noise * np.sqrt(group.sum()) and sum_evidence > 0
        factor = sum_counted / sum_evidence if known else overall
        by_weight = evidence[group] * factor
        off = (factor * noise * each) ** 2 * (number + 1) + (spread * by_weight) ** 2
        estimate[group] = (counted[group] * off + by_weight * noise**2) / (off + noise**2)
    return np.maximum(np.rint(estimate), 1).astype(np.int64)


@dataclass(frozen=True)
class Elimination(Weighted):
    """Weighted rounds whose evidence adds up, while what passed or fell behind counts no more.

    Each round is `Weighted` with an equal part of the budget. After it, items whose noised evidence
    reaches the threshold are released and items whose evidence is below `DROP` deviations of its
    noise are given up; a unit then shares its weight among those left. Nothing is lost by rounds:
    evidence of all of them adds up, as if it came from one. (Rounds as in DP-SIPS, Swanberg et al.
    2023, arXiv:2301.01998, which forgets the evidence; giving up what falls behind is successive
    elimination, Even-Dar, Mannor and Mansour 2006.) Proof: docs/proofs.md, "Items that one unit
    brings".
    """

    def keep(self, number: int, evidence: Sequence[Places]) -> Flags:
        """Return which items' evidence is not below `DROP` deviations of its noise."""
        noise = np.sqrt(number + 1) * self.what.deviation
        return np.asarray(np.sum(evidence, axis=0) >= DROP * noise)


@dataclass(frozen=True)
class MaxAdaptiveDegree(Weighted):
    """MAD: weight beyond a level goes back to the units, which give it to their other items.

    Chen, Cohen-Addad, Epasto and Zadimoghaddam 2025 (arXiv:2502.08878). A unit of d items gives 1/d
    to each; what an item has beyond the level returns to its units in proportion; a unit gives 1/D
    of what returned to each of its items, D the larger of N and 4, and 1/√d − 1/d besides. Norm and
    new items: docs/proofs.md, "Rerouted weight". Two passes over the shards; sums are of floats,
    and rounded once.
    """

    def weigh_all(
        self, shards: Sequence[ItemSets], places: Sequence[Places], now: Sequence[_Round], size: int
    ) -> Places:
        """Return the rerouted sums: one pass for what is beyond the level, one to give it back."""
        first = np.zeros(size)
        for shard, place, known in zip(shards, places, now, strict=True):
            first[place] += self.first_pass(shard, known)
        level = self._level(now[0].number)
        beyond = np.maximum(0.0, 1 - level / np.maximum(first, level))
        total = np.minimum(first, level)
        for shard, place, known in zip(shards, places, now, strict=True):
            total[place] += self.second_pass(shard, known, beyond[place])
        rounded: Places = np.floor(total * self.what.scales[now[0].number]).astype(np.int64)
        return rounded

    def _level(self, number: int) -> float:
        """Return the level: never below 1, so that no new item is beyond it."""
        threshold = next(c[2] for c in self.what.checks if c[1] == number)
        level = (threshold + ABOVE * self.what.deviation) / self.what.scales[number]
        return float(max(1.0, level))

    def first_pass(self, shard: ItemSets, now: _Round) -> Floats:
        """Return of each item of the shard the sum of 1/d."""
        held, owners, members = _live(shard, now)
        return np.bincount(members, 1 / held[owners], minlength=len(shard.items)).astype(np.float64)

    def second_pass(self, shard: ItemSets, now: _Round, beyond: Floats) -> Floats:
        """Return of each item what comes back to it, and 1/√d − 1/d of each of its units.

        Args:
            shard: units. now: the round.
            beyond: share of each item's sum that is beyond the level.
        """
        held, owners, members = _live(shard, now)
        back = np.bincount(owners, beyond[members], minlength=shard.units) / np.maximum(held, 1)
        degree = max(4, self.items_per_unit)
        each = back / degree + 1 / np.sqrt(np.maximum(held, 1)) - 1 / np.maximum(held, 1)
        return np.bincount(members, each[owners], minlength=len(shard.items)).astype(np.float64)


@dataclass(frozen=True)
class MaxAdaptiveDegreeTwoRounds(MaxAdaptiveDegree):
    """MAD2R: MAD, then once more without what passed and what cannot.

    The second round spares the items that the first released and those whose noised weight, raised
    by `HOPELESS` deviations, is still below the second threshold. (The paper biases weights by the
    first round's besides; that is not done.)
    """

    def keep(self, number: int, evidence: Sequence[Places]) -> Flags:
        """Return which items may still pass."""
        if number > 0:
            return np.ones(len(evidence[0]), np.bool_)
        needed = self.what.checks[1][2] / self.what.scales[1] * self.what.scales[0]
        return np.asarray(evidence[0] + HOPELESS * self.what.deviation >= needed)


@dataclass(frozen=True)
class Policy(Weighted):
    """Policy Gaussian: units in turn raise their items towards a level (Gopi et al. 2020, Alg. 6).

    A unit moves the weights of its items that are below the level straight towards it, by at most
    1 in l2 norm (a projection, which brings neighbours no further apart): nothing is wasted on
    items that are sure to pass. Each unit sees what those before it did, so the units of all
    shards are taken one after the other, in the order of coins: sequential, on one machine.
    """

    spread: ClassVar[float] = 10.0  # weights end at the level, whatever the counts

    def weigh_all(
        self, shards: Sequence[ItemSets], places: Sequence[Places], now: Sequence[_Round], size: int
    ) -> Places:
        """Return the weights after the last unit, rounded."""
        level = (self.what.checks[0][2] + 3 * self.what.deviation) / self.what.scales[0]
        weights = np.zeros(size)
        every = sorted(
            (int(shard.order[u]), s, u)
            for s, shard in enumerate(shards)
            for u in range(shard.units)
        )
        for _, s, u in every:
            shard = shards[s]
            mine = places[s][shard.members[shard.starts[u] : shard.starts[u + 1]]]
            room = np.maximum(0.0, level - weights[mine])
            length = float(np.sqrt(room @ room))
            if length > 0:
                weights[mine] += room / max(1.0, length)
        rounded: Places = np.floor(weights * self.what.scales[0]).astype(np.int64)
        return rounded


def _live(shard: ItemSets, now: _Round) -> tuple[Floats, NDArray[np.int64], NDArray[np.int32]]:
    """Return each unit's number of live items, and owners and members of the live ones."""
    mine = now.live[shard.members]
    owners = shard.owners[mine]
    return np.bincount(owners, minlength=shard.units) * 1.0, owners, shard.members[mine]
