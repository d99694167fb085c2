"""Rényi DP accounting: reported next to the claimed ε, and used by the ledger's privacy filter.

A curve holds a mechanism's Rényi divergence bound, in both directions, at each order α > 1.
"""

from __future__ import annotations

import math
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
