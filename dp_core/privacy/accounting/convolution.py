"""Sums of many privacy losses, exact to a relative 1e-6 however small δ is.

A plain FFT of k steps leaves rounding noise of about k·1e-16 everywhere, which buries the tail
that δ lives in: at δ = 1e-11 and a million steps the usual libraries print an ε that is *too
small*. Tilting first cures it: every loss distribution is multiplied by e^{θx}, with the θ at which
the moment bound on δ(ε) is least; then the tail is the bulk, and the rounding is relative to it.
δ(ε) = e^{K(θ)} Σ_{x>ε} (1 − e^{ε−x}) e^{−θx} p̃(x), with p̃ the tilted sum.

The moment bound is that of Canonne, Kamath and Steinke 2020 (Proposition 12): since
(1 − e^{−y})₊ ≤ e^{θy + g(θ)} with g(θ) = θ ln θ − (1 + θ) ln(1 + θ), ln δ(ε) ≤ K(θ) − θε + g(θ).
Without g (Chernoff) the best θ runs away where much of δ sits on the largest loss, as it does for
a histogram with little noise, and the ε found there is too large by up to a loss's distance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import fft
from scipy.optimize import brentq, minimize_scalar

from dp_core.privacy.accounting.dots import Dots

_OUTSIDE = math.log(1e-20)  # probability, under the tilt, that may lie outside the window
_TILT_TOLERANCE = 1e-2  # any tilt is right; a good one is precise
_ROUNDING = 1 + 1e-6  # what FFT rounding can take away, and more
_FAR = 60.0  # θ·(x − ε) beyond which a term is bounded and not computed
_LARGEST_WINDOW = 1 << 24


class GridTooFineError(Exception):
    """The grid would hold more points than memory should."""


@dataclass(frozen=True)
class Repeated:
    """One step's losses, and how often the step is taken."""

    dots: Dots
    times: int


class LossSum:
    """The privacy loss of all steps together, in one direction."""

    def __init__(self, parts: Sequence[Repeated], interval: float) -> None:
        self._h = interval
        self._parts = [_Part.of(part, interval) for part in parts]
        survive = sum(p.times * math.log1p(-p.dots.infinite) for p in parts)
        self.infinite = -math.expm1(survive)
        self._highest = sum(p.times * p.losses[-1] for p in self._parts)

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε ≥ 0 with δ(ε) ≤ delta; ∞ if there is none."""
        finite = delta / _ROUNDING - self.infinite
        if finite <= 0:
            return math.inf
        first = self._tilted(self._tilt_for(finite)).epsilon(finite, 1e-4)
        # The first tilt is as good as its search; the second is exact for the ε that it gave.
        return self._tilted(self._tilt_at(first)).epsilon(finite, 1e-9)

    def delta(self, epsilon: float) -> float:
        """Return δ at ε ≥ 0."""
        tilted = self._tilted(self._tilt_at(epsilon))
        return min(1.0, (self.infinite + math.exp(tilted.log_delta(epsilon))) * _ROUNDING)

    def _cumulant(self, theta: float) -> float:
        return sum(part.times * part.cumulant(theta) for part in self._parts)

    def _mean(self, theta: float) -> float:
        return sum(part.times * part.mean(theta) for part in self._parts)

    def _tilt_for(self, delta: float) -> float:
        """Return the θ that minimises the moment bound (K(θ) + g(θ) − ln δ)/θ on ε: order α − 1."""
        found = minimize_scalar(
            lambda x: (
                (self._cumulant(math.exp(x)) + _gap(math.exp(x)) - math.log(delta)) / math.exp(x)
            ),
            bounds=(math.log(1e-6), math.log(1e7)),
            method="bounded",
            options={"xatol": _TILT_TOLERANCE},
        )
        return math.exp(float(found.x))

    def _tilt_at(self, epsilon: float) -> float:
        """Return the θ that minimises the moment bound K(θ) − θε + g(θ) on ln δ, convex in θ."""

        def slope(theta: float) -> float:
            return self._mean(theta) - math.log1p(1 / theta) - epsilon

        low, high = 1e-6, 1.0
        if slope(low) >= 0:
            return low
        while slope(high) < 0:
            if high >= 1e8:
                return high  # ε is at the end of the support
            low, high = high, 2 * high
        return float(brentq(slope, low, high, xtol=1e-6, rtol=_TILT_TOLERANCE))

    def _tilted(self, theta: float) -> _TiltedSum:
        """Return the sum's distribution under e^{θx}, on a window that holds all but 1e-20."""
        low = max(self._bound(theta, -1), sum(p.times * p.losses[0] for p in self._parts))
        high = min(self._bound(theta, 1), self._highest)
        first = math.floor(low / self._h)
        size = math.ceil(high / self._h) - first + 1
        if size > _LARGEST_WINDOW:
            raise GridTooFineError(f"a privacy-loss grid of {size} points")
        length = fft.next_fast_len(max(size, 2), real=True)
        spectrum: NDArray[np.complex128] | None = None
        start = 0
        for part in self._parts:
            folded = np.bincount(
                np.arange(len(part.losses)) % length, part.tilted(theta), minlength=length
            )
            power = fft.rfft(folded) ** part.times
            spectrum = power if spectrum is None else spectrum * power
            start += part.times * part.first
        assert spectrum is not None  # noqa: S101  (parts are never empty)
        circle = np.maximum(fft.irfft(spectrum, length), 0.0)
        probabilities = np.roll(circle, (start - first) % length)
        losses = (first + np.arange(length)) * self._h
        return _TiltedSum(theta, self._cumulant(theta), losses, probabilities)

    def _bound(self, theta: float, sign: int) -> float:
        """Return Chernoff's bound, up or down, on where all but 1e-20 of the tilted sum lies."""
        base = self._cumulant(theta)

        def bound(x: float) -> float:
            s = sign * math.exp(x)
            return sign * (self._cumulant(theta + s) - base - _OUTSIDE) / s

        found = minimize_scalar(
            bound, bounds=(math.log(1e-6), math.log(1e8)), method="bounded", options={"xatol": 0.1}
        )
        return sign * float(found.fun)


def _gap(theta: float) -> float:
    """Return g(θ), by which (1 − e^{−y})₊ stays below e^{θy}."""
    return -theta * math.log1p(1 / theta) - math.log1p(theta)


@dataclass(frozen=True)
class _Part:
    """One step's losses with their log-probabilities, and how often it is taken."""

    first: int
    times: int
    losses: NDArray[np.float64]
    logs: NDArray[np.float64]

    @classmethod
    def of(cls, part: Repeated, h: float) -> _Part:
        held = np.flatnonzero(part.dots.probabilities)
        kept = part.dots.probabilities[held[0] : held[-1] + 1]
        first = part.dots.first + int(held[0])
        with np.errstate(divide="ignore"):
            logs = np.log(kept)
        return cls(first, part.times, (first + np.arange(len(kept))) * h, logs)

    def cumulant(self, theta: float) -> float:
        exponents = self.logs + theta * self.losses
        top = float(np.max(exponents))
        return top + math.log(float(np.sum(np.exp(exponents - top))))

    def tilted(self, theta: float) -> NDArray[np.float64]:
        return np.asarray(np.exp(self.logs + theta * self.losses - self.cumulant(theta)))

    def mean(self, theta: float) -> float:
        return float(np.dot(self.tilted(theta), self.losses))


@dataclass(frozen=True)
class _TiltedSum:
    """p̃ on a window of losses."""

    theta: float
    cumulant: float
    losses: NDArray[np.float64]
    probabilities: NDArray[np.float64]

    def log_delta(self, epsilon: float) -> float:
        """Return ln δ(ε), without the infinite part."""
        first = int(np.searchsorted(self.losses, epsilon, side="right"))
        reach = epsilon + _FAR / self.theta if self.theta > 0 else math.inf
        last = int(np.searchsorted(self.losses, reach, side="right"))
        distance = self.losses[first:last] - epsilon
        weights = -np.expm1(-distance) * np.exp(-self.theta * distance)
        # Each term beyond weighs less than e^−60, which stands for all of them.
        beyond = math.exp(-_FAR) * float(np.sum(self.probabilities[last:]))
        total = float(np.dot(weights, self.probabilities[first:last])) + beyond
        if total == 0:
            return -math.inf
        return self.cumulant - self.theta * epsilon + math.log(total)

    def epsilon(self, delta: float, tolerance: float) -> float:
        """Return the ε ≥ 0 with δ(ε) = delta, from above, to a relative tolerance."""
        target = math.log(delta)
        low = max(0.0, float(self.losses[0]))
        high = max(float(self.losses[-1]), low)
        if self.log_delta(low) <= target:
            return low
        if self.log_delta(high) > target:
            return high
        root = brentq(
            lambda e: max(self.log_delta(e), target - 1e3) - target,
            low,
            high,
            xtol=tolerance * 1e-3,
            rtol=tolerance,
        )
        return float(root) * (1 + tolerance)
