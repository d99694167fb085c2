"""Names, shapes and initial values of a model's parameters.

A model is a config and a dict of arrays. Kernels are [in, out]. Query, key and value share one
kernel [D, 3D], so that one matrix product computes all three.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from dp_core.models.config import (
    BertConfig,
    FeedForwardConfig,
    Gpt2Config,
    LlamaConfig,
    ModernBertConfig,
)

Arrays = dict[str, NDArray[np.float32]]
EncoderConfig = BertConfig | ModernBertConfig
ModelConfig = EncoderConfig | Gpt2Config | LlamaConfig | FeedForwardConfig
C = TypeVar("C", bound=ModelConfig)
Config = TypeVar("Config", bound=ModelConfig, covariant=True)

WORD, POSITION, TYPE = "embeddings/word", "embeddings/position", "embeddings/type"
MLM_BIAS = "mlm/bias"
HEAD = "head"  # a decoder's output projection, unless it is the word table
HEAD_BIAS = f"{HEAD}/bias"  # of a feed-forward model
TAGGER = "tagger"  # classifies tokens
TRANSITIONS = f"{TAGGER}/transitions"  # of a CRF over its tags: (from, to)
POOLER, CLASSIFIER = "pooler", "classifier"  # classify rows
CLASSIFIERS = (f"{TAGGER}/", f"{POOLER}/", f"{CLASSIFIER}/")
HEADS = ("mlm/", *CLASSIFIERS)  # heads of a BERT's encoder
PREDICTION = "prediction"  # the last layer of a ModernBERT, before each of its heads
TABLES = (WORD, POSITION, TYPE, f"{HEAD}/kernel")


@dataclass(frozen=True)
class Model(Generic[Config]):
    """A model outside of training.

    Attributes:
        config: the model's shape.
        parameters: arrays by name.
        labels: the labels of its classifier in order of id, if it has one.
    """

    config: Config
    parameters: Arrays
    labels: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(p.size for p in self.parameters.values())


def shape_facts(config: ModelConfig) -> dict[str, Any]:
    """Return the kind and size of a model, as the settings name them."""
    return {"kind": config.kind, "layers": config.layers, "hidden": config.hidden}


Bert = Model[EncoderConfig]
AnyModel = Model[ModelConfig]


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every parameter, including a BERT's MLM head."""
    v, d = config.vocab_size, config.hidden
    shapes: dict[str, tuple[int, ...]] = {WORD: (v, d)}
    if isinstance(config, FeedForwardConfig):
        widths = (config.window * d, *config.units)
        for i, (d_in, d_out) in enumerate(pairwise(widths)):
            shapes |= _linear(f"layer_{i}/intermediate", d_in, d_out)
        return shapes | _linear(HEAD, widths[-1], v)
    bert, modern = isinstance(config, BertConfig), isinstance(config, ModernBertConfig)
    if isinstance(config, BertConfig | Gpt2Config):
        shapes[POSITION] = (config.max_positions, d)
    if isinstance(config, BertConfig) and not config.distilled:
        shapes[TYPE] = (config.type_vocab, d)
    if bert or modern:
        shapes |= _norm("embeddings/norm", d)
    for i in range(config.layers):
        for name, d_in, d_out in _kernels(config):
            shapes |= _linear(f"layer_{i}/{name}", d_in, d_out)
        for norm in ("attention_norm", "output_norm" if bert else "intermediate_norm"):
            shapes |= _norm(f"layer_{i}/{norm}", d)
    if bert:
        mlm = _linear("mlm/transform", d, d) | _norm("mlm/norm", d)
        return shapes | mlm | {MLM_BIAS: (v,)}
    shapes |= _norm("final_norm", d)
    if isinstance(config, Gpt2Config):
        return shapes
    head: dict[str, tuple[int, ...]] = {MLM_BIAS: (v,)}
    if isinstance(config, LlamaConfig):
        head = {} if config.tied else {f"{HEAD}/kernel": (d, v)}
    else:
        shapes |= _linear(f"{PREDICTION}/transform", d, d) | _norm(f"{PREDICTION}/norm", d)
        del shapes["layer_0/attention_norm/gain"]  # the embedding is normalised already
    # No other biases.
    return {n: shape for n, shape in shapes.items() if not n.endswith("/bias")} | head


def _kernels(config: EncoderConfig | Gpt2Config | LlamaConfig) -> list[tuple[str, int, int]]:
    """Return name, inputs and outputs of each kernel of a block.

    The queries, keys and values of a Llama have different widths and separate kernels.
    """
    d, f = config.hidden, config.intermediate
    inner = 2 * f if isinstance(config, ModernBertConfig) else f  # with gates
    mlp = [("intermediate", d, inner), ("output", f, d)]
    if not isinstance(config, LlamaConfig):
        return [("qkv", d, 3 * d), ("attention_output", d, d), *mlp]
    queries, keys = config.heads * config.head_width, config.key_heads * config.head_width
    attention = [("query", d, queries), ("key", d, keys), ("value", d, keys)]
    return [*attention, ("attention_output", queries, d), ("gate", d, f), *mlp]


def _linear(name: str, d_in: int, d_out: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/kernel": (d_in, d_out), f"{name}/bias": (d_out,)}


def _norm(name: str, d: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/gain": (d,), f"{name}/bias": (d,)}


def initial_values(shapes: Mapping[str, tuple[int, ...]], scale: float, seed: int) -> Arrays:
    """Draw initial values as in BERT: N(0, scale²) cut at two deviations, gains 1, biases 0.

    Each parameter has a separate random stream, so its values do not depend on other parameters.
    The seed is public, because initial values protect nothing.
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


def fresh(config: C, seed: int) -> Model[C]:
    """Return a randomly initialised model: a BERT with its MLM head, or a decoder.

    The kernels whose output a pre-norm model adds to the residual stream are divided by
    √(2·layers), so that the sum of all layers starts as large as one (Radford et al. 2019, 2.3). A
    feed-forward model's dense layers start with the deviation √(2 / inputs), which preserves the
    variance
    through ReLU (He et al. 2015, arXiv:1502.01852).
    """
    shapes = parameter_shapes(config)
    values = initial_values(shapes, config.initializer_range, seed)
    if isinstance(config, FeedForwardConfig):
        kernels = {name: shape for name, shape in shapes.items() if name.endswith("/kernel")}
        for name, value in initial_values(kernels, 1.0, seed).items():
            values[name] = value * np.float32(math.sqrt(2 / len(value)))
    elif isinstance(config, ModernBertConfig | Gpt2Config | LlamaConfig):
        for name in values:
            if name.endswith(("/attention_output/kernel", "/output/kernel")):
                values[name] /= np.float32(math.sqrt(2 * config.layers))
    return Model(config, values)


def language_model(model: Model[C]) -> Model[C]:
    """Return the model without classifiers, and with an MLM head if its architecture has one.

    A missing head is initialised from a public seed, without data.
    """
    shapes = parameter_shapes(model.config)
    missing = {name: shape for name, shape in shapes.items() if name not in model.parameters}
    drawn = initial_values(missing, model.config.initializer_range, seed=0)
    parameters = model.parameters | drawn
    return Model(model.config, {name: parameters[name] for name in shapes})


def decays(name: str) -> bool:
    """Return whether weight decay applies: to kernels and tables, not to biases and gains."""
    return not name.endswith(("/bias", "/gain"))
