"""The mechanisms of partition selection by name, each calibrated to a target (ε, δ).

The ε that the ledger's accounting charges for a mechanism's event is at most the target. Of all σ
that reach the target, the one with the smallest threshold relative to a unit's weight is chosen,
because it releases the most items. `paper` is not calibrated: it has the σ and threshold of Hoory
et al., and their true δ.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtri

from dp_core.config.privacy import MechanismName, gives_a_unit_away
from dp_core.errors import BadInput, PlanError
from dp_core.privacy.accounting import epsilon_pld
from dp_core.privacy.accounting.profiles import gaussian_delta
from dp_core.privacy.discrete_gaussian import lattice_deviation
from dp_core.privacy.mechanisms import NoisedWeights, PrivacyUnit
from dp_core.vocabulary.hoory2021 import paper_parameters
from dp_core.vocabulary.partition_selection import (
    Counted,
    Elimination,
    MaxAdaptiveDegree,
    MaxAdaptiveDegreeTwoRounds,
    PartitionSelection,
    Policy,
    Weighted,
)
from dp_core.vocabulary.vocabulary_calibration import calibrate, check_target

_COUNTING = 0.05  # share of μ² for the estimate of counts
_WITHIN = 1 - 1e-5  # share of δ that is spent; the rest exceeds the accounting's rounding


@dataclass(frozen=True)
class _Shape:
    """The parameters of a mechanism of weights that are fixed before its calibration.

    Attributes:
        maker: its class. shares: share of μ² of each round except the last, which counts.
        checks: (first round, last round, share of the coin).
        largest: the largest weight of an item in a round. sums_are_rounded: sums are rounded
            instead of weights.
    """

    maker: type[Weighted]
    shares: tuple[float, ...] = (1.0,)
    checks: tuple[tuple[int, int, float], ...] = ((0, 0, 1.0),)
    largest: float = 1.0
    sums_are_rounded: bool = False


_ROUNDS = 8
_SHAPES: dict[str, _Shape] = {
    "weighted": _Shape(Weighted),
    "policy": _Shape(Policy, sums_are_rounded=True),
    "mad": _Shape(MaxAdaptiveDegree, sums_are_rounded=True),
    "mad2r": _Shape(
        MaxAdaptiveDegreeTwoRounds,
        (0.3, 0.7),
        ((0, 0, 0.1), (1, 1, 0.9)),
        sums_are_rounded=True,
    ),
    # Number of rounds, their largest weight and the elimination level were chosen on synthetic
    # text (benchmarks/bench_partition_selection.py): docs/vocabulary.md.
    "elimination": _Shape(
        Elimination,
        (1 / _ROUNDS,) * _ROUNDS,
        tuple((0, r, 1.0) for r in range(_ROUNDS)),
        largest=0.35,
    ),
}


def selection_plan(
    mechanism: MechanismName,
    epsilon: float,
    delta: float,
    items_per_unit: int,
    *,
    unit: PrivacyUnit | None = None,
    declared_units: int,
) -> PartitionSelection:
    """Return the mechanism of this name, charged at most ε at δ; `paper` at its true values.

    Args:
        mechanism: its name. epsilon: target ε > 0. delta: target δ in (0, 1).
        items_per_unit: N, the largest number of distinct items of a unit that count.
        unit: the unit that is added or removed. declared_units: public upper bound on the number
            of units.

    Raises:
        BadInput: a target is out of range, or no noise reaches it.
        PlanError: δ is not below 1/declared_units, or the true δ of `paper` is not.
    """
    common = (unit, declared_units)
    if mechanism == "paper":
        return _paper(*common)
    if mechanism == "gaussian":
        plan = calibrate(epsilon, delta, items_per_unit, unit=unit, declared_units=declared_units)
        return Counted(items_per_unit, epsilon, delta, *common, plan.sigma, plan.threshold)
    check_target(epsilon, delta, items_per_unit)
    weights = _calibrated(mechanism, epsilon, delta, items_per_unit, declared_units)
    event = weights if unit is None else weights.stating(unit)
    return _SHAPES[mechanism].maker(items_per_unit, epsilon, delta, *common, event)


def _paper(unit: PrivacyUnit | None, declared_units: int) -> Counted:
    """Return Hoory et al.'s histogram: N = 256, σ = 200, C = 982.5, at its true δ.

    Raises:
        PlanError: the true δ is 1/declared_units or more.
    """
    paper = paper_parameters()
    plan = paper.plan()
    if gives_a_unit_away(plan.delta, declared_units):
        raise PlanError(
            f"the paper's σ and threshold have δ = {plan.delta:.3g}, not {paper.claimed_delta:g}, "
            f"which is 1/{declared_units} or more for the declared units: no guarantee",
            where="vocabulary_mechanism",
            fix="Use elimination, or gaussian, the paper's mechanism with a right threshold.",
        )
    return Counted(
        plan.words_per_unit,
        plan.epsilon,
        plan.delta,
        unit,
        declared_units,
        plan.sigma,
        plan.threshold,
    )


@functools.lru_cache(maxsize=256)  # every step of a run that names its mechanism calls this
def _calibrated(
    name: str, epsilon: float, delta: float, items_per_unit: int, declared_units: int
) -> NoisedWeights:
    shape = _SHAPES[name]
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
    shape: _Shape, epsilon: float, delta: float, items_per_unit: int, sigma: float
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
    shape: _Shape,
    epsilon: float,
    delta: float,
    items_per_unit: int,
    declared_units: int,
    sigma: float,
) -> NoisedWeights | None:
    """Return the mechanism at σ with the smallest thresholds for (ε, δ), or None."""
    levels = 2 if shape.sums_are_rounded else 1
    # A sum has a bounded number of items, each rounded by less than one place, plus float errors.
    rounding = 0
    if shape.sums_are_rounded:
        rounding = math.isqrt((declared_units + 1) * items_per_unit) + 2
    shares = [(1 - _COUNTING) * share for share in shape.shares] + [_COUNTING]
    free = NoisedWeights(name, items_per_unit, levels, (1,), ((0, 0, 1),), shape.largest)
    stretch = free.norm(0)
    scales = tuple(
        math.floor((math.sqrt(s) * lattice_deviation(levels) / sigma - rounding) / stretch)
        for s in shares
    )
    if min(scales) < math.ceil(math.sqrt(items_per_unit)):
        return None  # the lattice is too coarse for so many items at so much noise

    def made(thresholds: list[int]) -> NoisedWeights:
        checks = tuple((a, b, c) for (a, b, _), c in zip(shape.checks, thresholds, strict=True))
        return NoisedWeights(name, items_per_unit, levels, scales, checks, shape.largest, rounding)

    deviation = lattice_deviation(levels)
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
        if event.profile.delta(epsilon) <= delta * _WITHIN:
            return event
        room *= 0.99  # the other direction needs more δ
    return None
