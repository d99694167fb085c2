"""Differentially private partition selection: releases items that many units hold.

Also called private set union (Gopi et al. 2020, arXiv:2002.09745). Items are words, phrases, or
other text in a unit's content. Every mechanism has the same four parts:

1. *Bound.* `BoundedSets` keeps at most N distinct items of each unit, sampled by the unit's coins.
2. *Weigh.* `weigh` is a function of the units and of the noised results of earlier rounds; the sums
   of several shards are added by item.
3. *Noise.* A discrete Gaussian on the lattice of the weights, from the seed of the reservation, is
   added once to the sum; items that reach the threshold are released.
4. *Estimate.* A last round with a small part of the budget counts the units of the released items.
   Released items have an estimate of their number of units. Everything after the noise is
   post-processing.

`event()` describes the executed mechanism, and the accounting reads nothing else.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from dp_core.config.privacy import refuse_large_delta
from dp_core.data.privacy_units import refuse_more_than_declared
from dp_core.errors import PlanError
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.discrete_gaussian import discrete_gaussian, lattice_gaussian
from dp_core.privacy.mechanisms import (
    MechanismEvent,
    NoisedWeights,
    PrivacyUnit,
    ThresholdedHistogram,
)
from dp_core.vocabulary.item_sets import GatheredSets, ItemSets, UnitSets

if TYPE_CHECKING:
    from dp_core.privacy.seed_store import PrivacySeed

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
Flags = NDArray[np.bool_]
DROP = 1.0  # deviations of the total noise; items with less evidence are dropped (elimination)
Shards = GatheredSets | Iterable[ItemSets]


@dataclass(frozen=True)
class PartitionSelection(abc.ABC):
    """A mechanism that releases items: its parameters, and the (ε, δ) that it provides.

    Attributes:
        items_per_unit: N. epsilon, delta: claimed.
        unit: the unit that is added or removed; None for a calculation without data.
        declared_units: public upper bound on the number of units; None for such a calculation.

    Raises:
        PlanError: the mechanism does not provide (ε, δ), or δ is not below 1/declared_units.
    """

    items_per_unit: int
    epsilon: float
    delta: float
    unit: PrivacyUnit | None
    declared_units: int | None

    def __post_init__(self) -> None:
        refuse_unearned(self.event(), self.epsilon, self.delta, self.declared_units)

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
        sets = shards if isinstance(shards, GatheredSets) else GatheredSets.of(shards)
        if sets.items_per_unit > self.items_per_unit:
            raise PlanError(
                f"the counts allow {sets.items_per_unit} items per unit, the plan assumes "
                f"{self.items_per_unit}",
                where="items_per_unit",
                fix="Count and calibrate with the same bound.",
            )
        if self.declared_units is not None:
            refuse_more_than_declared(sets.units, self.declared_units)
        return self._release(sets, seed, context)

    @abc.abstractmethod
    def _release(self, sets: GatheredSets, seed: PrivacySeed, context: bytes) -> dict[str, int]: ...


@dataclass(frozen=True)
class Counted(PartitionSelection):
    """The noised word histogram (Hoory et al. 2021, section 3.2; privacy.md).

    h'(x) is the number of units that contain item x. Discrete Gaussian noise is added to every
    present x, and counts below the threshold are dropped. The released count is unbiased except
    for selection by the threshold.

    *Formal guarantee.* (ε, δ)-DP for adding or removing one unit that counts towards at most
    `items_per_unit` items, once for each.

    Attributes:
        sigma: parameter of the discrete Gaussian noise, in counts.
        threshold: integer C; noised counts below it are not released.
    """

    sigma: float
    threshold: int

    def event(self) -> ThresholdedHistogram:
        """Return the histogram, for the ledger."""
        return ThresholdedHistogram(self.items_per_unit, self.sigma, self.threshold, unit=self.unit)

    def _release(self, sets: GatheredSets, seed: PrivacySeed, context: bytes) -> dict[str, int]:
        counts = np.zeros(sets.distinct, np.int64)
        for shard in sets:
            counts += np.bincount(shard.members, minlength=len(counts))
        noised = counts + discrete_gaussian(self.sigma, len(counts), seed, context)
        kept = np.flatnonzero(noised >= self.threshold)
        return dict(zip(sets.named(kept), noised[kept].tolist(), strict=True))


@dataclass(frozen=True)
class Elimination(PartitionSelection):
    """Weighted rounds with cumulative evidence; released and hopeless items no longer count.

    In each round the weights of a unit's items have norm 1: 1/√d for each of d items (Gopi et al.
    2020, section 4), and an equal part of the budget. After it, items whose noised evidence reaches
    the threshold are released, and items whose evidence is below `DROP` deviations of its noise are
    eliminated. A unit then divides its weight among its remaining items. Rounds waste nothing:
    their evidence adds up as if it came from one round. (Rounds as in DP-SIPS, Swanberg et al.
    2023, arXiv:2301.01998, which discards the evidence; elimination as in successive elimination,
    Even-Dar, Mannor and Mansour 2006.) Proof: docs/proofs.md, "Items that one unit brings".

    The mechanisms with which elimination is compared override `weigh` and `keep`.
    """

    spread: ClassVar[float] = 0.1  # relative error of evidence as a count, for the estimate
    mechanism: NoisedWeights

    def event(self) -> NoisedWeights:
        """Return the mechanism, for the ledger."""
        return self.mechanism

    def weigh(self, sets: GatheredSets, number: int, live: Flags) -> Places:
        """Return each item's total in places, in a round, of the items that still count.

        Totals are integers, so that sums over shards are exact. Shares are rounded down, so that no
        unit's norm exceeds the scale.
        """
        total = np.zeros(len(live), np.int64)
        for shard in sets:
            held = np.bincount(shard.owners, live[shard.members], minlength=shard.units)
            share = np.minimum(self.mechanism.largest, 1 / np.sqrt(np.maximum(held, 1)))
            places = np.floor(self.mechanism.scales[number] * share).astype(np.int64)
            total += _added(shard, places, live)
        return total

    def noise(self, size: int, seed: PrivacySeed, context: bytes) -> Places:
        """Return the noise of the items that still count, in places: (size,)."""
        return lattice_gaussian(size, seed, context)

    def keep(self, number: int, evidence: Sequence[Places]) -> Flags:
        """Return the items whose evidence is at least `DROP` deviations of its noise."""
        noise = np.sqrt(number + 1) * self.mechanism.deviation
        return np.asarray(np.sum(evidence, axis=0) >= DROP * noise)

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
            out[live] = sums[live] + self.noise(size, seed, bound)
            return out

        for number in rounds:
            evidence.append(noised(number, self.weigh(sets, number, live)))
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


def refuse_unearned(
    event: MechanismEvent, epsilon: float, delta: float, declared_units: int | None
) -> None:
    """Refuse a claim that a mechanism does not provide, or whose δ gives a unit away.

    A single release is compared with its exact privacy profile, several with the ledger's charge.

    Args:
        event: the mechanism. epsilon, delta: claimed.
        declared_units: public upper bound on the number of units, if the claim states one.

    Raises:
        PlanError: it does not provide (ε, δ), or δ is not below 1/declared_units.
    """
    if declared_units is not None:
        refuse_large_delta([delta], declared_units, f"{event.title}, delta")
    first, *others = event.steps()
    if first.times == 1 and not others:
        earned = float(max(side[0] for side in first.step.directions(np.array([epsilon]))))
        holds, gives = earned <= delta, f"δ={earned:.3g} at ε={epsilon:g}, not {delta:g}"
    else:
        charged = epsilon_pld(event, delta)
        holds, gives = charged <= epsilon, f"ε={charged:.3g} at δ={delta:g}, not {epsilon:g}"
    if not holds:
        raise PlanError(f"{event.describe()} gives {gives}", where=event.title, fix="Calibrate it.")
