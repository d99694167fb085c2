"""A model's parameters: names, shapes, initial values. A model is a config and a dict of arrays.

Kernels are [in, out]; query, key and value share one kernel [D, 3D], so that one matrix product
serves all three.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dp_core.bert.config import BertConfig

Arrays = dict[str, NDArray[np.float32]]

WORD, POSITION, TYPE = "embeddings/word", "embeddings/position", "embeddings/type"
MLM_BIAS = "mlm/bias"
TAGGER = "tagger"


@dataclass(frozen=True)
class Bert:
    """A model outside of training.

    Attributes:
        config: its shape.
        parameters: arrays by name.
        labels: the tags of its token classifier in order of id, if it has one.
    """

    config: BertConfig
    parameters: Arrays
    labels: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(p.size for p in self.parameters.values())


def parameter_shapes(config: BertConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every parameter of the encoder with its MLM head."""
    d, f = config.hidden, config.intermediate
    shapes: dict[str, tuple[int, ...]] = {
        WORD: (config.vocab_size, d),
        POSITION: (config.max_positions, d),
        TYPE: (config.type_vocab, d),
    }
    shapes |= _norm("embeddings/norm", d)
    for i in range(config.layers):
        shapes |= _linear(f"layer_{i}/qkv", d, 3 * d)
        shapes |= _linear(f"layer_{i}/attention_output", d, d)
        shapes |= _norm(f"layer_{i}/attention_norm", d)
        shapes |= _linear(f"layer_{i}/intermediate", d, f)
        shapes |= _linear(f"layer_{i}/output", f, d)
        shapes |= _norm(f"layer_{i}/output_norm", d)
    shapes |= _linear("mlm/transform", d, d)
    shapes |= _norm("mlm/norm", d)
    shapes[MLM_BIAS] = (config.vocab_size,)
    return shapes


def _linear(name: str, d_in: int, d_out: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/kernel": (d_in, d_out), f"{name}/bias": (d_out,)}


def _norm(name: str, d: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/gain": (d,), f"{name}/bias": (d,)}


def initial_values(shapes: Mapping[str, tuple[int, ...]], scale: float, seed: int) -> Arrays:
    """Draw parameters as BERT does: N(0, scale²) cut at two deviations, gains 1, biases 0.

    Each parameter has a stream of its own, so its values do not depend on which others exist.
    The seed is public: initial values protect nothing.
    """
    return {name: _initial(name, shape, scale, seed) for name, shape in shapes.items()}


def _initial(name: str, shape: tuple[int, ...], scale: float, seed: int) -> NDArray[np.float32]:
    if name.endswith("/gain"):
        return np.ones(shape, np.float32)
    if name.endswith("/bias"):
        return np.zeros(shape, np.float32)
    stream = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = stream.standard_normal(shape, np.float32)
    outside = np.abs(values) > 2
    while outside.any():
        values[outside] = stream.standard_normal(int(outside.sum()), np.float32)
        outside = np.abs(values) > 2
    return values * np.float32(scale)


def fresh(config: BertConfig, seed: int) -> Bert:
    """Return a randomly initialised BERT with its MLM head."""
    return Bert(config, initial_values(parameter_shapes(config), config.initializer_range, seed))


def decays(name: str) -> bool:
    """Whether weight decay applies: to kernels and tables, not to biases and LayerNorm gains."""
    return not name.endswith(("/bias", "/gain"))
