"""By what a unit's gradient is multiplied: each rule keeps ‖factor · gradient‖ ≤ C.

* `flat`: min(1, C/‖g‖) (Abadi et al. 2016, arXiv:1607.00133).
* `automatic`: C/(‖g‖ + γ), "AUTO-S" (Bu et al. 2022, arXiv:2206.07136, Algorithm 1), so that C
  only scales the learning rate and need not be tuned. ‖g‖·C/(‖g‖ + γ) < C, so the sensitivity, and
  with it the accounting, is that of flat clipping. γ > 0 lets small gradients stay small.

Both fall as the norm grows, so an upper bound in the norm's place keeps the guarantee.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from dp_core.bert.layers import Tensor
from dp_core.errors import BadInput

Factors = Callable[[Tensor, Tensor], Tensor]  # norms (U,), clip norm -> (U,)
STYLES = ("flat", "automatic")
STABILITY = 0.01  # γ of the paper
_TINY = 1e-30


def flat_factors(norms: Tensor, clip_norm: Tensor) -> Tensor:
    """min(1, C/norm): (U,) -> (U,)."""
    return tf.minimum(1.0, clip_norm / tf.maximum(norms, _TINY))


def automatic_factors(norms: Tensor, clip_norm: Tensor) -> Tensor:
    """C/(norm + γ): (U,) -> (U,). C must be finite."""
    return clip_norm / (norms + STABILITY)


def factors_named(style: str) -> Factors:
    """Return the rule `flat` or `automatic`.

    Raises:
        BadInput: no such rule.
    """
    if style not in STYLES:
        raise BadInput(
            f"{style!r} is no way to clip", where="clipping", fix=f"Use {' or '.join(STYLES)}."
        )
    return flat_factors if style == "flat" else automatic_factors
