"""Rule for y = x̂·gain + b over standardised x̂: the gradients are Σₜ x̂∘g and Σₜ g."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from dp_core.bert.layers import Tensor
from dp_core.privacy.clipping.linear import squared_norms, sum_over_tokens, weighted_sum
from dp_core.privacy.clipping.rule import Part, UnitGradients, whole


@dataclass(frozen=True)
class LayerNormTap:
    """One LayerNorm's standardised input and its output, with N = U·T."""

    name: str
    units: int
    standardised: Tensor  # (N, D)
    output: Tensor  # (N, D)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Gain and bias."""
        return (f"{self.name}/gain", f"{self.name}/bias")

    def gradients(self, g: Tensor) -> UnitGradients:
        """(N, D) -> the units' gradients, explicitly: they are small."""
        shape = (self.units, -1, g.shape[1])
        gains = sum_over_tokens(tf.reshape(g * self.standardised, shape))  # (U, D)
        biases = sum_over_tokens(tf.reshape(g, shape))  # (U, D)

        def combine(factors: Tensor, parts: tuple[Part, ...]) -> dict[str, Tensor]:
            return {
                name: weighted_sum(factors, part.values)
                for name, part in zip(self.parameters, parts, strict=True)
            }

        norms = squared_norms(gains) + squared_norms(biases)
        return UnitGradients(norms, whole(gains, biases), combine)
