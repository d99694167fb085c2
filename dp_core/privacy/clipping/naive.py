"""The clipped sum by its definition, one unit after the other: the oracle of the fast engine.

It knows no layer rules: automatic differentiation gives each unit's gradient, and whatever the
model does with its parameters is covered. U times slower.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import tensorflow as tf

from dp_core.bert.layers import Layers, Tensor, Variables
from dp_core.privacy.clipping.engine import ClippedSum, UnitLosses
from dp_core.privacy.clipping.factors import Factors, flat_factors


@runtime_checkable
class Separable(Protocol):
    """Losses that can be had for one unit alone, without computing the others'."""

    def __call__(self, layers: Layers) -> Tensor:
        """Layers -> (U,)."""

    def of_unit(self, unit: Tensor) -> UnitLosses:
        """Scalar index, a tensor -> the losses (1,) of that unit alone."""


def naive_clipped_sum(
    unit_losses: UnitLosses,
    parameters: Variables,
    units: int,
    clip_norm: float | Tensor,
    *,
    factors_of: Factors = flat_factors,
    precision: str = "float32",
) -> ClippedSum:
    """As `engine.clipped_sum`, same arguments, same guarantee, same result up to rounding.

    Losses that are `Separable` are computed in a loop of one graph; others U times in full.
    """
    names = list(parameters)

    def clipped(unit: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        gradient, loss = _gradient_of(unit, unit_losses, parameters, precision)
        squared = tf.add_n([tf.reduce_sum(tf.square(g)) for g in gradient])
        norm = tf.sqrt(squared)
        factor = factors_of(norm, clip_norm)
        sound = tf.math.is_finite(squared)
        return [tf.where(sound, factor * g, 0.0) for g in gradient], norm, loss

    def step(
        unit: Tensor, sums: list[Tensor], norms: Tensor, losses: Tensor
    ) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
        gradient, norm, loss = clipped(unit)
        here = tf.one_hot(unit, units)  # (U,)
        return (
            unit + 1,
            [s + g for s, g in zip(sums, gradient, strict=True)],
            tf.where(here > 0, norm, norms),
            tf.where(here > 0, loss, losses),
        )

    start = (
        tf.constant(0),
        [tf.zeros(parameters[name].shape) for name in names],
        tf.zeros((units,)),
        tf.zeros((units,)),
    )
    _, sums, norms, losses = tf.while_loop(
        lambda unit, *_: unit < units, step, start, parallel_iterations=1
    )
    return ClippedSum(dict(zip(names, sums, strict=True)), norms, losses)


def _gradient_of(
    unit: Tensor, unit_losses: UnitLosses, parameters: Variables, precision: str
) -> tuple[list[Tensor], Tensor]:
    values = list(parameters.values())
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(values)
        layers = Layers(parameters, precision)
        if isinstance(unit_losses, Separable):
            loss = unit_losses.of_unit(unit)(layers)[0]
        else:
            loss = unit_losses(layers)[unit]
    gradients = tape.gradient(loss, values, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return [tf.convert_to_tensor(g) for g in gradients], loss
