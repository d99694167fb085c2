"""What can be claimed without amplification by sampling: for comparison, and for epochs."""

from __future__ import annotations

import math

from dp_core.privacy.accounting.gaussian import gaussian_epsilon
from dp_core.privacy.events import (
    Composed,
    FixedSizeGaussian,
    Gaussian,
    MechanismEvent,
    PoissonGaussian,
    Restated,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
)


def epsilon_unamplified(event: MechanismEvent, delta: float) -> float:
    """Return the zero-out ε that the same training has if its batches come from shuffled epochs.

    An epoch at rate q has ⌊1/q⌋ whole batches, as the trainer deals them, so s updates take each
    unit at most ⌈s/⌊1/q⌋⌉ times: that many Gaussian mechanisms, adaptively composed, are one with
    μ = √times/σ (Dong, Roth and Su 2022, Corollary 3.3). ∞ where an event has no such reading (a
    histogram, no guarantee).
    """
    return gaussian_epsilon(delta, mu) if math.isfinite(mu := _mu(event, 1.0)) else math.inf


def epsilon_shuffled_replace_one(event: MechanismEvent, delta: float) -> float:
    """Return the same under replace-one: a unit's sum moves by up to 2 C."""
    return gaussian_epsilon(delta, mu) if math.isfinite(mu := _mu(event, 2.0)) else math.inf


def _mu(event: MechanismEvent, sensitivity: float) -> float:
    match event:
        case Gaussian(noise_multiplier=sigma, count=times):
            return sensitivity * math.sqrt(times) / sigma
        case ShuffledGaussian(noise_multiplier=sigma, participations=times):
            return sensitivity * math.sqrt(times) / sigma
        case PoissonGaussian(phases=phases) | TruncatedPoissonGaussian(phases=phases):
            rates = [(rate, sigma, steps) for rate, sigma, steps in phases]
        case FixedSizeGaussian(slots=slots, phases=phases):
            rates = [(batch / slots, sigma, steps) for batch, sigma, steps in phases]
        case Restated(event=inner):
            return _mu(inner, sensitivity)
        case Composed(events=events):
            return math.sqrt(sum(_mu(e, sensitivity) ** 2 for e in events))
        case _:
            return math.inf
    total = 0.0
    for rate, sigma, steps in rates:
        batches_per_epoch = math.floor(1 / rate + 1e-9)  # 1/q whole but for rounding
        total += math.ceil(steps / batches_per_epoch) * (sensitivity / sigma) ** 2
    return math.sqrt(total)
