"""The clipped sum by its definition, one unit after the other: the oracle of the fast engine.

It knows no layer rules: automatic differentiation gives each unit's gradient, and whatever the
model does with its parameters is covered. U times slower.
"""

from __future__ import annotations

import tensorflow as tf

from dp_core.bert.layers import Layers, Tensor, Variables
from dp_core.privacy.clipping.engine import ClippedSum, UnitLosses, clip_factors


def naive_clipped_sum(
    unit_losses: UnitLosses, parameters: Variables, units: int, clip_norm: float
) -> ClippedSum:
    """As `engine.clipped_sum`, same arguments, same guarantee, same result up to rounding."""
    names = list(parameters)
    sums = {name: tf.zeros(parameters[name].shape) for name in names}
    norms, losses = [], []
    for u in range(units):
        gradient, loss = _gradient_of(u, unit_losses, parameters)
        squared = tf.add_n([tf.reduce_sum(tf.square(g)) for g in gradient])
        norm = tf.sqrt(squared)
        factor = clip_factors(norm, clip_norm)
        sound = tf.math.is_finite(squared)
        for name, g in zip(names, gradient, strict=True):
            sums[name] += tf.where(sound, factor * g, 0.0)
        norms.append(norm)
        losses.append(loss)
    return ClippedSum(sums, tf.stack(norms), tf.stack(losses))


def _gradient_of(
    unit: int, unit_losses: UnitLosses, parameters: Variables
) -> tuple[list[Tensor], Tensor]:
    values = list(parameters.values())
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(values)
        loss = unit_losses(Layers(parameters))[unit]
    gradients = tape.gradient(loss, values, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return [tf.convert_to_tensor(g) for g in gradients], loss
