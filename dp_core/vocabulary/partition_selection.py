"""Differentially private partition selection: releases items that many units hold.

Also called private set union (Gopi et al. 2020, arXiv:2002.09745). Items are words, phrases, or
other text in a unit's content. Every mechanism has the same four parts:

1. *Bound.* `item_sets` keeps at most N distinct items of each unit, sampled by the unit's coins.
2. *Weigh.* `weigh` is a function of one shard of units and of the results of earlier rounds; the
   sums of several shards are added by item.
3. *Noise.* A discrete Gaussian on the lattice of the weights, from the seed of the reservation, is
   added once to the sum; items that reach the threshold are released.
4. *Estimate.* A last round with a small part of the budget counts the units of the released items.
   Released items have an estimate of their number of units. Everything after the noise is
   post-processing.

`event()` describes the executed mechanism, and the accounting reads nothing else.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from dp_core.errors import BadInput, PlanError
from dp_core.privacy.discrete_gaussian import lattice_gaussian
from dp_core.privacy.mechanisms import (
    MechanismEvent,
    NoisedWeights,
    PrivacyUnit,
    ThresholdedHistogram,
)
from dp_core.vocabulary.dp_histogram import release as release_counts
from dp_core.vocabulary.gathered_sets import GatheredSets
from dp_core.vocabulary.item_sets import ItemSets, UnitSets
from dp_core.vocabulary.vocabulary_calibration import HistogramPlan, refuse_unearned

if TYPE_CHECKING:
    from dp_core.privacy.seed_store import PrivacySeed

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
Flags = NDArray[np.bool_]
DROP = 1.0  # deviations of the total noise; items with less evidence are dropped (elimination)
HOPELESS = 2.0  # deviations by which the first round may have been too low (mad2r)
ABOVE = 2.0  # deviations of mad's level above the threshold; 3 for policy (Gopi et al.)


Shards = GatheredSets | Iterable[ItemSets]


@dataclass(frozen=True)
class PartitionSelection(abc.ABC):
    """A mechanism that releases items: its parameters, and the (ε, δ) that it provides.

    Attributes:
        items_per_unit: N. epsilon, delta: claimed. unit: the unit that is added or removed.
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

    def release(self, shards: Shards, seed: PrivacySeed, context: bytes) -> dict[str, int]:
        """Return the released items, sorted, each with an estimate of its number of units.

        Only this result is released. The same seed and context give the same noise, so a retry of
        the same release reveals nothing more.

        Args:
            shards: shards that contain every unit once; gathered if they exceed the memory.
            seed: the privacy seed of this reservation.
            context: digest of data and plan, to which the noise is bound.

        Raises:
            PlanError: a shard was bounded more loosely than the plan assumes.
            BadInput: more units than declared. (The message does not state their private number.)
        """
        gathered = shards if isinstance(shards, GatheredSets) else GatheredSets.of(shards)
        self._check(gathered)
        return self._release(gathered, seed, context)

    @abc.abstractmethod
    def _release(self, sets: GatheredSets, seed: PrivacySeed, context: bytes) -> dict[str, int]: ...

    def _check(self, sets: GatheredSets) -> None:
        if sets.items_per_unit > self.items_per_unit:
            raise PlanError(
                f"the counts allow {sets.items_per_unit} items per unit, the plan assumes "
                f"{self.items_per_unit}",
                where="items_per_unit",
                fix="Count and calibrate with the same bound.",
            )
        if sets.units > self.declared_units:
            raise BadInput(
                f"the shards hold more units than the declared bound of {self.declared_units}",
                where="declared_units",
                fix="Declare a higher bound, from public knowledge.",
            )


@dataclass(frozen=True)
class Counted(PartitionSelection):
    """Plain counts: each unit adds 1 to each of its items (Hoory et al. 2021; `dp_histogram`).

    Releases the noised count itself, which is unbiased except for selection by the threshold.
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

    def _release(self, sets: GatheredSets, seed: PrivacySeed, context: bytes) -> dict[str, int]:
        counts = np.zeros(sets.distinct, np.int64)
        for shard in sets:
            counts += np.bincount(shard.members, minlength=len(counts))
        kept, noised = release_counts(counts, self.plan(), seed, context)
        return dict(zip(sets.named(kept), noised.tolist(), strict=True))


@dataclass(frozen=True)
class _Round:
    """Input of a round besides the shard: only values after noise."""

    number: int
    live: Flags  # (items,) true for items that still count


@dataclass(frozen=True)
class Weighted(PartitionSelection):
    """Weights of a unit's items with norm 1: 1/√d each of d items (Gopi et al. 2020, section 4).

    The base class of all mechanisms of weights. Subclasses define the weights of a round (`weigh`)
    and the items that remain after it (`keep`).
    """

    spread: ClassVar[float] = 0.1  # relative error of evidence as a count, for the estimate
    mechanism: NoisedWeights

    def __post_init__(self) -> None:
        refuse_unearned(self.mechanism, self.epsilon, self.delta, self.declared_units)

    def event(self) -> NoisedWeights:
        """Return the mechanism, for the ledger."""
        return self.mechanism

    # --- parts that subclasses define

    def weigh(self, shard: UnitSets, now: _Round) -> Places:
        """Return each item's total in places from the shard: integers, so that sums are exact.

        Shares are rounded down, so that no unit's norm exceeds the scale.
        """
        share = np.floor(self._scale(now) * self._shares(shard, now)).astype(np.int64)
        return _added(shard, share, now.live)

    def _scale(self, now: _Round) -> int:
        return self.mechanism.scales[now.number]

    def _shares(self, shard: UnitSets, now: _Round) -> Floats:
        """Return the weight of one item of each unit."""
        held = np.bincount(shard.owners, now.live[shard.members], minlength=shard.units)
        shares: Floats = np.minimum(self.mechanism.largest, 1 / np.sqrt(np.maximum(held, 1)))
        return shares

    def weigh_all(self, sets: GatheredSets, now: _Round) -> Places:
        """Return the sum over shards, by item: `weigh` of each, merged."""
        total = np.zeros(len(now.live), np.int64)
        for shard in sets:
            total += self.weigh(shard, now)
        return total

    def keep(self, number: int, evidence: Sequence[Places]) -> Flags:
        """Return the items that still count after a round; by default all."""
        return np.ones(len(evidence[0]), np.bool_)

    # --- parts that all mechanisms share

    def _release(self, sets: GatheredSets, seed: PrivacySeed, context: bytes) -> dict[str, int]:
        distinct = sets.distinct
        if not distinct:
            return {}
        live = np.ones(distinct, np.bool_)
        passed_in = np.full(distinct, -1)
        evidence: list[Places] = []
        *rounds, last = range(len(self.mechanism.scales))

        def noised(number: int, sums: Places) -> Places:
            out = np.zeros(distinct, np.int64)
            bound = context + f" round {number}".encode()
            size = int(live.sum())
            out[live] = sums[live] + lattice_gaussian(self.mechanism.levels, size, seed, bound)
            return out

        for number in rounds:
            evidence.append(noised(number, self.weigh_all(sets, _Round(number, live))))
            for first, until, threshold in self.mechanism.checks:
                if until == number:
                    total = np.sum(evidence[first : until + 1], axis=0)
                    passes = live & (total >= threshold)
                    passed_in[passes] = number
            live = live & (passed_in < 0)
            live &= self.keep(number, evidence)
        live = passed_in >= 0
        each = self.mechanism.scales[last] // np.ceil(np.sqrt(self.items_per_unit)).astype(int)
        sums = np.zeros(distinct, np.int64)
        for shard in sets:
            sums += _added(shard, np.full(shard.units, each, np.int64), live)
        counted = noised(last, sums)[live] / each
        total = np.sum(evidence, axis=0)[live]
        units = _estimates(
            counted, total, passed_in[live], self.mechanism.deviation / each, each, self.spread
        )
        return dict(zip(sets.named(np.flatnonzero(live)), units.tolist(), strict=True))


def _added(shard: UnitSets, shares: Places, live: Flags) -> Places:
    """Return the exact sum, for each item, of the shares of the units that hold it, if live."""
    chosen = live[shard.members]
    total = np.zeros(len(live), np.int64)
    np.add.at(total, shard.members[chosen], shares[shard.owners[chosen]])
    return total


def _estimates(
    counted: Floats,
    evidence: Places,
    passed_in: NDArray[np.int64],
    noise: float,
    each: int,
    spread: float,
) -> Places:
    """Return the estimated number of units of each released item, at least 1: post-processing.

    Combines two estimates by their variances. The first is the unbiased count of the last round,
    with standard deviation `noise` in units; a unit is `each` places. The second is the less noisy
    evidence by which the item passed, converted to units by a factor from the counts of all items
    that passed in the same round.
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
    """Weighted rounds with cumulative evidence; released and hopeless items no longer count.

    Each round is `Weighted` with an equal part of the budget. After it, items whose noised evidence
    reaches the threshold are released, and items whose evidence is below `DROP` deviations of its
    noise are eliminated. A unit then divides its weight among its remaining items. Rounds waste
    nothing: their evidence adds up as if it came from one round. (Rounds as in DP-SIPS, Swanberg et
    al. 2023, arXiv:2301.01998, which discards the evidence; elimination as in successive
    elimination, Even-Dar, Mannor and Mansour 2006.) Proof: docs/proofs.md, "Items that one unit
    brings".
    """

    def keep(self, number: int, evidence: Sequence[Places]) -> Flags:
        """Return the items whose evidence is at least `DROP` deviations of its noise."""
        noise = np.sqrt(number + 1) * self.mechanism.deviation
        return np.asarray(np.sum(evidence, axis=0) >= DROP * noise)


@dataclass(frozen=True)
class MaxAdaptiveDegree(Weighted):
    """MAD: weight above a level returns to the units, which give it to their other items.

    Chen, Cohen-Addad, Epasto and Zadimoghaddam 2025 (arXiv:2502.08878). A unit with d items gives
    1/d to each. An item's weight above the level returns to its units in proportion. A unit then
    gives each item 1/D of its returned weight, where D is the larger of N and 4, plus 1/√d − 1/d.
    Norm and new items: docs/proofs.md, "Rerouted weight". There are two passes over the shards;
    sums are floats and rounded once.
    """

    def weigh_all(self, sets: GatheredSets, now: _Round) -> Places:
        """Return the rerouted sums: the first pass finds the excess, the second returns it.

        Units are added to one sum in their order, so rounding does not depend on the shards.
        """
        first = np.zeros(len(now.live))
        for shard in sets:
            self.first_pass(shard, now, first)
        level = self._level(now.number)
        beyond = np.maximum(0.0, 1 - level / np.maximum(first, level))
        total = np.minimum(first, level)
        for shard in sets:
            self.second_pass(shard, now, beyond, total)
        rounded: Places = np.floor(total * self.mechanism.scales[now.number]).astype(np.int64)
        return rounded

    def _level(self, number: int) -> float:
        """Return the level, at least 1, so that no new item exceeds it."""
        threshold = next(c[2] for c in self.mechanism.checks if c[1] == number)
        level = (threshold + ABOVE * self.mechanism.deviation) / self.mechanism.scales[number]
        return float(max(1.0, level))

    def first_pass(self, shard: UnitSets, now: _Round, total: Floats) -> None:
        """Add 1/d to each item for each of its units in the shard."""
        held, owners, members = _live(shard, now)
        np.add.at(total, members, 1 / held[owners])

    def second_pass(self, shard: UnitSets, now: _Round, beyond: Floats, total: Floats) -> None:
        """Add to each item its share of the returned weight, and 1/√d − 1/d for each of its units.

        Args:
            shard: units. now: the round.
            beyond: share of each item's sum that is above the level.
            total: sum of each item; changed in place.
        """
        held, owners, members = _live(shard, now)
        back = np.bincount(owners, beyond[members], minlength=shard.units) / np.maximum(held, 1)
        degree = max(4, self.items_per_unit)
        each = back / degree + 1 / np.sqrt(np.maximum(held, 1)) - 1 / np.maximum(held, 1)
        np.add.at(total, members, each[owners])


@dataclass(frozen=True)
class MaxAdaptiveDegreeTwoRounds(MaxAdaptiveDegree):
    """MAD2R: MAD, followed by a second round without released and hopeless items.

    The second round leaves out the items that the first released, and items whose noised weight
    plus `HOPELESS` deviations is below the second threshold. (The paper also biases weights by the
    first round's weights; this implementation does not.)
    """

    def keep(self, number: int, evidence: Sequence[Places]) -> Flags:
        """Return the items that may still pass."""
        if number > 0:
            return np.ones(len(evidence[0]), np.bool_)
        needed = self.mechanism.checks[1][2] / self.mechanism.scales[1] * self.mechanism.scales[0]
        return np.asarray(evidence[0] + HOPELESS * self.mechanism.deviation >= needed)


@dataclass(frozen=True)
class Policy(Weighted):
    """Policy Gaussian: units in turn raise their items to a level (Gopi et al. 2020, Alg. 6).

    A unit moves the weights of its items below the level straight towards the level, by at most 1
    in l2 norm (a projection, which never increases the distance of neighbours). No weight is wasted
    on items that are certain to pass. Each unit sees the result of its predecessors, so the
    units of all shards are processed sequentially, in the order of coins, on one machine.
    """

    spread: ClassVar[float] = 10.0  # weights end at the level for any counts

    def weigh_all(self, sets: GatheredSets, now: _Round) -> Places:
        """Return the weights after the last unit, rounded."""
        level = (
            self.mechanism.checks[0][2] + 3 * self.mechanism.deviation
        ) / self.mechanism.scales[0]
        weights = np.zeros(len(now.live))
        for some in sets.by_order():
            for start, end in itertools.pairwise(some.starts.tolist()):
                members = some.members[start:end]
                room = np.maximum(0.0, level - weights[members])
                length = float(np.sqrt(room @ room))
                if length > 0:
                    weights[members] += room / max(1.0, length)
        rounded: Places = np.floor(weights * self.mechanism.scales[0]).astype(np.int64)
        return rounded


def _live(shard: UnitSets, now: _Round) -> tuple[Floats, NDArray[np.int64], NDArray[np.int32]]:
    """Return each unit's number of live items, and owners and members of the live items."""
    chosen = now.live[shard.members]
    owners = shard.owners[chosen]
    return np.bincount(owners, minlength=shard.units) * 1.0, owners, shard.members[chosen]
