"""Differentially private partition selection: which of the items that units hold may be named.

Also called private set union (Gopi et al. 2020, arXiv:2002.09745). Items are words, phrases, or
whatever text a unit's content is made of. Every mechanism works alike:

1. *Bound.* `item_sets` keeps at most N distinct items of each unit, drawn by the unit's own coins.
2. *Weigh.* `weigh` is a function of one shard of units and of what earlier rounds came to; sums of
   several shards are added up by item.
3. *Noise*, once for the sum, a discrete Gaussian on the lattice of the weights, from the seed of
   the reservation; what reaches the threshold is released.
4. *Estimate.* A last round of little noise budget counts the units of what was released: `released`
   items come with an estimate of how many units hold them. All after noise is post-processing.

What is drawn is what `event()` says, and the accounting reads nothing else.
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
DROP = 1.0  # deviations of all noise so far: evidence below is given up (elimination)
HOPELESS = 2.0  # deviations by which the first round may have been too low (mad2r)
ABOVE = 2.0  # deviations above the threshold: the level of mad; 3 for policy (Gopi et al.)


Shards = GatheredSets | Iterable[ItemSets]


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

    def release(self, shards: Shards, seed: PrivacySeed, context: bytes) -> dict[str, int]:
        """Return the released items, sorted, each with an estimate of how many units hold it.

        Only this result is released. The same seed and context give the same noise, so that a
        retry of the same release reveals nothing more.

        Args:
            shards: every unit in one of them, once; gathered, where memory cannot hold them.
            seed: the privacy seed of this reservation.
            context: what the noise is bound to (a digest of data and plan).

        Raises:
            PlanError: a shard was bounded more loosely than the plan assumes.
            BadInput: more units than declared. (How many there are is private, and not said.)
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

    def _release(self, sets: GatheredSets, seed: PrivacySeed, context: bytes) -> dict[str, int]:
        counts = np.zeros(sets.distinct, np.int64)
        for shard in sets:
            counts += np.bincount(shard.members, minlength=len(counts))
        kept, noised = release_counts(counts, self.plan(), seed, context)
        return dict(zip(sets.named(kept), noised.tolist(), strict=True))


@dataclass(frozen=True)
class _Round:
    """What a round may know when it weighs: nothing that is not noised, but the shard itself."""

    number: int
    live: Flags  # of all items: they still count


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

    def weigh(self, shard: UnitSets, now: _Round) -> Places:
        """Return the places that each item gets of the shard: whole, so that any sum is exact.

        Rounded down, so that no unit's norm passes the scale.
        """
        share = np.floor(self._scale(now) * self._shares(shard, now)).astype(np.int64)
        return _added(shard, share, now.live)

    def _scale(self, now: _Round) -> int:
        return self.what.scales[now.number]

    def _shares(self, shard: UnitSets, now: _Round) -> Floats:
        """Return the weight of one item of each unit."""
        held = np.bincount(shard.owners, now.live[shard.members], minlength=shard.units)
        shares: Floats = np.minimum(self.what.largest, 1 / np.sqrt(np.maximum(held, 1)))
        return shares

    def weigh_all(self, sets: GatheredSets, now: _Round) -> Places:
        """Return the sum over shards, by item: `weigh` of each, merged."""
        total = np.zeros(len(now.live), np.int64)
        for shard in sets:
            total += self.weigh(shard, now)
        return total

    def keep(self, number: int, evidence: Sequence[Places]) -> Flags:
        """Return the items that count on after a round: by default all."""
        return np.ones(len(evidence[0]), np.bool_)

    # --- what all do alike

    def _release(self, sets: GatheredSets, seed: PrivacySeed, context: bytes) -> dict[str, int]:
        distinct = sets.distinct
        if not distinct:
            return {}
        live = np.ones(distinct, np.bool_)
        passed_in = np.full(distinct, -1)
        evidence: list[Places] = []
        *rounds, last = range(len(self.what.scales))

        def noised(number: int, sums: Places) -> Places:
            out = np.zeros(distinct, np.int64)
            bound = context + f" round {number}".encode()
            size = int(live.sum())
            out[live] = sums[live] + lattice_gaussian(self.what.levels, size, seed, bound)
            return out

        for number in rounds:
            evidence.append(noised(number, self.weigh_all(sets, _Round(number, live))))
            for first, until, threshold in self.what.checks:
                if until == number:
                    total = np.sum(evidence[first : until + 1], axis=0)
                    passes = live & (total >= threshold)
                    passed_in[passes] = number
            live = live & (passed_in < 0)
            live &= self.keep(number, evidence)
        live = passed_in >= 0
        each = self.what.scales[last] // np.ceil(np.sqrt(self.items_per_unit)).astype(int)
        sums = np.zeros(distinct, np.int64)
        for shard in sets:
            sums += _added(shard, np.full(shard.units, each, np.int64), live)
        counted = noised(last, sums)[live] / each
        total = np.sum(evidence, axis=0)[live]
        units = _estimates(
            counted, total, passed_in[live], self.what.deviation / each, each, self.spread
        )
        return dict(zip(sets.named(np.flatnonzero(live)), units.tolist(), strict=True))


def _added(shard: UnitSets, shares: Places, live: Flags) -> Places:
    """Return of each item the sum of its live units' shares, exactly."""
    mine = live[shard.members]
    total = np.zeros(len(live), np.int64)
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

    def weigh_all(self, sets: GatheredSets, now: _Round) -> Places:
        """Return the rerouted sums: one pass for what is beyond the level, one to give it back.

        Unit after unit is added to one sum: so rounding is the same whatever the shards are.
        """
        first = np.zeros(len(now.live))
        for shard in sets:
            self.first_pass(shard, now, first)
        level = self._level(now.number)
        beyond = np.maximum(0.0, 1 - level / np.maximum(first, level))
        total = np.minimum(first, level)
        for shard in sets:
            self.second_pass(shard, now, beyond, total)
        rounded: Places = np.floor(total * self.what.scales[now.number]).astype(np.int64)
        return rounded

    def _level(self, number: int) -> float:
        """Return the level: never below 1, so that no new item is beyond it."""
        threshold = next(c[2] for c in self.what.checks if c[1] == number)
        level = (threshold + ABOVE * self.what.deviation) / self.what.scales[number]
        return float(max(1.0, level))

    def first_pass(self, shard: UnitSets, now: _Round, total: Floats) -> None:
        """Add to each item 1/d of each of its units in the shard."""
        held, owners, members = _live(shard, now)
        np.add.at(total, members, 1 / held[owners])

    def second_pass(self, shard: UnitSets, now: _Round, beyond: Floats, total: Floats) -> None:
        """Add to each item what comes back to it, and 1/√d − 1/d of each of its units.

        Args:
            shard: units. now: the round.
            beyond: share of each item's sum that is beyond the level.
            total: of each item.
        """
        held, owners, members = _live(shard, now)
        back = np.bincount(owners, beyond[members], minlength=shard.units) / np.maximum(held, 1)
        degree = max(4, self.items_per_unit)
        each = back / degree + 1 / np.sqrt(np.maximum(held, 1)) - 1 / np.maximum(held, 1)
        np.add.at(total, members, each[owners])


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
    shards are taken one after the other, in the order of coins: sequential, and on one machine.
    """

    spread: ClassVar[float] = 10.0  # weights end at the level, whatever the counts

    def weigh_all(self, sets: GatheredSets, now: _Round) -> Places:
        """Return the weights after the last unit, rounded."""
        level = (self.what.checks[0][2] + 3 * self.what.deviation) / self.what.scales[0]
        weights = np.zeros(len(now.live))
        for some in sets.by_order():
            for start, end in itertools.pairwise(some.starts.tolist()):
                mine = some.members[start:end]
                room = np.maximum(0.0, level - weights[mine])
                length = float(np.sqrt(room @ room))
                if length > 0:
                    weights[mine] += room / max(1.0, length)
        rounded: Places = np.floor(weights * self.what.scales[0]).astype(np.int64)
        return rounded


def _live(shard: UnitSets, now: _Round) -> tuple[Floats, NDArray[np.int64], NDArray[np.int32]]:
    """Return each unit's number of live items, and owners and members of the live ones."""
    mine = now.live[shard.members]
    owners = shard.owners[mine]
    return np.bincount(owners, minlength=shard.units) * 1.0, owners, shard.members[mine]
