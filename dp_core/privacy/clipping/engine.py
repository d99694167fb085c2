"""The clipped sum of per-unit gradients by book-keeping (Bu et al. 2023, arXiv:2210.00038).

One forward pass in which every layer leaves a tap, one backward pass to the taps and no further,
norms from the taps, and for each layer the one product that an ordinary backward pass would have
made anyway, now weighted by the clip factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dp_core.bert.layers import Layers, Tensor, Variables
from dp_core.errors import PlanError
from dp_core.privacy.clipping.embedding import EmbeddingTap
from dp_core.privacy.clipping.factors import Factors, flat_factors
from dp_core.privacy.clipping.rule import Part, Tap, UnitGradients
from dp_core.privacy.clipping.taps import TappedLayers
from dp_core.privacy.clipping.tied_projection import TiedProjectionTap, cross_term

_LEAD = 14  # taps, somewhat more than two blocks of BERT: measured (ADR 14)
UnitLosses = Callable[[Layers], Tensor]  # layers -> (U,) one loss per unit


@dataclass(frozen=True)
class ClippedSum:
    """What one micro-batch gives.

    Attributes:
        sums: for each parameter, Σᵤ clip(gradientᵤ, C), float32 of the parameter's shape.
        norms: (U,) an upper bound on each unit's gradient norm, tight up to rounding.
        losses: (U,) the units' losses.
    """

    sums: dict[str, Tensor]
    norms: Tensor
    losses: Tensor


def clipped_sum(
    unit_losses: UnitLosses,
    parameters: Variables,
    units: int,
    clip_norm: float | Tensor,
    *,
    factors_of: Factors = flat_factors,
    precision: str = "float32",
) -> ClippedSum:
    """Clip each unit's gradient to `clip_norm` and add them up.

    Formal guarantee: adding or removing one unit moves `sums` (all parameters as one vector) by at
    most `clip_norm` in the Euclidean norm, in real arithmetic, whatever the unit holds. A unit
    whose gradient is not finite contributes nothing. This needs `unit_losses` to keep units
    apart: loss u must depend on unit u alone.

    Args:
        unit_losses: the forward pass, reading parameters through the layers it is given.
        parameters: every trainable parameter, by name.
        units: U, static.
        clip_norm: C; infinite switches (flat) clipping off. A scalar tensor may change from call
            to call of one graph.
        factors_of: how to clip, from `factors`.
        precision: of products in the model, `float32` or `bfloat16`; norms and sums are float32.

    Raises:
        PlanError: a parameter without a rule, named; it would leak unclipped or train silently not.
    """
    taps, tap_gradients, losses = _forward_backward(unit_losses, parameters, units, precision)
    _check_coverage(taps, parameters)
    gradients = _unit_gradients(taps, tap_gradients)
    squared = tf.add_n([g.squared_norms for g in gradients])
    squared += _cross_terms(taps, tap_gradients, units)
    finite = tf.math.is_finite(squared)  # (U,) false as soon as any value of the unit is not
    norms = tf.sqrt(tf.maximum(squared, 0.0))
    factors = tf.where(finite, factors_of(norms, clip_norm), 0.0)  # (U,)
    summands: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for gradient, parts in zip(gradients, _without(gradients, finite), strict=True):
        for name, value in gradient.combine(factors, parts).items():
            summands[name].append(value)
    sums = {name: _added(values, parameters[name].shape) for name, values in summands.items()}
    return ClippedSum(sums, norms, losses)


def _forward_backward(
    unit_losses: UnitLosses, parameters: Variables, units: int, precision: str
) -> tuple[list[Tap], list[Tensor], Tensor]:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        layers = TappedLayers(parameters, units, tape, precision)
        losses = unit_losses(layers)
        total = tf.reduce_sum(losses)
    outputs = [tap.output for tap in layers.taps]
    zero = tf.UnconnectedGradients.ZERO
    return layers.taps, tape.gradient(total, outputs, unconnected_gradients=zero), losses


def _unit_gradients(taps: list[Tap], gradients: list[Tensor]) -> list[UnitGradients]:
    """Ask each rule, but let it begin only when the backward pass is `_LEAD` taps further.

    That pass, from the last tap to the first, alternates between products, which fill all cores,
    and small operations, which do not. Norms that need not be ready yet are what fills these gaps;
    begun at once, they would run beside the products and leave none for the gaps.
    """
    answers = []
    for i, (tap, gradient) in enumerate(zip(taps, gradients, strict=True)):
        further = [gradients[i - _LEAD]] if i >= _LEAD else []
        with tf.control_dependencies(further):
            answers.append(tap.gradients(gradient))
    return answers


def _added(summands: list[Tensor], shape: Any) -> Tensor:
    """Add up what taps gave for one parameter: rows of a table go into the dense part in place."""
    sparse = [value for value in summands if isinstance(value, tf.IndexedSlices)]
    dense = [value for value in summands if not isinstance(value, tf.IndexedSlices)]
    total = tf.add_n(dense) if dense else tf.zeros(shape)
    for rows in sparse:
        total = tf.tensor_scatter_nd_add(total, rows.indices[:, None], rows.values)
    return total


def _check_coverage(taps: list[Tap], parameters: Variables) -> None:
    covered = [name for tap in taps for name in tap.parameters]
    for name in parameters:
        if name not in covered:
            raise PlanError(
                f"parameter {name!r} has no clipping rule",
                where="clipping",
                fix="Read it through a layer of dp_core/bert/layers.py, or do not train it.",
            )
    for name in set(covered):
        sharing = [tap for tap in taps if name in tap.parameters]
        kinds = sorted(type(tap).__name__ for tap in sharing)
        if len(sharing) > 1 and kinds != ["EmbeddingTap", "TiedProjectionTap"]:
            raise PlanError(
                f"parameter {name!r} is shared by {' and '.join(kinds)}, whose cross term no rule "
                "gives",
                where="clipping",
            )


def _cross_terms(taps: list[Tap], gradients: list[Tensor], units: int) -> Tensor:
    """Return what shared tables add to the squared norms: (U,)."""
    total = tf.zeros((units,))
    for lookup, lookup_g in zip(taps, gradients, strict=True):
        for projection, projection_g in zip(taps, gradients, strict=True):
            if (
                isinstance(lookup, EmbeddingTap)
                and isinstance(projection, TiedProjectionTap)
                and lookup.word == projection.table
            ):
                total += cross_term(lookup, lookup_g, projection, projection_g)
    return total


def _without(gradients: list[UnitGradients], finite: Tensor) -> list[tuple[Part, ...]]:
    """Zero the parts of units that are not finite: a factor of 0 would not, as 0·NaN is NaN.

    Such units are rare, so the pass over all parts is made only if there is one.
    """
    flat = [part for gradient in gradients for part in gradient.parts]

    def zeroed() -> list[Tensor]:
        return [_where(part.factors(finite), part.values) for part in flat]

    def unchanged() -> list[Tensor]:
        return [tf.identity(part.values) for part in flat]

    values = iter(tf.cond(tf.reduce_all(finite), unchanged, zeroed))
    return [tuple(Part(p.first_unit, next(values)) for p in g.parts) for g in gradients]


def _where(keep: Tensor, values: Tensor) -> Tensor:
    """(n,), (n, ...) -> the values of the units that are kept, zeros for the others."""
    return tf.where(tf.reshape(keep, (-1,) + (1,) * (len(values.shape) - 1)), values, 0.0)
