"""Mechanisms of weights with which elimination is compared; no setting of the product names them.

`comparison_plan` calibrates them as `selection_plan` calibrates elimination. In addition, it knows
the mechanisms of the product.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtri

from dp_core.config.privacy import MechanismName
from dp_core.errors import BadInput
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.accounting.profiles import gaussian_delta
from dp_core.privacy.discrete_gaussian import LATTICE_DEVIATION, discrete_gaussian, lattice_gaussian
from dp_core.privacy.mechanisms import NoisedWeights
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.vocabulary.item_sets import GatheredSets, UnitSets
from dp_core.vocabulary.partition_selection import Elimination, PartitionSelection
from dp_core.vocabulary.selection_calibration import check_target, selection_plan

Places = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
HOPELESS = 2.0  # deviations by which the first round may have been too low (mad2r)
ABOVE = 2.0  # deviations of mad's level above the threshold; 3 for policy (Gopi et al.)
_COUNTING = 0.05  # share of μ² for the estimate of counts
_WITHIN = 1 - 1e-5  # share of δ that is spent; the rest exceeds the accounting's rounding
_ROUNDS = 8


FINER_DEVIATION = math.hypot(256 * LATTICE_DEVIATION, 1280)  # of `finer_gaussian`, in places


def finer_gaussian(size: int, seed: PrivacySeed, context: bytes) -> Places:
    """Return draws like `lattice_gaussian`, on a lattice that is 256 times finer."""
    fine = discrete_gaussian(1280.0, size, seed, context + b" level 1")
    return 256 * lattice_gaussian(size, seed, context) + fine


@dataclass(frozen=True)
class ComparedWeights(NoisedWeights):
    """Noised weights of another rule than elimination.

    Attributes:
        rule: how a unit's weight is shared among its items.
        sums_are_rounded: sums are rounded instead of weights, on the finer lattice.
        rounding: places that rounding adds to the norm.
    """

    kind = ""  # no ledger records it
    title = "partition selection"
    rule: str = "weighted"
    sums_are_rounded: bool = False
    rounding: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.rule in COMPARED, f"unknown rule {self.rule!r}")
        self.require(all(a == b for a, b, _ in self.checks), "only elimination adds rounds up")
        exact = self.rounding >= 0 and self.rounding == int(self.rounding)
        self.require(exact, "rounding must be a whole number, 0 or more")

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise, in places."""
        return FINER_DEVIATION if self.sums_are_rounded else LATTICE_DEVIATION

    def norm(self, number: int) -> float:
        """Return the most places by which a unit moves a round's sums, in l2 norm.

        Where weight is rerouted it is √(1 + 1/d) for units of at most d items, d the larger of N
        and 4 (docs/proofs.md, "Rerouted weight").
        """
        rerouted = self.rule in ("mad", "mad2r")
        stretch = math.sqrt(1 + 1 / max(4, self.items_per_unit)) if rerouted else 1.0
        return self.scales[number] * stretch + self.rounding

    def largest_weights(self) -> Floats:
        """Return the most weight of each of t new items: also at most 1/√t."""
        t = np.arange(1, self.items_per_unit + 1, dtype=np.float64)
        return np.minimum(self.largest, 1 / np.sqrt(t))

    def describe(self) -> str:
        """Return the mechanism in one clause."""
        return f"noised weights ({self.rule}), at most {self.items_per_unit} items per unit"


@dataclass(frozen=True)
class Weighted(Elimination):
    """Weights of a unit's items with norm 1, without elimination (Gopi et al. 2020, section 4)."""

    mechanism: ComparedWeights

    def noise(self, size: int, seed: PrivacySeed, context: bytes) -> Places:
        """Return the noise of the items that still count, in places: (size,)."""
        draw = finer_gaussian if self.mechanism.sums_are_rounded else lattice_gaussian
        return draw(size, seed, context)

    def keep(self, number: int, evidence: Sequence[Places]) -> Flags:
        """Return all items."""
        return np.ones(len(evidence[0]), np.bool_)


@dataclass(frozen=True)
class MaxAdaptiveDegree(Weighted):
    """MAD: weight above a level returns to the units, which give it to their other items.

    Chen, Cohen-Addad, Epasto and Zadimoghaddam 2025 (arXiv:2502.08878). A unit with d items gives
    1/d to each. An item's weight above the level returns to its units in proportion. A unit then
    gives each item 1/D of its returned weight, where D is the larger of N and 4, plus 1/√d − 1/d.
    Norm and new items: docs/proofs.md, "Rerouted weight". There are two passes over the shards;
    sums are floats and rounded once.
    """

    def weigh(self, sets: GatheredSets, number: int, live: Flags) -> Places:
        """Return the rerouted sums: the first pass finds the excess, the second returns it.

        Units are added to one sum in their order, so rounding does not depend on the shards.
        """
        first = np.zeros(len(live))
        for shard in sets:
            self.first_pass(shard, live, first)
        level = self._level(number)
        beyond = np.maximum(0.0, 1 - level / np.maximum(first, level))
        total = np.minimum(first, level)
        for shard in sets:
            self.second_pass(shard, live, beyond, total)
        rounded: Places = np.floor(total * self.mechanism.scales[number]).astype(np.int64)
        return rounded

    def _level(self, number: int) -> float:
        """Return the level, at least 1, so that no new item exceeds it."""
        threshold = next(c[2] for c in self.mechanism.checks if c[1] == number)
        level = (threshold + ABOVE * self.mechanism.deviation) / self.mechanism.scales[number]
        return float(max(1.0, level))

    def first_pass(self, shard: UnitSets, live: Flags, total: Floats) -> None:
        """Add 1/d to each item for each of its units in the shard."""
        held, owners, members = _live(shard, live)
        np.add.at(total, members, 1 / held[owners])

    def second_pass(self, shard: UnitSets, live: Flags, beyond: Floats, total: Floats) -> None:
        """Add to each item its share of the returned weight, and 1/√d − 1/d for each of its units.

        Args:
            shard: units. live: true for items that still count.
            beyond: share of each item's sum that is above the level.
            total: sum of each item; changed in place.
        """
        held, owners, members = _live(shard, live)
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

    def keep(self, number: int, evidence: Sequence[Places]) -> NDArray[np.bool_]:
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
    units of all shards are processed sequentially, in their order, on one machine.
    """

    spread: ClassVar[float] = 10.0  # weights end at the level for any counts

    def weigh(self, sets: GatheredSets, number: int, live: Flags) -> Places:
        """Return the weights after the last unit, rounded."""
        level = (
            self.mechanism.checks[0][2] + 3 * self.mechanism.deviation
        ) / self.mechanism.scales[0]
        weights = np.zeros(len(live))
        for some in sets:
            for start, end in itertools.pairwise(some.starts.tolist()):
                members = some.members[start:end]
                room = np.maximum(0.0, level - weights[members])
                length = float(np.sqrt(room @ room))
                if length > 0:
                    weights[members] += room / max(1.0, length)
        rounded: Places = np.floor(weights * self.mechanism.scales[0]).astype(np.int64)
        return rounded


def _live(shard: UnitSets, live: Flags) -> tuple[Floats, Places, NDArray[np.int32]]:
    """Return each unit's number of live items, and owners and members of the live items."""
    chosen = live[shard.members]
    owners = shard.owners[chosen]
    return np.bincount(owners, minlength=shard.units) * 1.0, owners, shard.members[chosen]


@dataclass(frozen=True)
class Shape:
    """The parameters of a mechanism of weights that are fixed before its calibration.

    Attributes:
        maker: its class. shares: share of μ² of each round except the last, which counts.
        checks: (first round, last round, share of the coin).
        largest: the largest weight of an item in a round. sums_are_rounded: sums are rounded
            instead of weights.
    """

    maker: type[Elimination]
    shares: tuple[float, ...] = (1.0,)
    checks: tuple[tuple[int, int, float], ...] = ((0, 0, 1.0),)
    largest: float = 1.0
    sums_are_rounded: bool = False


SHAPES: dict[str, Shape] = {
    "weighted": Shape(Weighted),
    "policy": Shape(Policy, sums_are_rounded=True),
    "mad": Shape(MaxAdaptiveDegree, sums_are_rounded=True),
    "mad2r": Shape(
        MaxAdaptiveDegreeTwoRounds, (0.3, 0.7), ((0, 0, 0.1), (1, 1, 0.9)), sums_are_rounded=True
    ),
    "elimination": Shape(
        Elimination,
        (1 / _ROUNDS,) * _ROUNDS,
        tuple((0, r, 1.0) for r in range(_ROUNDS)),
        largest=0.35,
    ),
}
COMPARED = ("weighted", "policy", "mad", "mad2r")
_PRODUCT: dict[str, MechanismName] = {
    "elimination": "elimination",
    "gaussian": "gaussian",
    "paper": "paper",
}


def comparison_plan(
    mechanism: str, epsilon: float, delta: float, items_per_unit: int, *, declared_units: int
) -> PartitionSelection:
    """Return the mechanism of this name, charged at most ε at δ; see `selection_plan`.

    Raises:
        BadInput: a target is out of range, or no noise reaches it.
        PlanError: δ is not below 1/declared_units.
    """
    if known := _PRODUCT.get(mechanism):
        return selection_plan(known, epsilon, delta, items_per_unit, declared_units=declared_units)
    check_target(epsilon, delta, items_per_unit)
    event = calibrated(mechanism, epsilon, delta, items_per_unit, declared_units)
    return SHAPES[mechanism].maker(items_per_unit, epsilon, delta, None, declared_units, event)


@functools.lru_cache(maxsize=256)  # every step of a run that names its mechanism calls this
def calibrated(
    name: str, epsilon: float, delta: float, items_per_unit: int, declared_units: int
) -> NoisedWeights:
    """Return the event with the smallest threshold relative to a unit's weight."""
    shape = SHAPES[name]
    most = brentq(  # the largest log μ that hides items which other units hold, too
        lambda x: float(gaussian_delta(epsilon, math.exp(x))) - delta * _WITHIN, -20.0, 6.0
    )
    sigmas = math.exp(-most) * np.geomspace(1 + 1e-5, 1.5, 60)
    rough = [_rough_threshold(shape, epsilon, delta, items_per_unit, s) for s in sigmas]
    for more in range(12):  # the accounting also rounds ε up, so aim below it
        nudge = 1e-5 * (2**more - 1)
        sigma = float(sigmas[int(np.argmin(rough))]) * (1 + nudge)
        aim = epsilon * (1 - nudge)
        event = _at(name, shape, aim, delta, items_per_unit, declared_units, sigma)
        if event is not None and epsilon_pld(event, delta) <= epsilon:
            return event
    raise BadInput(
        f"no noise of the mechanism {name} reaches ε={epsilon:g} at δ={delta:g}",
        where="epsilon, delta",
        fix="Choose another ε, a larger δ, or fewer items per unit.",
    )


def _rough_threshold(
    shape: Shape, epsilon: float, delta: float, items_per_unit: int, sigma: float
) -> float:
    """Return the approximate threshold in weights of a unit, at σ times a unit's total norm."""
    room = delta * _WITHIN - float(gaussian_delta(epsilon, 1 / sigma))
    if room <= 0:
        return math.inf
    t = np.arange(1, items_per_unit + 1)
    weight = shape.largest if shape.maker is Elimination else np.minimum(1, 1 / np.sqrt(t))
    return float(np.max(weight - sigma * ndtri(-np.expm1(np.log1p(-room) / t))))


def _at(
    name: str,
    shape: Shape,
    epsilon: float,
    delta: float,
    items_per_unit: int,
    declared_units: int,
    sigma: float,
) -> NoisedWeights | None:
    """Return the mechanism at σ with the smallest thresholds for (ε, δ), or None."""
    # A sum has a bounded number of items, each rounded by less than one place, plus float errors.
    rounding = 0
    if shape.sums_are_rounded:
        rounding = math.isqrt((declared_units + 1) * items_per_unit) + 2
    shares = [(1 - _COUNTING) * share for share in shape.shares] + [_COUNTING]

    def of(scales: tuple[int, ...], checks: tuple[tuple[int, int, int], ...]) -> NoisedWeights:
        if shape.maker is Elimination:
            return NoisedWeights(items_per_unit, scales, checks, shape.largest)
        rest = (name, shape.sums_are_rounded, rounding)
        return ComparedWeights(items_per_unit, scales, checks, shape.largest, *rest)

    free = of((1,), ((0, 0, 1),))
    deviation, stretch = free.deviation, free.norm(0) - rounding
    scales = tuple(
        math.floor((math.sqrt(s) * deviation / sigma - rounding) / stretch) for s in shares
    )
    if min(scales) < math.ceil(math.sqrt(items_per_unit)):
        return None  # the lattice is too coarse for so many items at so much noise

    def made(thresholds: list[int]) -> NoisedWeights:
        checks = tuple((a, b, c) for (a, b, _), c in zip(shape.checks, thresholds, strict=True))
        return of(scales, checks)

    base = [1] * len(shape.checks)
    if made(base).mu >= 1e3:
        return None
    room = delta * _WITHIN - float(gaussian_delta(epsilon, made(base).mu))
    shared = shape.maker is Elimination  # all rounds have one threshold
    while room > delta * 1e-9:
        thresholds = []
        for i, (_, _, share) in enumerate(shape.checks):
            low, high = 1, int(60 * deviation) + 60 * sum(scales)
            while low < high:
                middle = (low + high) // 2
                trial = [middle] * len(base) if shared else [high * 4] * len(base)
                trial[i] = middle
                if made(trial).coin <= room * (1.0 if shared else share):
                    high = middle
                else:
                    low = middle + 1
            thresholds.append(low)
            if shared:
                thresholds = [low] * len(base)
                break
        event = made(thresholds)
        if event.profile.delta_at(epsilon) <= delta * _WITHIN:
            return event
        room *= 0.99  # the other direction needs more δ
    return None
