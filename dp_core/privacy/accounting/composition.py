"""Group privacy, and ε without privacy amplification by sampling."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from dp_core.errors import BadInput
from dp_core.privacy.accounting.profiles import gaussian_epsilon

if TYPE_CHECKING:
    from dp_core.privacy.mechanisms import MechanismEvent


class GroupGuarantee(NamedTuple):
    """(ε, δ) for data sets that differ by up to `size` units."""

    size: int
    epsilon: float
    delta: float


def group_privacy(epsilon: float, delta: float, size: int) -> GroupGuarantee:
    """Return the guarantee for `size` = k units: (kε, δ(e^{kε} − 1)/(e^ε − 1)).

    Dwork and Roth 2014, Theorem 2.2 with the δ of the k-fold triangle inequality. Both
    parameters grow with the size of the group.
    """
    if size < 1:
        raise BadInput(f"a group of {size}", where="size")
    if epsilon == 0:
        return GroupGuarantee(size, 0.0, min(1.0, size * delta))
    if size * epsilon > 700:
        return GroupGuarantee(size, size * epsilon, 1.0)
    factor = math.expm1(size * epsilon) / math.expm1(epsilon)
    return GroupGuarantee(size, size * epsilon, min(1.0, delta * factor))


def epsilon_unamplified(event: MechanismEvent, delta: float, sensitivity: float = 1.0) -> float:
    """Return the zero-out ε that the same training has if its batches come from shuffled epochs.

    An epoch at rate q has ⌊1/q⌋ whole batches, as the trainer deals them, so s updates take each
    unit at most ⌈s/⌊1/q⌋⌉ times: that many Gaussian mechanisms, adaptively composed, are one with
    μ = √times/σ (Dong, Roth and Su 2022, Corollary 3.3). ∞ where an event has no such reading (a
    histogram, no guarantee).

    Args:
        event: the training. delta: δ at which ε is stated.
        sensitivity: by how much a unit moves a sum, in clip norms: 2 for replace-one.
    """
    mu = event.unamplified_mu(sensitivity)
    return gaussian_epsilon(delta, mu) if math.isfinite(mu) else math.inf
