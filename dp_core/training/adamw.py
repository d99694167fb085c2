"""AdamW (Loshchilov and Hutter 2019) on TensorFlow's fused kernel: one pass over a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from dp_core.bert.parameters import decays

Tensor = Any
EPSILON = 1e-8


@dataclass(frozen=True)
class AdamW:
    """The constants of the optimizer."""

    beta1: float
    beta2: float
    weight_decay: float

    def apply(
        self,
        name: str,
        weight: Any,
        mean: Any,
        square: Any,
        gradient: Tensor,
        rate: Tensor,
        step: Tensor,
    ) -> None:
        """Move one variable, its two moments with it.

        Args:
            name: of the parameter; biases and LayerNorm gains do not decay.
            weight: tf.Variable.
            mean: tf.Variable, the decaying mean of the gradients.
            square: tf.Variable, the decaying mean of their squares.
            gradient: of the variable's shape.
            rate: scalar, the learning rate.
            step: scalar float32, number of this update, from 1.
        """
        if self.weight_decay and decays(name):
            weight.assign_sub(rate * self.weight_decay * weight)
        tf.raw_ops.ResourceApplyAdam(
            var=weight.handle,
            m=mean.handle,
            v=square.handle,
            beta1_power=tf.pow(self.beta1, step),
            beta2_power=tf.pow(self.beta2, step),
            lr=rate,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=EPSILON,
            grad=gradient,
        )
