"""How finely privacy losses are discretised: fine enough to be tight, coarse enough to be quick.

Connect-the-dots with spacing h adds at most h²/4 to the variance of one step's loss, so k steps
blur the total by √k·h/2. Any spacing gives a valid upper bound; only tightness is at stake.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from dp_core.privacy.accounting.rdp import rdp_curve
from dp_core.privacy.accounting.stated import StatedGuarantee
from dp_core.privacy.events import (
    Composed,
    FixedSizeGaussian,
    Gaussian,
    MechanismEvent,
    PoissonGaussian,
    Restated,
    ShuffledGaussian,
    ThresholdedHistogram,
    TruncatedPoissonGaussian,
)

_BLUR = 4e-3  # blur allowed, as a share of ε
_ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)  # whole numbers: quick
_DELTA = 1e-6  # at which the scale of ε is guessed
COARSEST = 1.0  # beyond it e^h is no longer near 1 + h, and nobody needs the digits
_LARGEST_STEP_GRID = 1 << 20
_LARGEST_TOTAL_GRID = 1 << 22


def interval_for(event: MechanismEvent, epsilon: float) -> float:
    """Return the spacing of the privacy-loss grid: 1, 2 or 5 times a power of ten.

    Args:
        epsilon: the scale of ε; a guess from `scale_of`, or what a coarser grid gave.
    """
    steps = sum(times for times, _ in _steps(event))
    reach = max(r for _, r in _steps(event))
    wanted = min(1e-3 * max(1.0, epsilon / 5), 2 * _BLUR * epsilon / math.sqrt(steps))
    affordable = max(reach / _LARGEST_STEP_GRID, 4 * epsilon / _LARGEST_TOTAL_GRID)
    return _round_down(max(wanted, affordable))


def scale_of(event: MechanismEvent) -> float:
    """Return roughly the ε of `event` at δ = 1e-6, at least 1e-3, from whole Rényi orders."""
    return max(_scale(event), 1e-3)


def _scale(event: MechanismEvent) -> float:
    curve = np.zeros(len(_ORDERS))
    for leaf in _leaves(event):
        if isinstance(leaf, TruncatedPoissonGaussian):
            leaf = PoissonGaussian(leaf.phases)
        if isinstance(leaf, FixedSizeGaussian):  # near enough, and its own curve takes seconds
            half = ((batch / leaf.slots, sigma / 2, n) for batch, sigma, n in leaf.phases)
            leaf = PoissonGaussian(tuple(half))
        if isinstance(leaf, ThresholdedHistogram):
            leaf = Gaussian(leaf.sigma / math.sqrt(leaf.words_per_unit))
        if isinstance(leaf, StatedGuarantee):  # a divergence is at most ε, and αε²/2 where small
            curve = curve + np.minimum(leaf.epsilon, np.asarray(_ORDERS) * leaf.epsilon**2 / 2)
            continue
        part = rdp_curve(leaf, _ORDERS)
        if part is not None:
            curve = curve + part
    orders = np.asarray(_ORDERS, dtype=np.float64)
    return float(np.min(curve + math.log(1 / _DELTA) / (orders - 1)))


def _leaves(event: MechanismEvent) -> Iterator[MechanismEvent]:
    if isinstance(event, Composed):
        for part in event.events:
            yield from _leaves(part)
    elif isinstance(event, Restated):
        yield event.event
    else:
        yield event


def _steps(event: MechanismEvent) -> Iterator[tuple[int, float]]:
    """Yield (times, largest privacy loss of one) for every phase of every part."""
    for leaf in _leaves(event):
        match leaf:
            case PoissonGaussian(phases=phases):
                yield from ((n, _reach(rate, 1 / sigma)) for rate, sigma, n in phases)
            case TruncatedPoissonGaussian(phases=phases):
                yield from ((n, _reach(rate, 2 / sigma)) for rate, sigma, n in phases)
            case FixedSizeGaussian(slots=slots, phases=phases):
                yield from ((n, _reach(b / slots, 2 / sigma)) for b, sigma, n in phases)
            case StatedGuarantee(epsilon=epsilon):
                yield 1, 2 * epsilon
            case Gaussian(noise_multiplier=sigma, count=n):
                yield 1, _reach(1.0, math.sqrt(n) / sigma)
            case ShuffledGaussian(noise_multiplier=sigma, participations=n):
                yield 1, _reach(1.0, math.sqrt(n) / sigma)
            case ThresholdedHistogram(words_per_unit=n, sigma=sigma):
                yield 1, _reach(1.0, math.sqrt(n) / sigma)


def _reach(rate: float, mu: float) -> float:
    """Return the width of one step's losses, 12 standard deviations out on each side."""
    loss = mu * mu / 2 + 12 * mu
    amplified = loss + math.log(rate) if loss > 700 else math.log1p(rate * math.expm1(loss))
    return 2 * amplified


def _round_down(value: float) -> float:
    exponent = math.floor(math.log10(value))
    mantissa = value / 10**exponent
    return float(f"{max(m for m in (1, 2, 5) if m <= mantissa * (1 + 1e-9))}e{exponent}")
