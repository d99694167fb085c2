"""Rule for logits by the word table, and the cross term with the lookup in the same table.

The table E is read twice: e = E[ids] below and logits = h·Eᵀ + b on top. Its gradient is the SUM
of both parts, so its squared norm has a cross term: for a unit, with token gradients g (T, D) and
logit gradients l (K, V), it is 2·Σₜₖ (g_t · h_k) · l_k[id_t].
"""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from dp_core.bert.layers import Tensor
from dp_core.privacy.clipping.embedding import EmbeddingTap
from dp_core.privacy.clipping.gram import gram_squared_norms, rounding_factor
from dp_core.privacy.clipping.linear import weighted_sum_over_tokens
from dp_core.privacy.clipping.rule import Part, UnitGradients, whole


@dataclass(frozen=True)
class TiedProjectionTap:
    """The output projection's input and its logits, with N = U·K predictions."""

    table: str
    bias: str | None
    units: int
    x: Tensor  # (N, D)
    output: Tensor  # (N, V)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Table and bias; causal models have no bias."""
        return (self.table,) if self.bias is None else (self.table, self.bias)

    def gradients(self, g: Tensor) -> UnitGradients:
        """(N, V) -> the units' gradients: few predictions, a wide table, so always by Gram."""
        x = tf.reshape(self.x, (self.units, -1, self.x.shape[1]))  # (U, K, D)
        g = tf.reshape(g, (self.units, -1, g.shape[1]))  # (U, K, V)

        def combine(factors: Tensor, parts: tuple[Part, ...]) -> dict[str, Tensor]:
            x, g = (part.values for part in parts)
            weighted = tf.reshape(x * factors[:, None, None], (-1, x.shape[2]))  # (N, D)
            flat = tf.reshape(g, (-1, g.shape[2]))  # (N, V)
            sums = {self.table: tf.matmul(flat, weighted, transpose_a=True)}
            if self.bias is not None:
                sums[self.bias] = weighted_sum_over_tokens(factors, g)
            return sums

        norms = gram_squared_norms(x, g, bias=self.bias is not None)
        return UnitGradients(norms, whole(x, g), combine)


def cross_term(
    lookup: EmbeddingTap, lookup_g: Tensor, projection: TiedProjectionTap, projection_g: Tensor
) -> Tensor:
    """Return what the squared norm of the table's gradient has beyond the two parts': (U,).

    Bounded from above as Gram norms are, since it can cancel them: each product of vectors is off
    by at most γ_D times their lengths, and terms are added over T, then over K (Higham 2002, 3.5).

    Args:
        lookup: the embedding's tap.
        lookup_g: (M, S, D), its output's gradient.
        projection: the projection's tap.
        projection_g: (N, V), its logits' gradient.
    """
    units = lookup.units
    h = tf.reshape(projection.x, (units, -1, projection.x.shape[1]))  # (U, K, D)
    logit_g = tf.reshape(projection_g, (units, -1, projection_g.shape[1]))  # (U, K, V)
    g = tf.reshape(lookup_g, (units, -1, lookup_g.shape[-1]))  # (U, T, D)
    k = h.shape[1]
    ids = lookup.unit_ids()  # (U, T)
    ids = tf.repeat(ids[:, None, :], k, axis=1)  # (U, K, T)
    at_words = tf.gather(logit_g, ids, batch_dims=2)  # (U, K, T)
    alignment = tf.matmul(h, g, transpose_b=True)  # (U, K, T)
    lengths = tf.norm(h, axis=2)[:, :, None] * tf.norm(g, axis=2)[:, None, :]  # (U, K, T)
    computed = tf.reduce_sum(tf.reduce_sum(alignment * at_words, axis=2), axis=1)
    scale = tf.reduce_sum(lengths * tf.abs(at_words), axis=(1, 2))
    return 2.0 * (computed + rounding_factor(h.shape[2], 0, max(k, g.shape[1])) * scale)
