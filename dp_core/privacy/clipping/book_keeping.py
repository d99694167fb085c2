"""Book-keeping: per-unit clipping without per-unit gradients, in one backward pass.

Bu et al. 2023 (arXiv:2210.00038). Each layer records its inputs in the forward pass; with the
gradients of its outputs they give each unit's gradient norm, and, weighed by the units' clip
factors, the clipped sum.

A clip factor multiplies a unit's gradient; both styles keep ‖factor · gradient‖ ≤ C:

* `flat`: min(1, C/‖g‖) (Abadi et al. 2016, arXiv:1607.00133).
* `automatic`: C/(‖g‖ + γ), "AUTO-S" (Bu et al. 2022, arXiv:2206.07136, Algorithm 1), so that C
  only scales the learning rate and need not be tuned. ‖g‖·C/(‖g‖ + γ) < C, so sensitivity and
  accounting are the same as for flat clipping. γ > 0 lets small gradients stay small.

Both fall as the norm grows, so an upper bound in the norm's place keeps the guarantee.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import tensorflow as tf

from dp_core.errors import PlanError
from dp_core.nn import Layers, Tensor, Variables
from dp_core.privacy.clipping.layer_rules import (
    BlockwiseRecord,
    CopiesRecord,
    EmbeddingRecord,
    LayerRecord,
    LinearRecord,
    NormRecord,
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
    """Layers that record the inputs and outputs that the clipping rules need.

    Parameters can be read through a layer only. A layer without trained parameters records
    nothing; the backward pass still goes through it if a layer below is trained.

    Args:
        parameters: the trained parameters.
        units: U.
        tape: watches the recorded outputs, whose gradients the rules need.
        precision: as for `Layers`.
        frozen: parameters that are read and have no gradient.
    """

    def __init__(
        self,
        parameters: Variables,
        units: int,
        tape: tf.GradientTape,
        precision: str = "float32",
        frozen: Variables | None = None,
    ) -> None:
        super().__init__({**(frozen or {}), **parameters}, precision)
        self._units, self._tape, self._trained = units, tape, frozenset(parameters)
        self.records: list[LayerRecord] = []

    def _recorded(self, record: LayerRecord) -> Tensor:
        self._tape.watch(record.output)
        self.records.append(record)
        return record.output

    def _if_trained(self, name: str | None) -> str | None:
        return name if name in self._trained else None

    def dense(self, name: str, x: Tensor) -> Tensor:
        """As in `Layers`; the record keeps x and y."""
        y = super().dense(name, x)
        kernel, bias = (f"{name}/{leaf}" in self._trained for leaf in ("kernel", "bias"))
        if not (kernel or bias):
            return y
        return self._recorded(LinearRecord(name, self._units, x, y, kernel, bias))

    def narrow(self, a: str, x: Tensor) -> Tensor:
        """As in `Layers`; the record keeps x and y."""
        return self._blockwise(a, 1, x, super().narrow(a, x))

    def widen(self, b: str, h: Tensor) -> Tensor:
        """As in `Layers`; the record keeps h and y."""
        return self._blockwise(b, self.blocks_of(b, h), h, super().widen(b, h))

    def _blockwise(self, name: str, blocks: int, x: Tensor, y: Tensor) -> Tensor:
        if name not in self._trained:
            return y
        return self._recorded(BlockwiseRecord(name, self._units, blocks, x, y))

    def for_each_row(self, name: str, rows: Any) -> Tensor:
        """As in `Layers`; the record keeps the copies."""
        y = super().for_each_row(name, rows)
        if name not in self._trained:
            return y
        return self._recorded(CopiesRecord(name, self._units, y))

    def scale_and_shift(self, name: str, x: Tensor) -> Tensor:
        """As in `Layers`; the record keeps x and y."""
        y = super().scale_and_shift(name, x)
        gain, bias = (f"{name}/{leaf}" in self._trained for leaf in ("gain", "bias"))
        if not (gain or bias):
            return y
        return self._recorded(NormRecord(name, self._units, x, y, gain, bias))

    def embed(
        self, ids: Tensor, types: Tensor | None, word: str, position: str | None, kind: str | None
    ) -> Tensor:
        """As in `Layers`; the record keeps the ids and the sum."""
        y = super().embed(ids, types, word, position, kind)
        words, places, kinds = (self._if_trained(name) for name in (word, position, kind))
        rows = {n: self._parameters[n].shape[0] for n in (words, places, kinds) if n is not None}
        if not rows:
            return y
        return self._recorded(
            EmbeddingRecord(words, places, kinds, self._units, ids, types, rows, y)
        )

    def tied_projection(self, x: Tensor, table: str, bias: str | None) -> Tensor:
        """As in `Layers`; the record keeps x and the logits."""
        y = super().tied_projection(x, table, bias)
        trained = self._if_trained(table), self._if_trained(bias)
        if not any(trained):
            return y
        return self._recorded(TiedProjectionRecord(*trained, self._units, x, y))

    @property
    def parameters(self) -> NoReturn:
        """Refuse access: a parameter read without a rule would have an unclipped gradient."""
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
    frozen: Variables | None = None,
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
        frozen: parameters that the model reads and that are not trained. A unit's gradient, norm
            and clip factor cover `parameters` alone.

    Raises:
        PlanError: a parameter has no rule: its gradient would be unclipped or silently missing.
    """
    records, output_gradients, losses = _forward_backward(
        unit_losses, parameters, units, precision, frozen
    )
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


def layer_squared_norms(unit_losses: UnitLosses, parameters: Variables, units: int) -> Tensor:
    """Return each unit's squared gradient norm by layer, in one backward pass for all units.

    Args:
        unit_losses: the forward pass, as `clipped_grad_sum` takes it.
        parameters: every trainable parameter, by name.
        units: U, static.

    Returns:
        (U, layers), up to rounding; a row's sum is the squared norm of the whole gradient. A word
        table that is also the output projection is one layer.

    Raises:
        PlanError: a parameter without a rule, named.
    """
    records, output_gradients, _ = _forward_backward(
        unit_losses, parameters, units, "float32", None
    )
    _check_coverage(records, parameters)
    gradients = _unit_gradients(records, output_gradients)
    by_layer: dict[str, Tensor] = {}
    for record, gradient in zip(records, gradients, strict=True):
        name = _layer_of(record)
        by_layer[name] = by_layer.get(name, 0.0) + gradient.squared_norms
    for record in records:
        if isinstance(record, TiedProjectionRecord):  # there is one
            by_layer[_layer_of(record)] += _cross_terms(records, output_gradients, units)
    return tf.maximum(tf.stack(list(by_layer.values()), axis=1), 0.0)


def _layer_of(record: LayerRecord) -> str:
    """Return the layer's name; records that share a word table, their first parameter, are one."""
    first = record.parameters[0]
    return first.removesuffix("/kernel").removesuffix("/gain").removesuffix("/bias")


def _forward_backward(
    unit_losses: UnitLosses,
    parameters: Variables,
    units: int,
    precision: str,
    frozen: Variables | None,
) -> tuple[list[LayerRecord], list[Tensor], Tensor]:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        layers = RecordingLayers(parameters, units, tape, precision, frozen)
        losses = unit_losses(layers)
        total = tf.reduce_sum(losses)
    outputs = [record.output for record in layers.records]
    zero = tf.UnconnectedGradients.ZERO
    return layers.records, tape.gradient(total, outputs, unconnected_gradients=zero), losses


def _unit_gradients(records: list[LayerRecord], gradients: list[Tensor]) -> list[UnitGradients]:
    """Apply each rule, but only when the backward pass is `_LEAD` records further.

    The backward pass, from the last record to the first, alternates between products, which fill
    all cores, and small operations, which do not. The delayed norms fill these gaps. If they
    started at once, they would compete with the products, and the gaps would stay empty.
    """
    unit_gradients = []
    for i, (record, gradient) in enumerate(zip(records, gradients, strict=True)):
        further = [gradients[i - _LEAD]] if i >= _LEAD else []
        with tf.control_dependencies(further):
            unit_gradients.append(record.gradients(gradient))
    return unit_gradients


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
                fix="Read it through a layer of dp_core/nn.py, or do not train it.",
            )
    for name in set(covered):
        sharing = [record for record in records if name in record.parameters]
        kinds = sorted(type(record).__name__ for record in sharing)
        if len(sharing) > 1 and kinds != ["EmbeddingRecord", "TiedProjectionRecord"]:
            raise PlanError(
                f"parameter {name!r} is shared by {' and '.join(kinds)}, for whose cross term "
                "there is no rule",
                where="clipping",
            )


def _cross_terms(records: list[LayerRecord], gradients: list[Tensor], units: int) -> Tensor:
    """Return the cross terms of shared tables in the squared norms: (U,)."""
    total = tf.zeros((units,))
    for lookup, lookup_g in zip(records, gradients, strict=True):
        for projection, projection_g in zip(records, gradients, strict=True):
            if (
                isinstance(lookup, EmbeddingRecord)
                and isinstance(projection, TiedProjectionRecord)
                and lookup.word is not None
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
