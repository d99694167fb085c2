"""Calibration of the word histogram to a target (ε, δ), exact for the discrete noise.

The ε that the ledger's accounting charges for the plan's event is at most the target, so a budget
equal to the target suffices.

Exact mode finds the smallest threshold over all σ, because a smaller threshold releases more
words. The search has two parameters, of which one is an integer, and δ has jumps. Therefore
dp_accounting's `calibrate_dp_mechanism`, which brackets a root in one parameter, does not fit.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtri

from dp_core.config.privacy import refuse_large_delta
from dp_core.errors import BadInput, PlanError
from dp_core.privacy.accounting import epsilon_pld
from dp_core.privacy.accounting.calibration import DIGITS, round_up
from dp_core.privacy.accounting.profiles import (
    gaussian_delta,
    lone_word_blocks,
    shared_deltas,
    upper_tail,
)
from dp_core.privacy.mechanisms import MechanismEvent, PrivacyUnit, ThresholdedHistogram

MOST_EPSILON = 500.0  # e^ε is still a float, but such an ε has no meaning
MOST_WORDS = 100_000  # distinct words of one unit
LEAST_DELTA = 1e-30  # tails far beyond it are not summed
_LEAST_SIGMA, _MOST_SIGMA = 1e-2, 1e7
_ACCOUNTING = 1 - 1e-5  # share of δ that is spent; the rest exceeds the accounting's rounding
_NUDGES = 12  # doublings from one last digit of σ: up to 4%


@dataclass(frozen=True)
class HistogramPlan:
    """The release of a word histogram: the mechanism, and the (ε, δ) that it provides.

    *Formal guarantee.* (ε, δ)-DP for adding or removing one unit that counts towards at most
    `words_per_unit` words, once for each: discrete Gaussian noise of parameter `sigma` on every
    present word, and release of the noised counts ≥ `threshold`.

    Attributes:
        words_per_unit: N, the largest number of distinct words of a unit that count.
        sigma: parameter of the discrete Gaussian noise, in counts.
        threshold: integer C; noised counts below it are not released.
        epsilon: claimed ε. delta: claimed δ.
        unit: the unit that is added or removed; None for a calculation without data.
        declared_units: public upper bound on the number of units, if the plan states one.

    Raises:
        PlanError: sigma and threshold do not provide (ε, δ), or δ is not below 1/declared_units.
    """

    words_per_unit: int
    sigma: float
    threshold: int
    epsilon: float
    delta: float
    unit: PrivacyUnit | None = None
    declared_units: int | None = None

    def __post_init__(self) -> None:
        if self.unit is not None:
            object.__setattr__(self, "unit", PrivacyUnit(self.unit))
        refuse_unearned(self.event(), self.epsilon, self.delta, self.declared_units)

    def event(self) -> ThresholdedHistogram:
        """Return the mechanism, for the ledger."""
        return ThresholdedHistogram(self.words_per_unit, self.sigma, self.threshold, unit=self.unit)


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


def delta_of(words_per_unit: int, sigma: float, threshold: int, epsilon: float) -> float:
    """Return δ at ε of the histogram with integer noise and integer threshold."""
    return ThresholdedHistogram(words_per_unit, sigma, threshold).profile.delta(epsilon)


def calibrate(
    epsilon: float,
    delta: float,
    words_per_unit: int,
    *,
    unit: PrivacyUnit | None = None,
    declared_units: int | None = None,
) -> HistogramPlan:
    """Return the plan with the smallest threshold that is charged at most ε, and its smallest σ.

    The charge is within 0.5% of the target. Only if σ is below 2 can it be lower, because the few
    values of the noise give the privacy loss only a few values as well.

    Args:
        epsilon: target ε > 0. delta: target δ in (0, 1).
        words_per_unit: N, the largest number of distinct words of a unit that count.

    Raises:
        BadInput: a target or N is out of range, or no noise reaches the target.
        PlanError: δ is not below 1/declared_units.
    """
    check_target(epsilon, delta, words_per_unit)
    sigma, threshold = _charged_at_most(epsilon, delta, words_per_unit)
    return HistogramPlan(
        words_per_unit, sigma, threshold, epsilon, delta, unit=unit, declared_units=declared_units
    )


def check_target(epsilon: float, delta: float, words_per_unit: int) -> None:
    """Refuse a target that no histogram can have.

    Raises:
        BadInput: ε, δ or N is out of range.
    """
    if not 0 < epsilon <= MOST_EPSILON:
        raise BadInput(f"{epsilon:g} is not above 0, at most {MOST_EPSILON:g}", where="epsilon")
    if not LEAST_DELTA <= delta < 1:
        raise BadInput(f"{delta:g} is not from {LEAST_DELTA:g} to 1", where="delta")
    if words_per_unit < 1:
        raise BadInput(f"{words_per_unit} is below 1", where="words_per_unit")
    if words_per_unit > MOST_WORDS:
        raise BadInput(f"more than {MOST_WORDS:,}", where="words_per_unit")


def smallest_threshold(
    epsilon: float, delta: float, words_per_unit: int, sigma: float
) -> int | None:
    """Return the smallest threshold at which σ provides (ε, δ), or None if there is none."""
    tail = _largest_tail(
        shared_deltas(words_per_unit, sigma, epsilon), delta, lone_word_blocks(words_per_unit)
    )
    if tail <= 0:
        return None
    threshold = max(1, math.floor(1 - sigma * float(ndtri(min(tail, 0.5)))) - 2)
    while upper_tail(threshold - 1, sigma) > tail:
        threshold += 1
    # The tail bounds the direction in which the unit is present; check the other one as well.
    while delta_of(words_per_unit, sigma, threshold, epsilon) > delta:
        threshold += 1
    return threshold


def _largest_tail(
    hidden: NDArray[np.float64], delta: float, blocks: list[tuple[int, int]]
) -> float:
    """Return the largest τ with hidden[ℓ] + 1 − (1−τ)^ℓ ≤ δ for every ℓ; 0 if there is none."""
    if hidden[0] > delta:
        return 0.0
    last = np.array([b for _, b in blocks[1:]], dtype=np.float64)
    room = delta - hidden[1:]
    if np.any(room <= 0):
        return 0.0
    return float(np.min(-np.expm1(np.log1p(-room) / last)))


@functools.lru_cache(maxsize=256)  # every step of a run that names its mechanism calls this
def _charged_at_most(epsilon: float, delta: float, words_per_unit: int) -> tuple[float, int]:
    """Return σ and the threshold at which the accounting charges at most ε at δ.

    The accounting bounds the profile from above (by chords on a grid), so a mechanism with this
    profile may be charged slightly more than ε. Slightly more noise corrects that.
    """
    within = delta * _ACCOUNTING
    sigma, threshold = _sigma_of_smallest_threshold(epsilon, within, words_per_unit)
    nudged: int | None = threshold
    for nudge in range(_NUDGES):
        if nudged is not None:
            event = ThresholdedHistogram(words_per_unit, sigma, nudged)
            if epsilon_pld(event, delta) <= epsilon:
                return sigma, nudged
        sigma = round_up(sigma * (1 + 2.0**nudge * 10.0**-DIGITS))
        nudged = smallest_threshold(epsilon, within, words_per_unit, sigma)
    raise _unreached(epsilon, delta)


def _unreached(epsilon: float, delta: float) -> BadInput:
    return BadInput(
        f"no noise of the histogram reaches ε={epsilon:g} at δ={delta:g}",
        where="epsilon, delta",
        fix="Choose another ε, a larger δ, or fewer words per unit.",
    )


def _sigma_of_smallest_threshold(
    epsilon: float, delta: float, words_per_unit: int
) -> tuple[float, int]:
    """Return the smallest σ among those with the smallest threshold, and that threshold.

    The continuous formulas only locate the search; exact, discrete thresholds are compared.
    """

    def threshold_of(sigma: float) -> int | None:
        return smallest_threshold(epsilon, delta, words_per_unit, sigma)

    candidates = _candidate_sigmas(epsilon, delta, words_per_unit)
    thresholds = {s: threshold_of(s) for s in candidates}
    if all(c is None for c in thresholds.values()):
        # Integer noise hides less than the continuous formulas predict: try slightly more noise.
        more = [round_up(candidates[-1] * (1 + 2.0**i * 1e-4)) for i in range(14)]
        thresholds |= {s: threshold_of(s) for s in more}
    enough = [(c, s) for s, c in thresholds.items() if c is not None]
    if not enough:
        raise _unreached(epsilon, delta)
    best, sigma = min(enough)
    below = max((s for s in thresholds if s < sigma), default=0.99 * sigma)
    while (middle := round_up((below + sigma) / 2)) < sigma:
        c = threshold_of(middle)
        if c is not None and c <= best:
            best, sigma = c, middle
        else:
            if middle == below:
                break
            below = middle
    return sigma, best


def _candidate_sigmas(epsilon: float, delta: float, words_per_unit: int) -> list[float]:
    """Return values of σ near which the continuous formulas have the smallest threshold."""

    def excess(x: float) -> float:
        return float(gaussian_delta(epsilon, math.sqrt(words_per_unit) / math.exp(x))) - delta

    low, high = math.log(_LEAST_SIGMA), math.log(_MOST_SIGMA)
    if excess(low) <= 0 or excess(high) >= 0:
        raise _unreached(epsilon, delta)
    root = brentq(excess, low, high)
    sigmas = np.exp(root) * np.geomspace(1.0, 16.0, 400)
    blocks = lone_word_blocks(words_per_unit)
    shared = np.array([words_per_unit - first for first, _ in blocks])
    thresholds = np.full(len(sigmas), np.inf)
    for i, sigma in enumerate(sigmas):
        hidden = gaussian_delta(epsilon, np.sqrt(shared) / sigma)
        tail = _largest_tail(hidden, delta, blocks)
        if tail > 0:
            thresholds[i] = 1 - sigma * ndtri(tail)
    near = sigmas[thresholds <= np.min(thresholds) + 2]
    chosen = near[np.unique(np.linspace(0, len(near) - 1, 10).astype(int))]
    return sorted({round_up(float(s)) for s in chosen})
