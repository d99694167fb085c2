"""The Rényi divergence of choosing the best of a secret, random number of trainings.

Papernot and Steinke 2022 (arXiv:2110.03620). Q is one training of a candidate drawn at random; A
runs it K times and keeps the best. What A gives away depends on K's law; a *fixed* K, or one that
somebody sees, is not covered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
