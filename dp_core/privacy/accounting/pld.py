"""Privacy loss distributions: the accounting behind every ε that Confide claims.

Every PLD here is pessimistic (connect-the-dots, arXiv:2207.04380): the ε it gives is an upper
bound on the true one, in both directions, and the grid is refined until the bound is tight.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as library
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy.stats import binom

from dp_core.errors import BadInput
from dp_core.privacy.accounting.gaussian import gaussian_delta
from dp_core.privacy.accounting.grid import interval_for
from dp_core.privacy.accounting.histogram import histogram_pld
from dp_core.privacy.events import (
    Composed,
    FixedSizeGaussian,
    Gaussian,
    MechanismEvent,
    PoissonGaussian,
    ShuffledGaussian,
    ThresholdedHistogram,
    TruncatedPoissonGaussian,
    Unaccounted,
)


def epsilon_pld(event: MechanismEvent, delta: float) -> float:
    """Return the claim: an upper bound on ε at δ for `event`, under its own relation.

    ∞ where the event holds a release without guarantee, or where δ is below what the mechanism
    gives away at any ε (a histogram's tail).
    """
    if not 0 < delta < 1:
        raise BadInput(f"{delta} is not between 0 and 1", where="delta")
    if is_unaccounted(event):
        return math.inf
    return float(pld_of(event, interval_for(event)).get_epsilon_for_delta(delta))


def delta_pld(event: MechanismEvent, epsilon: float) -> float:
    """Return an upper bound on δ at ε for `event`; 1 for a release without guarantee."""
    if epsilon < 0:
        raise BadInput(f"{epsilon} is below 0", where="epsilon")
    if is_unaccounted(event):
        return 1.0
    delta = pld_of(event, interval_for(event)).get_delta_for_epsilon(epsilon)
    return min(1.0, float(delta))


def is_unaccounted(event: MechanismEvent) -> bool:
    """Return whether any part of `event` has no guarantee."""
    if isinstance(event, Composed):
        return any(is_unaccounted(part) for part in event.events)
    return isinstance(event, Unaccounted)


def pld_of(event: MechanismEvent, interval: float) -> PrivacyLossDistribution:
    """Return the privacy loss distribution of `event` on a grid of this spacing."""
    match event:
        case Composed(events=events):
            total = pld_of(events[0], interval)
            for part in events[1:]:
                total = total.compose(pld_of(part, interval))
            return total
        case Gaussian(noise_multiplier=sigma, count=times):
            return _gaussian(sigma / math.sqrt(times), 1.0, interval)
        case ShuffledGaussian(noise_multiplier=sigma, participations=times):
            return _gaussian(sigma / math.sqrt(times), 1.0, interval)
        case PoissonGaussian(phases=phases):
            parts = [
                _repeated(_gaussian(sigma, rate, interval), steps) for rate, sigma, steps in phases
            ]
        case TruncatedPoissonGaussian(phases=phases):
            parts = [
                _repeated(_truncated(event, rate, sigma, interval), steps)
                for rate, sigma, steps in phases
            ]
        case FixedSizeGaussian(slots=slots, phases=phases):
            parts = [
                _repeated(_fixed_size(batch / slots, sigma, interval), steps)
                for batch, sigma, steps in phases
            ]
        case ThresholdedHistogram():
            return histogram_pld(event, interval)
        case _:
            raise BadInput(f"no accounting for event kind {event.kind!r}", where="privacy event")
    total = parts[0]
    for phase in parts[1:]:
        total = total.compose(phase)
    return total


def _repeated(pld: PrivacyLossDistribution, times: int) -> PrivacyLossDistribution:
    return pld if times == 1 else pld.self_compose(times)


def _gaussian(sigma: float, rate: float, interval: float) -> PrivacyLossDistribution:
    """Return the Poisson-subsampled Gaussian (exact pair: Zhu, Dong and Wang 2022, Thm. 11)."""
    return library.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=interval
    )


def _truncated(
    event: TruncatedPoissonGaussian, rate: float, sigma: float, interval: float
) -> PrivacyLossDistribution:
    """Return one truncated Poisson step, add-or-remove.

    Let B be the number of *other* units drawn; it does not depend on the unit in question. If
    B < cap nothing is cut, with or without the unit: the plain subsampled Gaussian. Otherwise the
    other units send a uniform subset of `cap`, and the unit, if drawn, takes the place of one of
    them with probability cap/(B+1) < 1: given the subset and the one replaced, a Gaussian whose
    sum moves by up to 2 C with probability at most q. So the step is at most the mixture of both,
    weighted with Pr[B ≥ cap]. (Same decomposition as arXiv:2508.15089, which bounds the second
    part by replace-one.) Both weights and parts only grow with n, so the declared bound stands
    for the true number of units.
    """
    plain = _gaussian(sigma, rate, interval)
    cut = float(binom.sf(event.cap - 1, event.declared_units - 1, rate))
    if cut == 0.0:
        return plain
    return _gaussian(sigma / 2, rate, interval).compute_mixture(plain, cut)


def _fixed_size(rate: float, sigma: float, interval: float) -> PrivacyLossDistribution:
    """Return one step on a uniform subset of fixed size, replace-one.

    Balle, Barthe and Gaboardi 2018 (arXiv:1807.01647), Theorem 9: with δ_M the replace-one
    profile of the Gaussian (sensitivity 2), δ(ln(1 + q(e^ε − 1))) ≤ q·δ_M(ε) for ε ≥ 0; the
    relation is symmetric, so δ(−ε) = 1 − e^{−ε} + e^{−ε} δ(ε).
    """
    mu = 2 / sigma
    reach = math.log1p(rate * math.expm1(min(mu * mu / 2 + 10 * mu, 700.0)))
    positive = np.arange(0, math.ceil(reach / interval) + 2) * interval
    deltas = rate * gaussian_delta(np.log1p(np.expm1(positive) / rate), mu)
    negative = -np.expm1(-positive[:0:-1]) + np.exp(-positive[:0:-1]) * deltas[:0:-1]
    last = len(positive) - 1
    return PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
            interval, -last, last, np.concatenate([negative, deltas])
        )
    )
