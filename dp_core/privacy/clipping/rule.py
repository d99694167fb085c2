"""What a layer rule owes the engine: norms by unit, and the clipped sum.

U units, T tokens of a unit: the rows of a unit are one long sequence, so that a unit has one
gradient, one norm and one clip factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dp_core.bert.layers import Tensor


@dataclass(frozen=True)
class UnitGradients:
    """The gradients of one layer's parameters, one per unit, in whatever form is cheapest.

    Attributes:
        squared_norms: (U,) float32, an upper bound on each unit's squared gradient norm; not
            finite where the gradient is not.
        parts: tensors of leading size U that together hold the gradients.
        combine: (factors (U,), parts) -> for each parameter, Σᵤ factorᵤ · gradientᵤ. Linear in
            the factors; it gets the parts anew because units that are not finite are zeroed.
    """

    squared_norms: Tensor
    parts: tuple[Tensor, ...]
    combine: Callable[[Tensor, tuple[Tensor, ...]], dict[str, Tensor]]


class Tap(Protocol):
    """What one layer noted down in the forward pass.

    Law: for any (factors), `gradients(g).combine(factors, parts)` equals Σᵤ factorᵤ · ∂Lᵤ/∂θ, and
    `squared_norms` is at least Σ_θ ‖∂Lᵤ/∂θ‖², equal up to rounding. tests/dp_core/privacy/clipping
    holds every rule to it by brute force.
    """

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that this rule covers."""

    @property
    def output(self) -> Tensor:
        """The layer's output y, before anything else used it."""

    def gradients(self, g: Tensor) -> UnitGradients:
        """Turn ∂L/∂y into the units' gradients."""
