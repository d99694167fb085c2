"""Calibration of the mechanisms of partition selection to a target (ε, δ), exact for their noise.

The ε that the ledger's accounting charges for a plan's event is at most the target, so a budget
equal to the target suffices. Of all σ that reach the target, the σ with the smallest threshold is
chosen, because it releases the most items. The search has two parameters, of which one is an
integer, and δ has jumps. Therefore dp_accounting's `calibrate_dp_mechanism`, which brackets a root
in one parameter, does not fit.

`paper` is not calibrated: it is Corollary 1 of Hoory et al. 2021 as printed, at its true δ. The
paper sets C = 1 + σ·erf⁻¹(1 − δ/N) and assumes that the normal tail beyond it is δ/N. But the
standard normal's quantile is √2·erf⁻¹(2p − 1), not erf⁻¹. At that C a word that only one unit holds
is released far more often, and this probability is part of δ at *every* ε.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import erfcinv, ndtr, ndtri

from dp_core.config.privacy import LEAST_DELTA, MOST_CLAIM, MechanismName, gives_a_unit_away
from dp_core.errors import BadInput, PlanError
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.accounting.calibration import DIGITS, round_up
from dp_core.privacy.accounting.profiles import (
    gaussian_delta,
    lone_word_blocks,
    shared_deltas,
    upper_tail,
)
from dp_core.privacy.discrete_gaussian import LATTICE_DEVIATION
from dp_core.privacy.mechanisms import NoisedWeights, PrivacyUnit, ThresholdedHistogram
from dp_core.vocabulary.partition_selection import Counted, Elimination, PartitionSelection

MOST_WORDS = 100_000  # distinct words of one unit
_LEAST_SIGMA, _MOST_SIGMA = 1e-2, 1e7
_WITHIN = 1 - 1e-5  # share of δ that is spent; the rest exceeds the accounting's rounding
_NUDGES = 12  # doublings from one last digit of σ: up to 4%
# Number of rounds of elimination and their largest weight were chosen on synthetic text
# (benchmarks/bench_partition_selection.py): docs/vocabulary.md.
_ROUNDS, _LARGEST = 8, 0.35
_COUNTING = 0.05  # share of μ² for elimination's estimate of counts


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
    if mechanism == "paper":
        return _printed(unit, declared_units)
    if mechanism == "gaussian":
        return calibrate(epsilon, delta, items_per_unit, unit=unit, declared_units=declared_units)
    check_target(epsilon, delta, items_per_unit)
    weights = _elimination(epsilon, delta, items_per_unit)
    event = weights if unit is None else weights.stating(unit)
    return Elimination(items_per_unit, epsilon, delta, unit, declared_units, event)


# --- the histogram


def delta_of(words_per_unit: int, sigma: float, threshold: int, epsilon: float) -> float:
    """Return δ at ε of the histogram with integer noise and integer threshold."""
    return ThresholdedHistogram(words_per_unit, sigma, threshold).profile.delta_at(epsilon)


def calibrate(
    epsilon: float,
    delta: float,
    words_per_unit: int,
    *,
    unit: PrivacyUnit | None = None,
    declared_units: int | None = None,
) -> Counted:
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
    return Counted(words_per_unit, epsilon, delta, unit, declared_units, sigma, threshold)


def check_target(epsilon: float, delta: float, words_per_unit: int) -> None:
    """Refuse a target that no histogram can have.

    Raises:
        BadInput: ε, δ or N is out of range.
    """
    if not 0 < epsilon <= MOST_CLAIM:
        raise BadInput(f"{epsilon:g} is not above 0, at most {MOST_CLAIM:g}", where="epsilon")
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
    within = delta * _WITHIN
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


# --- elimination


@functools.lru_cache(maxsize=256)  # every step of a run that names its mechanism calls this
def _elimination(epsilon: float, delta: float, items_per_unit: int) -> NoisedWeights:
    """Return elimination with the smallest threshold relative to a unit's weight."""
    most = brentq(  # the largest log μ that hides items which other units hold, too
        lambda x: float(gaussian_delta(epsilon, math.exp(x))) - delta * _WITHIN, -20.0, 6.0
    )
    sigmas = math.exp(-most) * np.geomspace(1 + 1e-5, 1.5, 60)
    rough = [_rough_threshold(epsilon, delta, items_per_unit, s) for s in sigmas]
    for more in range(12):  # the accounting also rounds ε up, so aim below it
        nudge = 1e-5 * (2**more - 1)
        sigma = float(sigmas[int(np.argmin(rough))]) * (1 + nudge)
        event = _eliminating_at(epsilon * (1 - nudge), delta, items_per_unit, sigma)
        if event is not None and epsilon_pld(event, delta) <= epsilon:
            return event
    raise BadInput(
        f"no noise of the mechanism elimination reaches ε={epsilon:g} at δ={delta:g}",
        where="epsilon, delta",
        fix="Choose another ε, a larger δ, or fewer items per unit.",
    )


def _rough_threshold(epsilon: float, delta: float, items_per_unit: int, sigma: float) -> float:
    """Return the approximate threshold in weights of a unit, at σ times a unit's total norm."""
    room = delta * _WITHIN - float(gaussian_delta(epsilon, 1 / sigma))
    if room <= 0:
        return math.inf
    t = np.arange(1, items_per_unit + 1)
    return float(np.max(_LARGEST - sigma * ndtri(-np.expm1(np.log1p(-room) / t))))


def _eliminating_at(
    epsilon: float, delta: float, items_per_unit: int, sigma: float
) -> NoisedWeights | None:
    """Return elimination at σ with the smallest threshold for (ε, δ), or None."""
    shares = [(1 - _COUNTING) * (1 / _ROUNDS)] * _ROUNDS + [_COUNTING]
    scales = tuple(math.floor(math.sqrt(s) * LATTICE_DEVIATION / sigma) for s in shares)
    if min(scales) < math.ceil(math.sqrt(items_per_unit)):
        return None  # the lattice is too coarse for so many items at so much noise

    def made(threshold: int) -> NoisedWeights:  # all rounds have one threshold
        checks = tuple((0, r, threshold) for r in range(_ROUNDS))
        return NoisedWeights(items_per_unit, scales, checks, _LARGEST)

    if made(1).mu >= 1e3:
        return None
    room = delta * _WITHIN - float(gaussian_delta(epsilon, made(1).mu))
    while room > delta * 1e-9:
        thresholds = range(1, int(60 * LATTICE_DEVIATION) + 60 * sum(scales))
        # The coin falls as the threshold rises.
        least = made(1 + bisect_left(thresholds, -room, key=lambda c: -made(c).coin))
        if least.profile.delta_at(epsilon) <= delta * _WITHIN:
            return least
        room *= 0.99  # the other direction needs more δ
    return None


# --- the paper's parameters


@dataclass(frozen=True)
class PaperHistogram:
    """Corollary 1's figures for (N, σ, δ), with continuous noise as in the paper.

    Attributes:
        epsilon: ε_V as printed. claimed_delta: δ as printed.
        threshold: C as printed. true_delta: the δ of this C at that ε.
        right_threshold: C = 1 + σ·Φ⁻¹(1 − δ/N), at which the paper's proof gives δ.
        right_delta: the δ of `right_threshold` at that ε.
        lone_word: probability that a word of only one unit passes the printed C.
    """

    words_per_unit: int
    sigma: float
    epsilon: float
    claimed_delta: float
    threshold: float
    true_delta: float
    right_threshold: float
    right_delta: float
    lone_word: float


def paper_parameters(
    sigma: float = 200.0, delta: float = 1e-9, words_per_unit: int = 256
) -> PaperHistogram:
    """Return Corollary 1 for these parameters; the defaults are the paper's."""
    epsilon = math.sqrt(words_per_unit) / sigma * math.sqrt(2 * math.log(1.25 / delta))
    printed = 1 + sigma * float(erfcinv(delta / words_per_unit))
    right = 1 - sigma * float(ndtri(delta / words_per_unit))
    return PaperHistogram(
        words_per_unit,
        sigma,
        epsilon,
        delta,
        printed,
        continuous_delta(words_per_unit, sigma, printed, epsilon),
        right,
        continuous_delta(words_per_unit, sigma, right, epsilon),
        float(ndtr(-(printed - 1) / sigma)),
    )


def paper_sigma(epsilon: float, delta: float, words_per_unit: int) -> float:
    """Return the σ at which Corollary 1 has this ε_V at δ.

    Raises:
        BadInput: a target or N is out of range.
    """
    check_target(epsilon, delta, words_per_unit)
    return math.sqrt(words_per_unit) / epsilon * math.sqrt(2 * math.log(1.25 / delta))


def continuous_delta(words_per_unit: int, sigma: float, threshold: float, epsilon: float) -> float:
    """Return δ at ε with continuous Gaussian noise, the larger of the two directions.

    Adding: max over ℓ of δ_G(ε; √(N−ℓ)/σ) + 1 − (1−τ)^ℓ, where τ is the tail beyond C − 1.
    Removing: max over ℓ of δ_G(ε + ℓ ln(1−τ); √(N−ℓ)/σ).
    """
    stay = math.log1p(-float(ndtr(-(threshold - 1) / sigma)))
    worst = 0.0
    for lone in range(words_per_unit + 1):
        mu = math.sqrt(words_per_unit - lone) / sigma
        adding = float(gaussian_delta(epsilon, mu)) - math.expm1(lone * stay)
        removing = float(np.asarray(gaussian_delta(epsilon + lone * stay, mu)))
        worst = max(worst, adding, removing)
    return worst


def _printed(unit: PrivacyUnit | None, declared_units: int) -> Counted:
    """Return Hoory et al.'s histogram: N = 256, σ = 200, C = 982.5, at its true δ.

    The noise is discrete, and the threshold is rounded up to an integer.

    Raises:
        PlanError: the true δ is 1/declared_units or more.
    """
    paper = paper_parameters()
    threshold = math.ceil(paper.threshold)
    words, sigma, epsilon = paper.words_per_unit, paper.sigma, paper.epsilon
    earned = delta_of(words, sigma, threshold, epsilon)
    if gives_a_unit_away(earned, declared_units):
        raise PlanError(
            f"the paper's σ and threshold have δ = {earned:.3g}, not {paper.claimed_delta:g}, "
            f"which is 1/{declared_units} or more for the declared units: no guarantee",
            where="vocabulary_mechanism",
            fix="Use elimination, or gaussian, the paper's mechanism with a right threshold.",
        )
    return Counted(words, epsilon, earned, unit, declared_units, sigma, threshold)
