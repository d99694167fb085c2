"""Rényi DP accounting: reported next to the claimed ε, and used by the ledger's privacy filter.

A curve holds a mechanism's Rényi divergence bound, in both directions, at each order α > 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import dp_accounting as dpa
import numpy as np
from absl import logging as absl_logging  # type: ignore[import-untyped]
from dp_accounting.rdp import rdp_privacy_accountant as rdp_library
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from dp_core.privacy.mechanisms import MechanismEvent

Floats = NDArray[np.float64]

ORDERS: tuple[float, ...] = (
    *range(2, 64),
    *(64, 72, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768, 1024),
)
# Fractions matter where ε is large; where it is small their series may not converge.
LOW_ORDERS: tuple[float, ...] = tuple(1 + x / 10 for x in range(1, 100))
# The orders of TensorFlow Privacy's compute_dp_sgd_privacy before 2020.
PAPER_ORDERS: tuple[float, ...] = tuple([1 + x / 10 for x in range(1, 100)] + list(range(12, 64)))


# --- curves


def library_curve(
    event: dpa.DpEvent,
    orders: ArrayLike,
    relation: dpa.NeighboringRelation = dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
) -> Floats:
    """Return the curve of an event of dp_accounting, under its neighbouring relation."""
    accountant = rdp_library.RdpAccountant(np.asarray(orders), relation)
    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)  # an order whose series diverges is left out
    try:
        return np.asarray(accountant.compose(event).rdp, dtype=np.float64)
    finally:
        absl_logging.set_verbosity(verbosity)


def negative_binomial_curve(orders: Floats, base: Floats, eta: float, gamma: float) -> Floats:
    """Return the curve of the best of K runs, K truncated negative binomial.

    Papernot and Steinke 2022 (arXiv:2110.03620), Theorem 2: ε + (1+η)·[(1 − 1/λ̂)·ε̂ + ln(1/γ)/λ̂]
    + ln E[K]/(λ − 1), at the best λ̂ among the orders, and λ̂ = 1, where the bracket is ln(1/γ).
    (For η < 0 the same holds: 1 + η > 0.)

    Args:
        orders: λ > 1. base: curve of one run. eta: > −1. gamma: in (0, 1).
    """
    hat = (1 - 1 / orders) * base + math.log(1 / gamma) / orders
    best = min(math.log(1 / gamma), float(np.min(hat)))
    mean = negative_binomial_mean(eta, gamma)
    return np.asarray(base + (1 + eta) * best + math.log(mean) / (orders - 1))


def negative_binomial_mean(eta: float, gamma: float) -> float:
    """Return E[K] of the truncated negative binomial law on 1, 2, … (Definition 1)."""
    if eta == 0:
        return (1 / gamma - 1) / math.log(1 / gamma)
    # η(1 − γ)/(γ(1 − γ^η)), in the form that keeps its digits near η = 0
    return eta * (1 - gamma) / (gamma * -math.expm1(eta * math.log(gamma)))


def poisson_curve(orders: Floats, base: Floats, mean: float) -> Floats:
    """Return the curve of the best of K runs, K Poisson.

    Papernot and Steinke 2022, Theorem 6: ε + μ·δ̂ + ln(μ)/(λ − 1), where one run is (ε̂, δ̂)-DP with
    e^ε̂ ≤ 1 + 1/(λ − 1). We add e^{−μ}, the contribution of K = 0 to the moment. Without it the
    formula fails for small μ (it is below 0 for μ < 1 and ε near 0); with it the proof's integral
    over the other outcomes is unchanged. δ̂ comes from the Rényi bound: δ̂ = min over α of
    e^{(α−1)(ε_α − ε̂)}·(1 − 1/α)^{α−1}/α (Canonne, Kamath and Steinke 2020, Proposition 12).

    Args:
        orders: λ > 1. base: curve of one run. mean: μ.
    """
    epsilons = np.log1p(1 / (orders - 1))  # (orders,)
    a = orders[:, None]
    logs = (a - 1) * (base[:, None] - epsilons[None, :] + np.log1p(-1 / a)) - np.log(a)
    deltas = np.exp(np.minimum(np.min(logs, axis=0), 0.0))
    moments = math.log(mean) + (orders - 1) * (base + mean * deltas)
    return np.asarray(np.logaddexp(moments, -mean) / (orders - 1))


def worst(curves: Sequence[Floats]) -> Floats:
    """Return the largest bound at each order, which bounds a candidate drawn at random."""
    return np.asarray(np.max(np.stack(curves), axis=0))


def pure_dp_rdp(epsilon: float, order: float) -> float:
    """Return the largest Rényi divergence of order α between ε-indistinguishable distributions.

    Attained by randomised response with p = e^ε/(1+e^ε), which every such pair is a
    post-processing of (Kairouz, Oh and Viswanath 2015):
    1/(α−1) · ln(p^α (1−p)^(1−α) + (1−p)^α p^(1−α)).
    """
    if math.isinf(order) or math.isinf(epsilon):
        return epsilon
    log_p, log_not_p = -np.logaddexp(0.0, -epsilon), -np.logaddexp(0.0, epsilon)
    log_sum = np.logaddexp(
        order * log_p + (1 - order) * log_not_p, order * log_not_p + (1 - order) * log_p
    )
    return min(epsilon, max(0.0, float(log_sum) / (order - 1)))


# --- ε


def epsilon_rdp(event: MechanismEvent, delta: float) -> float | None:
    """Return ε from Rényi DP by the conversion of Canonne, Kamath and Steinke 2020 (Prop. 12).

    None where no Rényi bound of the mechanism is known (histograms, truncated samples, guarantees
    converted to replace-one).
    """
    curve = event.rdp(ORDERS)
    if curve is None:
        return None
    epsilon, order = rdp_library.compute_epsilon(ORDERS, curve, delta)
    if 0 < order <= LOW_ORDERS[-1] and epsilon > 0:
        low, _ = rdp_library.compute_epsilon(LOW_ORDERS, event.rdp(LOW_ORDERS), delta)
        epsilon = min(epsilon, low)
    return float(epsilon)


def epsilon_paper_conversion(event: MechanismEvent, delta: float) -> float:
    """Return ε by the conversion in use before 2020: min over α of RDP(α) + ln(1/δ)/(α − 1).

    Mironov 2017 (arXiv:1702.07476), Proposition 3. Valid but loose; paper mode shows it.
    """
    curve = event.rdp(PAPER_ORDERS)
    if curve is None:
        return math.inf
    return float(np.min(curve + math.log(1 / delta) / (np.asarray(PAPER_ORDERS) - 1)))
