"""The few layers a BERT is made of, each reading its parameters by name.

The forward pass is written once against this class; `dp_core.privacy.clipping` gives a subclass
that also notes down what went in and what came out of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from dp_core.bert.functions import Tensor, standardise
from dp_core.bert.precision import compute_type

__all__ = ["Layers", "Tensor", "Variables", "embedding_sum", "shape_of"]

Variables = Mapping[str, Any]  # name -> tf.Variable or tf.Tensor


class Layers:
    """Ordinary layers over named parameters. N stands for any leading shape.

    Args:
        parameters: float32 variables or tensors, by name.
        precision: the format of the factors of products, `float32` or `bfloat16`; what goes in
            and comes out is float32 in any case.
    """

    def __init__(self, parameters: Variables, precision: str = "float32") -> None:
        self._parameters = parameters
        self._type = compute_type(precision)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """(N, in) -> (N, out) by `name/kernel` and `name/bias`."""
        return (
            self.product(x, self._parameters[f"{name}/kernel"]) + self._parameters[f"{name}/bias"]
        )

    def product(self, a: Tensor, b: Tensor, *, transpose_b: bool = False) -> Tensor:
        """(..., n, k), (..., k, m) -> (..., n, m), its factors in the chosen precision."""
        if self._type == tf.float32:
            return tf.matmul(a, b, transpose_b=transpose_b)
        factors = (tf.cast(factor, self._type) for factor in (a, b))
        return tf.cast(tf.matmul(*factors, transpose_b=transpose_b), tf.float32)

    def layer_norm(self, name: str, x: Tensor, epsilon: float) -> Tensor:
        """(N, D) -> (N, D), each vector standardised, then scaled and shifted."""
        return (
            standardise(x, epsilon) * self._parameters[f"{name}/gain"]
            + self._parameters[f"{name}/bias"]
        )

    def embed(
        self, ids: Tensor, types: Tensor | None, word: str, position: str, kind: str | None
    ) -> Tensor:
        """(M, S) word and type ids -> (M, S, D): the sum of two tables' rows, or three's."""
        return embedding_sum(self._parameters, ids, types, word, position, kind)

    def tied_projection(self, x: Tensor, table: str, bias: str | None) -> Tensor:
        """(N, D) -> (N, V): logits by the word table itself, transposed."""
        logits = self.product(x, self._parameters[table], transpose_b=True)
        return logits if bias is None else logits + self._parameters[bias]


def shape_of(x: Tensor) -> tuple[Any, ...]:
    """Return the shape: numbers where they are static, scalar tensors where they are not."""
    dynamic = tf.shape(x)
    return tuple(dynamic[i] if size is None else size for i, size in enumerate(x.shape))


def embedding_sum(
    parameters: Variables,
    ids: Tensor,
    types: Tensor | None,
    word: str,
    position: str,
    kind: str | None,
) -> Tensor:
    """(M, S) ids -> (M, S, D)."""
    # Read first: of a variable that was once gathered from, TensorFlow copies every later reading.
    words = tf.gather(tf.convert_to_tensor(parameters[word]), ids)  # (M, S, D)
    placed = words + parameters[position][: shape_of(ids)[-1]]
    if kind is None:
        return placed
    kinds = tf.one_hot(types, parameters[kind].shape[0])  # (M, S, types)
    return placed + tf.matmul(kinds, parameters[kind])
