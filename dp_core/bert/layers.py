"""The few layers a BERT is made of, each reading its parameters by name.

The forward pass is written once against this class; `dp_core.privacy.clipping` gives a subclass
that also notes down what went in and what came out of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from dp_core.bert.functions import Tensor, standardise

__all__ = ["Layers", "Tensor", "Variables", "embedding_sum", "shape_of"]

Variables = Mapping[str, Any]  # name -> tf.Variable or tf.Tensor


class Layers:
    """Ordinary layers over named parameters. N stands for any leading shape."""

    def __init__(self, parameters: Variables) -> None:
        self._parameters = parameters

    def linear(self, name: str, x: Tensor) -> Tensor:
        """(N, in) -> (N, out) by `name/kernel` and `name/bias`."""
        return tf.matmul(x, self._parameters[f"{name}/kernel"]) + self._parameters[f"{name}/bias"]

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
        logits = tf.matmul(x, self._parameters[table], transpose_b=True)
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
    words = tf.gather(parameters[word], ids)  # (M, S, D)
    placed = words + parameters[position][: shape_of(ids)[-1]]
    if kind is None:
        return placed
    kinds = tf.one_hot(types, parameters[kind].shape[0])  # (M, S, types)
    return placed + tf.matmul(kinds, parameters[kind])
