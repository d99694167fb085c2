"""Rényi accounting: shown beside the claim, and the currency of the ledger's filter."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import dp_accounting as dpa
import numpy as np
from absl import logging as absl_logging  # type: ignore[import-untyped]
from dp_accounting.rdp import rdp_privacy_accountant as rdp_library
from numpy.typing import NDArray

from dp_core.privacy.mechanisms import (
    Composed,
    ConvertedRelation,
    FixedSizeGaussian,
    Gaussian,
    MechanismEvent,
    NeighboringRelation,
    PoissonGaussian,
    RandomCountSelection,
    ShuffledGaussian,
)

Floats = NDArray[np.float64]


def negative_binomial_curve(orders: Floats, base: Floats, eta: float, gamma: float) -> Floats:
    """Return the Rényi bound of A at each order, K truncated negative binomial (Theorem 2).

    ε + (1+η)·[(1 − 1/λ̂)·ε̂ + ln(1/γ)/λ̂] + ln E[K]/(λ − 1), at the best λ̂ among the orders, and
    λ̂ = 1, where the bracket is ln(1/γ). (For η < 0 the same holds: 1 + η > 0.)

    Args:
        orders: λ > 1. base: bound of Q at each. eta: > −1. gamma: in (0, 1).
    """
    hat = (1 - 1 / orders) * base + math.log(1 / gamma) / orders
    best = min(math.log(1 / gamma), float(np.min(hat)))
    mean = negative_binomial_mean(eta, gamma)
    return np.asarray(base + (1 + eta) * best + math.log(mean) / (orders - 1))


def poisson_curve(orders: Floats, base: Floats, mean: float) -> Floats:
    """Return the Rényi bound of A at each order, K Poisson (Theorem 6).

    ε + μ·δ̂ + ln(μ)/(λ − 1), where Q is (ε̂, δ̂)-DP with e^ε̂ ≤ 1 + 1/(λ − 1); to which we add what
    K = 0 contributes to the moment, e^{−μ}: without it the formula fails for small μ (it is below
    0 for μ < 1 and ε near 0), with it the proof's integral over the other outcomes stands as it
    is. δ̂ comes from the Rényi bound: δ̂ = min over α of e^{(α−1)(ε_α − ε̂)}·(1 − 1/α)^{α−1}/α
    (Canonne, Kamath and Steinke 2020, Proposition 12).

    Args:
        orders: λ > 1. base: bound of Q at each. mean: μ.
    """
    epsilons = np.log1p(1 / (orders - 1))  # (orders,)
    a = orders[:, None]
    logs = (a - 1) * (base[:, None] - epsilons[None, :] + np.log1p(-1 / a)) - np.log(a)
    deltas = np.exp(np.minimum(np.min(logs, axis=0), 0.0))
    moments = math.log(mean) + (orders - 1) * (base + mean * deltas)
    return np.asarray(np.logaddexp(moments, -mean) / (orders - 1))


def negative_binomial_mean(eta: float, gamma: float) -> float:
    """Return E[K] of the truncated negative binomial law on 1, 2, … (Definition 1)."""
    if eta == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    # η(1 − γ)/(γ(1 − γ^η)), in the form that keeps its digits near η = 0
    return eta * (1 - gamma) / (gamma * -math.expm1(eta * math.log(gamma)))


def worst(curves: Sequence[Floats]) -> Floats:
    """Return the largest bound at each order: that of a candidate drawn at random from a list."""
    return np.asarray(np.max(np.stack(curves), axis=0))


ORDERS: tuple[float, ...] = (
    *range(2, 64),
    *(64, 72, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768, 1024),
)
# Fractions matter where ε is large; where it is small their series may not converge.
LOW_ORDERS: tuple[float, ...] = tuple(1 + x / 10 for x in range(1, 100))
# What compute_dp_sgd_privacy of TensorFlow Privacy used before 2020.
PAPER_ORDERS: tuple[float, ...] = tuple([1 + x / 10 for x in range(1, 100)] + list(range(12, 64)))


def rdp_curve(
    event: MechanismEvent, orders: Sequence[float] = ORDERS
) -> NDArray[np.float64] | None:
    """Return the event's Rényi divergence bound at each order, or None where none is known.

    Poisson: Mironov, Talwar and Zhang 2019 (arXiv:1908.10530), exact. Fixed size, replace-one:
    Wang, Balle and Kasiviswanathan 2019 (arXiv:1808.00087), Theorem 27, with the Gaussian of
    sensitivity 2. Curves of events on the same data and relation add up.
    """
    if isinstance(event, Composed):
        parts = [rdp_curve(part, orders) for part in event.events]
        known = [part for part in parts if part is not None]
        return np.sum(known, axis=0) if len(known) == len(parts) else None
    if isinstance(event, ConvertedRelation):
        return rdp_curve(event.event, orders) if event.to is NeighboringRelation.ZERO_OUT else None
    if isinstance(event, RandomCountSelection):
        return _selection_curve(event, orders)
    described = _described(event)
    if described is None:
        return None
    replace = event.relation is NeighboringRelation.REPLACE
    relation = dpa.NeighboringRelation.REPLACE_ONE if replace else None
    accountant = (
        rdp_library.RdpAccountant(orders, relation)
        if relation
        else rdp_library.RdpAccountant(orders)
    )
    with _without_warnings():
        accountant.compose(described)
    return np.asarray(accountant.rdp, dtype=np.float64)


def _selection_curve(
    event: RandomCountSelection, orders: Sequence[float]
) -> NDArray[np.float64] | None:
    """Return the bound of the best of K trainings; its λ̂ and α run over all of `ORDERS`."""
    every = np.asarray([*orders, *ORDERS], dtype=np.float64)
    known = [c for e in event.candidates if (c := rdp_curve(e, list(every))) is not None]
    if len(known) < len(event.candidates):
        return None
    base = worst(known)
    if event.count == "poisson":
        curve = poisson_curve(every, base, event.mean)
    else:
        curve = negative_binomial_curve(every, base, event.eta, event.gamma)
    return np.asarray(curve[: len(orders)])


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence the library where an order's series diverges: leaving it out only loosens."""
    before = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)
    try:
        yield
    finally:
        absl_logging.set_verbosity(before)


def _described(event: MechanismEvent) -> dpa.DpEvent | None:
    """Return the library's event of the same Rényi divergence."""
    match event:
        case PoissonGaussian(phases=phases):
            return dpa.ComposedDpEvent(
                [
                    dpa.SelfComposedDpEvent(
                        dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(sigma)), steps
                    )
                    for rate, sigma, steps in phases
                ]
            )
        case FixedSizeGaussian(slots=slots, phases=phases):
            # The library's bound is written for sensitivity 1, so σ is halved: replacing a unit
            # moves a clipped sum by up to 2 C.
            return dpa.ComposedDpEvent(
                [
                    dpa.SelfComposedDpEvent(
                        dpa.SampledWithoutReplacementDpEvent(
                            slots, int(batch), dpa.GaussianDpEvent(sigma / 2)
                        ),
                        steps,
                    )
                    for batch, sigma, steps in phases
                ]
            )
        case Gaussian(noise_multiplier=sigma, count=times):
            return dpa.GaussianDpEvent(sigma / math.sqrt(times))
        case ShuffledGaussian(noise_multiplier=sigma, participations=times):
            return dpa.GaussianDpEvent(sigma / math.sqrt(times))
        case _:
            return None


def epsilon_rdp(event: MechanismEvent, delta: float) -> float | None:
    """Return ε from Rényi DP by the conversion of Canonne, Kamath and Steinke 2020 (Prop. 12).

    None where no Rényi bound of the mechanism is known (histograms, truncated samples, guarantees
    restated for replace-one).
    """
    curve = rdp_curve(event)
    if curve is None:
        return None
    epsilon, order = rdp_library.compute_epsilon(ORDERS, curve, delta)
    if 0 < order <= LOW_ORDERS[-1] and epsilon > 0:
        low = rdp_curve(event, LOW_ORDERS)
        epsilon = min(epsilon, rdp_library.compute_epsilon(LOW_ORDERS, low, delta)[0])
    return float(epsilon)


def epsilon_paper_conversion(event: MechanismEvent, delta: float) -> float:
    """Return ε by the conversion in use before 2020: min over α of RDP(α) + ln(1/δ)/(α − 1).

    Mironov 2017 (arXiv:1702.07476), Proposition 3. Valid but loose; paper mode shows it.
    """
    curve = rdp_curve(event, PAPER_ORDERS)
    if curve is None:
        return math.inf
    orders = np.asarray(PAPER_ORDERS)
    return float(np.min(curve + math.log(1 / delta) / (orders - 1)))
