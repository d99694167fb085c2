"""The clipped sum by tensorflow-privacy's own vectorized optimizer: the paper's road.

Its `VectorizedDPKerasSGDOptimizer` differentiates all losses at once (a jacobian, so memory grows
with units times parameters), clips each unit's gradient and adds them up. Its noise is switched
off: Confide adds its own, once per update.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from dp_core.bert.layers import Layers, Tensor, Variables
from dp_core.errors import BadInput
from dp_core.privacy.clipping.engine import ClippedSum, UnitLosses
from dp_core.privacy.clipping.factors import Factors, flat_factors
from dp_core.privacy.clipping.naive import naive_clipped_sum

_UNBOUNDED = 1e30  # stands for an infinite clip norm, which the toolbox multiplies by zero noise


def toolbox_clipped_sum(
    unit_losses: UnitLosses,
    parameters: Variables,
    units: int,
    clip_norm: float | Tensor,
    *,
    factors_of: Factors = flat_factors,
    precision: str = "float32",
) -> ClippedSum:
    """As `engine.clipped_sum`, same arguments, same result up to rounding.

    The same guarantee too. The jacobian multiplies a unit's values by the zeros of other units'
    rows, and 0·NaN is NaN: so a micro-batch with a value that is not finite is clipped unit by
    unit instead (`naive`), which keeps that unit to itself if `unit_losses` is `Separable`.

    Raises:
        BadInput: tensorflow-privacy is not installed, or clipping is to be other than flat.
    """
    if factors_of is not flat_factors:
        raise BadInput("clips flatly only", where="engine tensorflow-privacy")
    clip = tf.minimum(tf.cast(clip_norm, tf.float32), _UNBOUNDED)
    optimizer = _optimizer_class()(
        l2_norm_clip=clip,
        noise_multiplier=0.0,
        num_microbatches=units,
        unconnected_gradients_to_zero=True,
        learning_rate=0.0,
    )
    # The toolbox draws its noise, though it is multiplied by zero; where operations must be
    # deterministic, TensorFlow refuses to draw without a seed.
    tf.random.set_seed(0)
    names, noted = list(parameters), _Noted()

    def losses() -> Tensor:
        noted.losses = unit_losses(Layers(parameters, precision))
        return noted.losses

    tape = _NotingTape(noted)
    pairs = optimizer._compute_gradients(losses, [parameters[n] for n in names], tape=tape)
    means = [mean for mean, _ in pairs]
    sums = {name: mean * float(units) for name, mean in zip(names, means, strict=True)}
    vectorized = (sums, noted.norms, noted.losses)

    def one_by_one() -> tuple[dict[str, Tensor], Tensor, Tensor]:
        slow = naive_clipped_sum(unit_losses, parameters, units, clip, precision=precision)
        return slow.sums, slow.norms, slow.losses

    finite = tf.reduce_all(tf.math.is_finite(noted.norms))
    return ClippedSum(*tf.cond(finite, lambda: vectorized, one_by_one))


def _optimizer_class() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # its dependencies use distutils
            module = importlib.import_module(
                "tensorflow_privacy.privacy.optimizers.dp_optimizer_keras_vectorized"
            )
    except ImportError:
        raise BadInput(
            "tensorflow-privacy is not installed",
            where="engine tensorflow-privacy",
            fix="Install it, or use the engine book-keeping.",
        ) from None
    return module.VectorizedDPKerasSGDOptimizer


class _Noted:
    """What passes by on the optimizer's way and is not in its answer."""

    losses: Tensor
    norms: Tensor


class _NotingTape(tf.GradientTape):  # type: ignore[misc]
    """Notes the units' norms, which the optimizer keeps to itself."""

    def __init__(self, noted: _Noted) -> None:
        super().__init__(persistent=True, watch_accessed_variables=False)
        self._noted = noted

    def jacobian(self, target: Tensor, sources: Sequence[Any], **options: Any) -> list[Tensor]:
        """(U,), variables -> for each variable, the units' gradients (U, ...)."""
        gradients: list[Tensor] = super().jacobian(target, sources, **options)
        flat = [tf.reshape(g, (g.shape[0], -1)) for g in gradients]
        squared = tf.add_n([tf.reduce_sum(tf.square(g), axis=1) for g in flat])  # (U,)
        self._noted.norms = tf.sqrt(squared)
        return gradients
