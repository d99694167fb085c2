"""What a layer rule owes the engine: norms by unit, and the clipped sum.

U units, T tokens of a unit: the rows of a unit are one long sequence, so that a unit has one
gradient, one norm and one clip factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dp_core.bert.layers import Tensor


class Part(NamedTuple):
    """A tensor that holds something of consecutive units: (n, ...), from `first_unit` on."""

    first_unit: int
    values: Tensor

    def factors(self, factors: Tensor) -> Tensor:
        """Return those of the factors (U,) that belong to these units: (n,)."""
        return factors[self.first_unit : self.first_unit + self.values.shape[0]]


@dataclass(frozen=True)
class UnitGradients:
    """The gradients of one layer's parameters, one per unit, in whatever form is cheapest.

    Attributes:
        squared_norms: (U,) float32, an upper bound on each unit's squared gradient norm; not
            finite where the gradient is not.
        parts: what together holds the gradients.
        combine: (factors (U,), parts) -> for each parameter, Σᵤ factorᵤ · gradientᵤ. Linear in
            the factors; it gets the parts anew because units that are not finite are zeroed. A
            sum with few rows that are not zero may come as tf.IndexedSlices.
    """

    squared_norms: Tensor
    parts: tuple[Part, ...]
    combine: Callable[[Tensor, tuple[Part, ...]], dict[str, Tensor]]


def whole(*tensors: Tensor) -> tuple[Part, ...]:
    """Return parts that each hold all U units."""
    return tuple(Part(0, tensor) for tensor in tensors)


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
