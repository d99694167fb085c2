"""The lattice of training noise: its spacing, and the noise that rounding to it costs.

`noise_addition` has the argument, and docs/proofs.md the proof ("Noise on a lattice").
"""

import math

from dp_core.errors import PlanError
from dp_core.privacy.matrix_factorization import INDEPENDENT, ToeplitzStrategy

DEVIATION = 1 << 28  # lattice steps in a standard deviation, S
SMOOTHING = 4.0  # τ of the argument in `noise_addition`, in steps
PAST_BITS = 4  # the recursion of correlated noise uses earlier noise rounded to 2⁴ steps
MOST_VALUES = 10**9  # of a sum, for which every charged plan has a lattice
_ROUNDING = 1.5  # steps by which neighbours' rounded values may differ more than the sums did


def lattice_scale(
    noise_multiplier: float,
    sensitivity: float,
    values: int,
    strategy: ToeplitzStrategy = INDEPENDENT,
) -> float:
    """Return the lattice steps per 1 in the sum at which `DEVIATION` steps are the plan's noise.

    With correlated noise, `DEVIATION` is the deviation of z, and the sensitivity covers all rows of
    the strategy that one clipped sum enters.

    Args:
        noise_multiplier: σ, of the continuous Gaussian that is accounted.
        sensitivity: the most by which neighbouring sums differ, in ℓ₂ norm.
        values: how many values d the sum has, over all parameters.
        strategy: of the plan.

    Raises:
        PlanError: rounding d values to the lattice would take half of the noise or more.
    """
    real = math.sqrt(DEVIATION**2 - SMOOTHING**2)
    root = math.sqrt(values)
    later = (1 + abs(c) * (1 << PAST_BITS) for c in strategy.values[1:])  # rounding of the past
    left = real / noise_multiplier - root * math.hypot(*later)
    scale = (left / strategy.norm - _ROUNDING * root) / sensitivity
    kept = scale * sensitivity * strategy.norm * noise_multiplier / real
    if not (0.5 < kept < math.inf and scale < math.inf):
        raise PlanError(
            f"rounding {values:,} values would take half of the noise or more: noise multiplier "
            f"{noise_multiplier:.4g}, bands {strategy.bands}",
            where="plan.noise_multiplier",
            fix="Lower it or noise_bands; with adaptive clipping, take larger batches.",
        )
    return scale
