"""Reference implementations of the clipped gradient sum, slower than book-keeping.

`naive` computes it by its definition, one unit after the other: automatic differentiation gives
each unit's gradient, so whatever the model does with its parameters is covered. U times slower.
`tensorflow-privacy` is that library's vectorised DP-SGD. Tests and benchmarks compare book-keeping
with both.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import tensorflow as tf

from dp_core.errors import BadInput
from dp_core.nn import Layers, Tensor, Variables
from dp_core.privacy.clipping.book_keeping import (
    CLIP_FACTORS,
    ClipFactors,
    ClippedSum,
    UnitLosses,
    clipped_grad_sum,
    flat_factors,
)
from dp_core.privacy.execution_plan import Clipper
from dp_core.training.objectives import UnitBatch


def naive_clipped_grad_sum(
    unit_losses: UnitLosses,
    parameters: Variables,
    units: int,
    clip_norm: float | Tensor,
    *,
    clip_factors: ClipFactors = flat_factors,
    precision: str = "float32",
    frozen: Variables | None = None,
) -> ClippedSum:
    """As `book_keeping.clipped_grad_sum`: same arguments and guarantee, same sum up to rounding.

    Losses of a `UnitBatch` are computed in a loop of one graph; others U times in full.
    """
    names = list(parameters)

    def clipped(unit: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        gradient, loss = _gradient_of(unit, unit_losses, parameters, precision, frozen)
        squared = tf.add_n([tf.reduce_sum(tf.square(g)) for g in gradient])
        norm = tf.sqrt(squared)
        factor = clip_factors(norm, clip_norm)
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
    unit: Tensor,
    unit_losses: UnitLosses,
    parameters: Variables,
    precision: str,
    frozen: Variables | None,
) -> tuple[list[Tensor], Tensor]:
    values = list(parameters.values())
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(values)
        layers = Layers({**(frozen or {}), **parameters}, precision)
        if isinstance(unit_losses, UnitBatch):
            alone = tuple(array[unit][None] for array in unit_losses.batch)
            loss = replace(unit_losses, batch=alone)(layers)[0]
        else:
            loss = unit_losses(layers)[unit]
    gradients = tape.gradient(loss, values, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    return [tf.convert_to_tensor(g) for g in gradients], loss


_UNBOUNDED = 1e30  # for an infinite clip norm, which the library would multiply by zero noise


def tensorflow_privacy_clipped_grad_sum(
    unit_losses: UnitLosses,
    parameters: Variables,
    units: int,
    clip_norm: float | Tensor,
    *,
    clip_factors: ClipFactors = flat_factors,
    precision: str = "float32",
    frozen: Variables | None = None,
) -> ClippedSum:
    """As `book_keeping.clipped_grad_sum`, same arguments, same result up to rounding.

    The guarantee is the same too. The jacobian multiplies a unit's values by the zeros of other
    units' rows, and 0·NaN is NaN. So a micro-batch with a value that is not finite is clipped by
    the naive engine, which keeps that unit apart if `unit_losses` is a `UnitBatch`.

    Raises:
        BadInput: tensorflow-privacy is not installed, or the style of clipping is not flat.
    """
    if clip_factors is not flat_factors:
        raise BadInput(
            "this engine supports flat clipping only",
            where="engine tensorflow-privacy",
            fix="Choose flat clipping, or the engine book-keeping.",
        )
    clip = tf.minimum(tf.cast(clip_norm, tf.float32), _UNBOUNDED)
    optimizer = _optimizer_class()(
        l2_norm_clip=clip,
        noise_multiplier=0.0,
        num_microbatches=units,
        unconnected_gradients_to_zero=True,
        learning_rate=0.0,
    )
    # The library draws noise, though it is multiplied by zero; where operations must be
    # deterministic, TensorFlow refuses to draw without a seed.
    tf.random.set_seed(0)
    names, recorded = list(parameters), _Recorded()

    def losses() -> Tensor:
        recorded.losses = unit_losses(Layers({**(frozen or {}), **parameters}, precision))
        return recorded.losses

    tape = _RecordingTape(recorded)
    pairs = optimizer._compute_gradients(losses, [parameters[n] for n in names], tape=tape)
    means = [mean for mean, _ in pairs]
    sums = {name: mean * float(units) for name, mean in zip(names, means, strict=True)}
    vectorized = (sums, recorded.norms, recorded.losses)

    def one_by_one() -> tuple[dict[str, Tensor], Tensor, Tensor]:
        slow = naive_clipped_grad_sum(
            unit_losses, parameters, units, clip, precision=precision, frozen=frozen
        )
        return slow.sums, slow.norms, slow.losses

    finite = tf.reduce_all(tf.math.is_finite(recorded.norms))
    return ClippedSum(*tf.cond(finite, lambda: vectorized, one_by_one))


def _optimizer_class() -> Any:
    """Return the optimizer, whose Keras is version 2: since TensorFlow 2.16 the package `tf-keras`.

    The package's `__init__` is not executed, because it imports TensorFlow's estimators, which no
    longer exist.
    """
    spec = importlib.util.find_spec("tensorflow_privacy")
    if spec is None:
        raise BadInput(
            "tensorflow-privacy is not installed",
            where="engine tensorflow-privacy",
            fix="Install it, or use the engine book-keeping.",
        )
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    sys.modules.setdefault("tensorflow_privacy", importlib.util.module_from_spec(spec))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module(
            "tensorflow_privacy.privacy.optimizers.dp_optimizer_keras_vectorized"
        )
    return module.VectorizedDPKerasSGDOptimizer


class _Recorded:
    """Losses and norms, which the optimizer computes and does not return."""

    losses: Tensor
    norms: Tensor


class _RecordingTape(tf.GradientTape):  # type: ignore[misc]
    """Records the units' gradient norms."""

    def __init__(self, recorded: _Recorded) -> None:
        super().__init__(persistent=True, watch_accessed_variables=False)
        self._recorded = recorded

    def jacobian(self, target: Tensor, sources: Sequence[Any], **options: Any) -> list[Tensor]:
        """(U,), variables -> for each variable, the units' gradients (U, ...)."""
        gradients: list[Tensor] = super().jacobian(target, sources, **options)
        flat = [tf.reshape(g, (g.shape[0], -1)) for g in gradients]
        squared = tf.add_n([tf.reduce_sum(tf.square(g), axis=1) for g in flat])  # (U,)
        self._recorded.norms = tf.sqrt(squared)
        return gradients


class ClippingEngine(Protocol):
    """A way to compute the clipped gradient sum, with the guarantee of `clipped_grad_sum`."""

    def __call__(
        self,
        unit_losses: UnitLosses,
        parameters: Variables,
        units: int,
        clip_norm: float | Tensor,
        *,
        clip_factors: ClipFactors = flat_factors,
        precision: str = "float32",
        frozen: Variables | None = None,
    ) -> ClippedSum:
        """Clip each unit's gradient and add them up."""


ENGINES: dict[str, ClippingEngine] = {
    "book-keeping": clipped_grad_sum,
    "tensorflow-privacy": tensorflow_privacy_clipped_grad_sum,
    "naive": naive_clipped_grad_sum,
}


class ReferenceClipper(Clipper):
    """A clipper that computes the clipped sum by the engine of this name."""

    def __init__(self, clip_norm: float, engine: str, style: str = "flat") -> None:
        super().__init__(clip_norm, style)
        self._engine = ENGINES[engine]

    def clipped_grad_sum(
        self,
        unit_losses: UnitLosses,
        parameters: Variables,
        units: int,
        clip_norm: Tensor,
        precision: str = "float32",
        frozen: Variables | None = None,
    ) -> ClippedSum:
        """Return Σᵤ clip(gradientᵤ, C) by the engine."""
        return self._engine(
            unit_losses,
            parameters,
            units,
            clip_norm,
            clip_factors=CLIP_FACTORS[self.style],
            precision=precision,
            frozen=frozen,
        )
