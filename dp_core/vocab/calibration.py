"""Noise and threshold of the word histogram for a wanted (ε, δ): exact, for the noise drawn.

Exact mode finds the smallest threshold that any σ allows, because a smaller threshold releases
more words. Paper mode (`dp_core.vocab.paper_mode`) reproduces Hoory et al. 2021, Corollary 1.
The mathematics is in `dp_core.privacy.accounting.histogram`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtri

from dp_core.errors import BadInput, PlanError
from dp_core.privacy.accounting.discrete_gaussian import upper_tail
from dp_core.privacy.accounting.gaussian import gaussian_delta
from dp_core.privacy.accounting.histogram import (
    HistogramProfile,
    lone_word_blocks,
    shared_deltas,
)
from dp_core.privacy.events import ThresholdedHistogram
from dp_core.privacy.units import PrivacyUnit

_DIGITS = 5  # significant digits of a calibrated σ: what a person can copy


@dataclass(frozen=True)
class HistogramPlan:
    """A word histogram's release: what is drawn, and the (ε, δ) that it earns.

    *Formal guarantee.* Adding or removing one unit that counts towards at most `words_per_unit`
    words, each once: (ε, δ)-DP for discrete Gaussian noise of parameter `sigma` on every word
    present and release of the noised counts ≥ `threshold`.

    Attributes:
        words_per_unit: N, the most distinct words of a unit that count.
        sigma: parameter of the discrete Gaussian noise, in counts.
        threshold: whole number C; noised counts below it are not released.
        epsilon: claimed ε. delta: claimed δ.
        unit: what is added or removed (None: a bare calculation).
        declared_units: public upper bound on the number of units, if the plan states one.

    Raises:
        PlanError: sigma and threshold do not earn (ε, δ).
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
        earned = delta_of(self.words_per_unit, self.sigma, self.threshold, self.epsilon)
        if earned > self.delta:
            raise PlanError(
                f"σ={self.sigma:g} and threshold {self.threshold} give δ={earned:.3g} at "
                f"ε={self.epsilon:g}, not {self.delta:g}",
                where="histogram plan",
                fix="Calibrate: `confide calibrate vocabulary`.",
            )

    def event(self) -> ThresholdedHistogram:
        """Return the mechanism, for the ledger."""
        return ThresholdedHistogram(self.words_per_unit, self.sigma, self.threshold, unit=self.unit)


def delta_of(words_per_unit: int, sigma: float, threshold: int, epsilon: float) -> float:
    """Return δ at ε of the histogram as it is drawn: integer noise, integer threshold."""
    checked = ThresholdedHistogram(words_per_unit, sigma, threshold)  # refuses what is impossible
    return HistogramProfile(checked.words_per_unit, checked.sigma, int(threshold)).delta(epsilon)


def calibrate(
    epsilon: float,
    delta: float,
    words_per_unit: int,
    *,
    unit: PrivacyUnit | None = None,
    declared_units: int | None = None,
) -> HistogramPlan:
    """Return the plan with the smallest threshold that earns (ε, δ), and its smallest σ.

    Args:
        epsilon: target ε > 0. delta: target δ in (0, 1).
        words_per_unit: N, the most distinct words of a unit that count.

    Raises:
        BadInput: a target or N out of range.
    """
    check_target(epsilon, delta, words_per_unit)
    sigma, threshold = _sigma_of_smallest_threshold(epsilon, delta, words_per_unit)
    return HistogramPlan(
        words_per_unit, sigma, threshold, epsilon, delta, unit=unit, declared_units=declared_units
    )


def check_target(epsilon: float, delta: float, words_per_unit: int) -> None:
    """Refuse a target that no histogram has.

    Raises:
        BadInput: ε, δ or N out of range.
    """
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise BadInput(f"{epsilon} is not above 0", where="epsilon")
    if not 0 < delta < 1:
        raise BadInput(f"{delta} is not between 0 and 1", where="delta")
    if words_per_unit < 1:
        raise BadInput(f"{words_per_unit} is below 1", where="words_per_unit")


def smallest_threshold(
    epsilon: float, delta: float, words_per_unit: int, sigma: float
) -> int | None:
    """Return the smallest threshold at which σ earns (ε, δ), or None if none does."""
    tail = _largest_tail(
        shared_deltas(words_per_unit, sigma, epsilon), delta, lone_word_blocks(words_per_unit)
    )
    if tail <= 0:
        return None
    threshold = max(1, math.floor(1 - sigma * float(ndtri(min(tail, 0.5)))) - 2)
    while upper_tail(threshold - 1, sigma) > tail:
        threshold += 1
    # The tail bounds the direction in which the unit is there; the other one is checked as well.
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


@functools.lru_cache(maxsize=256)  # a run asks again in every step that names its mechanism
def _sigma_of_smallest_threshold(
    epsilon: float, delta: float, words_per_unit: int
) -> tuple[float, int]:
    """Return the smallest σ among those with the smallest threshold, and that threshold.

    The continuous formulas show where to look; only exact, discrete thresholds are compared.
    """
    places = _where_to_look(epsilon, delta, words_per_unit)
    found = [(smallest_threshold(epsilon, delta, words_per_unit, s), s) for s in places]
    reached = [(c, s) for c, s in found if c is not None]
    if not reached:
        raise BadInput("no noise that was tried reaches this target", where="epsilon, delta")
    best, sigma = min(reached)
    below = max((s for _, s in found if s < sigma), default=0.99 * sigma)
    while (middle := _round_up((below + sigma) / 2)) < sigma:
        c = smallest_threshold(epsilon, delta, words_per_unit, middle)
        if c is not None and c <= best:
            best, sigma = c, middle
        else:
            if middle == below:
                break
            below = middle
    return sigma, best


def _where_to_look(epsilon: float, delta: float, words_per_unit: int) -> list[float]:
    """Return the σ near which the continuous formulas put the smallest threshold."""
    root = brentq(
        lambda x: float(gaussian_delta(epsilon, math.sqrt(words_per_unit) / math.exp(x))) - delta,
        math.log(1e-4),
        math.log(1e9),
    )
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
    return sorted({_round_up(float(s)) for s in chosen})


def _round_up(sigma: float) -> float:
    step = 10.0 ** (math.floor(math.log10(sigma)) - _DIGITS + 1)
    return float(f"{math.ceil(sigma / step - 1e-6) * step:.12g}")
