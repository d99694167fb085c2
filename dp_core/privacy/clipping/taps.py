"""Layers that note down their inputs and outputs while they compute."""

from __future__ import annotations

from typing import NoReturn

import tensorflow as tf

from dp_core.bert.functions import standardise
from dp_core.bert.layers import Layers, Tensor, Variables, embedding_sum
from dp_core.privacy.clipping.embedding import EmbeddingTap
from dp_core.privacy.clipping.layer_norm import LayerNormTap
from dp_core.privacy.clipping.linear import LinearTap
from dp_core.privacy.clipping.rule import Tap
from dp_core.privacy.clipping.tied_projection import TiedProjectionTap


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
