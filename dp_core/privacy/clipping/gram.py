"""The norm of xᵀg without xᵀg: ‖xᵀg‖² = Σ (xxᵀ ∘ ggᵀ), with a bound on what rounding may hide.

Nearly equal tokens make the sum cancel: in float32 the computed norm can fall below the true one
by several percent, and the clip would let through more than it promises. So a proven bound on the
rounding error is added before the root.
"""

from __future__ import annotations

import tensorflow as tf

from dp_core.bert.layers import Tensor

_UNIT_ROUNDOFF = 2.0**-24  # float32, round to nearest


def gram_squared_norms(x: Tensor, g: Tensor, *, bias: bool = False) -> Tensor:
    """Bound ‖xᵤᵀgᵤ‖² from above, tightly: (U, T, in), (U, T, out) -> (U,).

    With `bias`, ‖xᵤᵀgᵤ‖² + ‖Σ_t gᵤₜ‖²: a bias is a weight whose input is always 1, so that every
    entry of xxᵀ is one more, and in + 1 stands for `in` below.

    With γ_n = n·u/(1−n·u), every entry of xxᵀ is off by at most γ_in·|x_s||x_t| and of ggᵀ by
    γ_out·|g_s||g_t|, in whatever order the terms are added (Higham 2002, 3.5, and Cauchy-Schwarz);
    one more rounding for their product, and γ_2T for adding first along one axis, then along the
    other. Together at most γ_(in+out+2T+1) · (Σ_t |x_t||g_t|)². The lengths are the roots of the
    diagonals, themselves off by a factor within 1 ± γ_(in+out); twice the bound covers that and
    the rounding of the bound itself.
    """
    t, d_in, d_out = x.shape[1], x.shape[2] + int(bias), g.shape[2]
    x_gram = tf.matmul(x, x, transpose_b=True)  # (U, T, T)
    if bias:
        x_gram += 1.0
    g_gram = tf.matmul(g, g, transpose_b=True)  # (U, T, T)
    computed = tf.reduce_sum(tf.reduce_sum(x_gram * g_gram, axis=2), axis=1)  # (U,)
    lengths = tf.sqrt(tf.linalg.diag_part(x_gram) * tf.linalg.diag_part(g_gram))  # (U, T)
    scale = tf.square(tf.reduce_sum(lengths, axis=1))
    return tf.maximum(computed, 0.0) + rounding_factor(d_in, d_out, t) * scale


def rounding_factor(d_in: int, d_out: int, tokens: int) -> float:
    """Twice γ_n of the docstring above."""
    n = 2 * (d_in + d_out + 2 * tokens + 1)
    return n * _UNIT_ROUNDOFF / (1 - n * _UNIT_ROUNDOFF)
