"""Book-keeping: per-unit clipping without per-unit gradients, in one backward pass.

Bu et al. 2023 (arXiv:2210.00038). Each layer records its inputs in the forward pass; with the
gradients of its outputs they give each unit's gradient norm, and, weighed by the units' clip
factors, the clipped sum.

A clip factor multiplies a unit's gradient; both styles keep ‖factor · gradient‖ ≤ C:

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

from dp_core.errors import PlanError
from dp_core.nn.layers import Layers, Tensor, Variables, embedding_sum, standardise
from dp_core.privacy.clipping.layer_rules import (
    EmbeddingRecord,
    LayerNormRecord,
    LayerRecord,
    LinearRecord,
    Part,
    TiedProjectionRecord,
    UnitGradients,
    cross_term,
)

ClipFactors = Callable[[Tensor, Tensor], Tensor]  # norms (U,), clip norm -> (U,)
STABILITY = 0.01  # γ of the paper
_TINY = 1e-30


def flat_factors(norms: Tensor, clip_norm: Tensor) -> Tensor:
    """min(1, C/norm): (U,) -> (U,)."""
    return tf.minimum(1.0, clip_norm / tf.maximum(norms, _TINY))


def automatic_factors(norms: Tensor, clip_norm: Tensor) -> Tensor:
    """C/(norm + γ): (U,) -> (U,). C must be finite."""
    return clip_norm / (norms + STABILITY)


CLIP_FACTORS: dict[str, ClipFactors] = {"flat": flat_factors, "automatic": automatic_factors}


class RecordingLayers(Layers):
    """Layers that record what the clipping rules need. Parameters are read through a rule only."""

    def __init__(
        self,
        parameters: Variables,
        units: int,
        tape: tf.GradientTape,
        precision: str = "float32",
    ) -> None:
        super().__init__(parameters, precision)
        self._units, self._tape = units, tape
        self.records: list[LayerRecord] = []

    def _recorded(self, output: Tensor, record: LayerRecord) -> Tensor:
        self.records.append(record)
        return output

    def linear(self, name: str, x: Tensor) -> Tensor:
        """As in `Layers`; the record keeps x and y."""
        y = self._watched(super().linear(name, x))
        return self._recorded(y, LinearRecord(name, self._units, x, y))

    def layer_norm(self, name: str, x: Tensor, epsilon: float) -> Tensor:
        """As in `Layers`; the record keeps the standardised x and y."""
        centred = standardise(x, epsilon)
        y = centred * self._parameters[f"{name}/gain"] + self._parameters[f"{name}/bias"]
        return self._recorded(y, LayerNormRecord(name, self._units, centred, self._watched(y)))

    def embed(
        self, ids: Tensor, types: Tensor | None, word: str, position: str, kind: str | None
    ) -> Tensor:
        """As in `Layers`; the record keeps the ids and the sum."""
        y = self._watched(embedding_sum(self._parameters, ids, types, word, position, kind))
        rows = {name: self._parameters[name].shape[0] for name in (word, position, kind) if name}
        record = EmbeddingRecord(word, position, kind, self._units, ids, types, rows, y)
        return self._recorded(y, record)

    def tied_projection(self, x: Tensor, table: str, bias: str | None) -> Tensor:
        """As in `Layers`; the record keeps x and the logits."""
        y = self._watched(super().tied_projection(x, table, bias))
        return self._recorded(y, TiedProjectionRecord(table, bias, self._units, x, y))

    def _watched(self, y: Tensor) -> Tensor:
        self._tape.watch(y)
        return y

    @property
    def parameters(self) -> NoReturn:
        """Refuse: a parameter read past the rules would have a gradient that nobody clips."""
        raise AttributeError("parameters can be read through a layer rule only")


_LEAD = 14  # records, somewhat more than two blocks of BERT: measured
UnitLosses = Callable[[Layers], Tensor]  # layers -> (U,) one loss per unit


@dataclass(frozen=True)
class ClippedSum:
    """Clipped gradient sum of one micro-batch.

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
    clip_factors: ClipFactors = flat_factors,
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
        clip_factors: style of clipping.
        precision: of products in the model, `float32` or `bfloat16`; norms and sums are float32.

    Raises:
        PlanError: a parameter without a rule, named; it would leak unclipped or train silently not.
    """
    records, output_gradients, losses = _forward_backward(unit_losses, parameters, units, precision)
    _check_coverage(records, parameters)
    gradients = _unit_gradients(records, output_gradients)
    squared = tf.add_n([g.squared_norms for g in gradients])
    squared += _cross_terms(records, output_gradients, units)
    finite = tf.math.is_finite(squared)  # (U,) false as soon as any value of the unit is not
    norms = tf.sqrt(tf.maximum(squared, 0.0))
    factors = tf.where(finite, clip_factors(norms, clip_norm), 0.0)  # (U,)
    summands: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for gradient, parts in zip(gradients, _parts_without_nonfinite(gradients, finite), strict=True):
        for name, value in gradient.combine(factors, parts).items():
            summands[name].append(value)
    sums = {
        name: _parameter_sum(values, parameters[name].shape) for name, values in summands.items()
    }
    return ClippedSum(sums, norms, losses)


def _forward_backward(
    unit_losses: UnitLosses, parameters: Variables, units: int, precision: str
) -> tuple[list[LayerRecord], list[Tensor], Tensor]:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        layers = RecordingLayers(parameters, units, tape, precision)
        losses = unit_losses(layers)
        total = tf.reduce_sum(losses)
    outputs = [record.output for record in layers.records]
    zero = tf.UnconnectedGradients.ZERO
    return layers.records, tape.gradient(total, outputs, unconnected_gradients=zero), losses


def _unit_gradients(records: list[LayerRecord], gradients: list[Tensor]) -> list[UnitGradients]:
    """Apply each rule, but only when the backward pass is `_LEAD` records further.

    That pass, from the last record to the first, alternates between products, which fill all cores,
    and small operations, which do not. Norms that need not be ready yet are what fills these gaps;
    begun at once, they would run beside the products and leave none for the gaps.
    """
    answers = []
    for i, (record, gradient) in enumerate(zip(records, gradients, strict=True)):
        further = [gradients[i - _LEAD]] if i >= _LEAD else []
        with tf.control_dependencies(further):
            answers.append(record.gradients(gradient))
    return answers


def _parameter_sum(summands: list[Tensor], shape: Any) -> Tensor:
    """Sum one parameter's contributions: rows of a table go into the dense part in place."""
    sparse = [value for value in summands if isinstance(value, tf.IndexedSlices)]
    dense = [value for value in summands if not isinstance(value, tf.IndexedSlices)]
    total = tf.add_n(dense) if dense else tf.zeros(shape)
    for rows in sparse:
        total = tf.tensor_scatter_nd_add(total, rows.indices[:, None], rows.values)
    return total


def _check_coverage(records: list[LayerRecord], parameters: Variables) -> None:
    covered = [name for record in records for name in record.parameters]
    for name in parameters:
        if name not in covered:
            raise PlanError(
                f"parameter {name!r} has no clipping rule",
                where="clipping",
                fix="Read it through a layer of dp_core/nn/layers.py, or do not train it.",
            )
    for name in set(covered):
        sharing = [record for record in records if name in record.parameters]
        kinds = sorted(type(record).__name__ for record in sharing)
        if len(sharing) > 1 and kinds != ["EmbeddingRecord", "TiedProjectionRecord"]:
            raise PlanError(
                f"parameter {name!r} is shared by {' and '.join(kinds)}, whose cross term no rule "
                "gives",
                where="clipping",
            )


def _cross_terms(records: list[LayerRecord], gradients: list[Tensor], units: int) -> Tensor:
    """Return what shared tables add to the squared norms: (U,)."""
    total = tf.zeros((units,))
    for lookup, lookup_g in zip(records, gradients, strict=True):
        for projection, projection_g in zip(records, gradients, strict=True):
            if (
                isinstance(lookup, EmbeddingRecord)
                and isinstance(projection, TiedProjectionRecord)
                and lookup.word == projection.table
            ):
                total += cross_term(lookup, lookup_g, projection, projection_g)
    return total


def _parts_without_nonfinite(
    gradients: list[UnitGradients], finite: Tensor
) -> list[tuple[Part, ...]]:
    """Zero the parts of units that are not finite: a factor of 0 would not, as 0·NaN is NaN.

    Such units are rare, so the pass over all parts is made only if there is one.
    """
    flat = [part for gradient in gradients for part in gradient.parts]

    def zeroed() -> list[Tensor]:
        return [_zero_unless(part.factors(finite), part.values) for part in flat]

    def unchanged() -> list[Tensor]:
        return [tf.identity(part.values) for part in flat]

    values = iter(tf.cond(tf.reduce_all(finite), unchanged, zeroed))
    return [tuple(Part(p.first_unit, next(values)) for p in g.parts) for g in gradients]


def _zero_unless(keep: Tensor, values: Tensor) -> Tensor:
    """(n,), (n, ...) -> the values of the units that are kept, zeros for the others."""
    return tf.where(tf.reshape(keep, (-1,) + (1,) * (len(values.shape) - 1)), values, 0.0)
