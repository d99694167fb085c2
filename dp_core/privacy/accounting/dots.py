"""A profile as a probability distribution of the privacy loss on a grid, never too small.

Connect the dots (Doroshenko, Ghazi, Kamath, Kumar and Manurangsi 2022, arXiv:2207.04380): the
profile, a convex function of e^ε, is replaced by its chords between grid points. That is the
profile of a discrete distribution, lies above the true one everywhere, and composes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_core.privacy.accounting.profiles import Floats, Profile


@dataclass(frozen=True)
class Dots:
    """Pr[loss = (first + i)·h] = probabilities[i], and Pr[loss = ∞] = infinite."""

    first: int
    probabilities: NDArray[np.float64]
    infinite: float


def dots_of(profile: Profile, interval: float) -> tuple[Dots, Dots]:
    """Return the (with, without) loss distributions of one step, with spacing h = `interval`."""
    last = math.ceil(profile.reach() / interval) + 1
    with_unit, without = profile.directions(np.arange(last + 1) * interval)
    if without is with_unit:  # a symmetric profile
        both = _connect(with_unit, with_unit, interval)
        return both, both
    return _connect(with_unit, without, interval), _connect(without, with_unit, interval)


def _connect(calls: Floats, reverse: Floats, h: float) -> Dots:
    """Return the chords' distribution, from H at 0, h, 2h, … and the reverse direction there.

    For negative ε the formulas use H_{−ε}(P‖Q) − (1 − e^{−ε}) = e^{−ε} H_ε(Q‖P): the part left
    out is linear in e^ε, so the second differences do not see it, and no digits cancel.
    """
    # A profile never rises; where a bound does, by rounding, the larger value stands.
    calls = np.maximum.accumulate(calls[::-1])[::-1]
    reverse = np.maximum.accumulate(reverse[::-1])[::-1]
    n = len(calls) - 1
    puts = np.exp(-np.arange(n + 1) * h) * reverse
    puts[0] = calls[0] = max(calls[0], reverse[0])  # both are the total variation distance
    e, step = math.exp(h), math.expm1(h)
    mass = np.zeros(2 * n + 1)  # losses −nh … nh; index n is loss 0
    mass[n + 1 : 2 * n] = ((calls[2:] - calls[1:-1]) - e * (calls[1:-1] - calls[:-2])) / step
    left = puts[::-1]  # at −nh … 0, rising
    mass[1:n] = ((left[2:] - left[1:-1]) - e * (left[1:-1] - left[:-2])) / step
    mass[n] = 1 + ((calls[1] - calls[0]) - e * (left[-1] - left[-2])) / step
    mass[0] = (left[1] - left[0]) / step - left[0]
    mass[2 * n] = (calls[n - 1] - calls[n]) / -math.expm1(-h)
    return Dots(-n, np.maximum(mass, 0.0), float(calls[n]))
