"""The number formats in which a model's products can be computed, by name."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dp_core.errors import BadInput

PRECISIONS = ("float32", "bfloat16")


def compute_type(precision: str) -> Any:
    """Return the tf.DType of the factors of matrix products; all else is float32 in any case.

    Weights, sums over a vector (LayerNorm, softmax, losses), gradients, norms and noise stay
    float32 (Micikevicius et al. 2018, arXiv:1710.03740; Kalamkar et al. 2019, arXiv:1905.12322).

    Raises:
        BadInput: no such precision.
    """
    if precision not in PRECISIONS:
        raise BadInput(
            f"{precision!r} is no precision",
            where="precision",
            fix=f"Use {' or '.join(PRECISIONS)}.",
        )
    return tf.bfloat16 if precision == "bfloat16" else tf.float32
