"""By what a unit's gradient is multiplied: each rule keeps ‖factor · gradient‖ ≤ C.

* `flat`: min(1, C/‖g‖) (Abadi et al. 2016, arXiv:1607.00133).
* `automatic`: C/(‖g‖ + γ), "AUTO-S" (Bu et al. 2022, arXiv:2206.07136, Algorithm 1), so that C
  only scales the learning rate and need not be tuned. ‖g‖·C/(‖g‖ + γ) < C, so the sensitivity, and
  with it the accounting, is that of flat clipping. γ > 0 lets small gradients stay small.

Both fall as the norm grows, so an upper bound in the norm's place keeps the guarantee.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import tensorflow as tf

from dp_core.errors import BadInput, PlanError
from dp_core.nn.layers import Layers, Tensor, Variables, embedding_sum, standardise
from dp_core.privacy.clipping.layer_rules import (
    EmbeddingTap,
    LayerNormTap,
    LinearTap,
    Part,
    Tap,
    TiedProjectionTap,
    UnitGradients,
    cross_term,
)

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


class TappedLayers(Layers):
    """The same layers, each leaving a tap. Parameters can be read through a layer rule only."""

    def __init__(
        self,
        parameters: Variables,
        units: int,
        tape: tf.GradientTape,
        precision: str = "float32",
    ) -> None:
        super().__init__(parameters, precision)
        self._units, self._tape = units, tape
        self.taps: list[Tap] = []

    def _note(self, output: Tensor, tap: Tap) -> Tensor:
        self.taps.append(tap)
        return output

    def linear(self, name: str, x: Tensor) -> Tensor:
        """As in `Layers`; the tap keeps x and y."""
        y = self._watched(super().linear(name, x))
        return self._note(y, LinearTap(name, self._units, x, y))

    def layer_norm(self, name: str, x: Tensor, epsilon: float) -> Tensor:
        """As in `Layers`; the tap keeps the standardised x and y."""
        centred = standardise(x, epsilon)
        y = centred * self._parameters[f"{name}/gain"] + self._parameters[f"{name}/bias"]
        return self._note(y, LayerNormTap(name, self._units, centred, self._watched(y)))

    def embed(
        self, ids: Tensor, types: Tensor | None, word: str, position: str, kind: str | None
    ) -> Tensor:
        """As in `Layers`; the tap keeps the ids and the sum."""
        y = self._watched(embedding_sum(self._parameters, ids, types, word, position, kind))
        rows = {name: self._parameters[name].shape[0] for name in (word, position, kind) if name}
        tap = EmbeddingTap(word, position, kind, self._units, ids, types, rows, y)
        return self._note(y, tap)

    def tied_projection(self, x: Tensor, table: str, bias: str | None) -> Tensor:
        """As in `Layers`; the tap keeps x and the logits."""
        y = self._watched(super().tied_projection(x, table, bias))
        return self._note(y, TiedProjectionTap(table, bias, self._units, x, y))

    def _watched(self, y: Tensor) -> Tensor:
        self._tape.watch(y)
        return y

    @property
    def parameters(self) -> NoReturn:
        """Refuse: a parameter read past the rules would have a gradient that nobody clips."""
        raise AttributeError("parameters can be read through a layer rule only")


_LEAD = 14  # taps, somewhat more than two blocks of BERT: measured
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


def clipped_grad_sum(
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
                fix="Read it through a layer of dp_core/nn/layers.py, or do not train it.",
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
