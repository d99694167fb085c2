"""Parameter names and layouts of Hugging Face's `BertForMaskedLM`, both ways.

There kernels are [out, in], and query, key and value are three; the output projection is the
word table itself (`cls.predictions.decoder.weight` is tied and not stored).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from dp_core.bert.config import BertConfig
from dp_core.bert.parameters import MLM_BIAS, POSITION, TAGGER, TYPE, WORD, Arrays

_QKV = ("query", "key", "value")


def to_hf(parameters: Mapping[str, NDArray[np.float32]], config: BertConfig) -> Arrays:
    """Return the same parameters under Hugging Face's names; `tagger` becomes `classifier`."""
    out: Arrays = {}
    for ours, theirs in _pairs(config, TAGGER + "/kernel" in parameters):
        value = parameters[ours]
        if isinstance(theirs, str):
            out[theirs] = _transposed(ours, value)
        else:
            thirds = np.split(value, 3, axis=-1)
            out |= {name: _transposed(ours, v) for name, v in zip(theirs, thirds, strict=True)}
    return out


def from_hf(tensors: Mapping[str, NDArray[np.float32]], config: BertConfig) -> Arrays:
    """Return the parameters that are there under our names; the rest is left out.

    Understands the older `gamma` and `beta`, and encoders saved without the `bert.` prefix.
    """
    known = {_modern(name): value for name, value in tensors.items()}
    out: Arrays = {}
    for ours, theirs in _pairs(config, "classifier.weight" in known):
        names = [theirs] if isinstance(theirs, str) else list(theirs)
        if all(name in known for name in names):
            parts = [_transposed(ours, known[name].astype(np.float32)) for name in names]
            out[ours] = np.ascontiguousarray(np.concatenate(parts, axis=-1))
    return out


def _modern(name: str) -> str:
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
    name = name.replace("LayerNorm.beta", "LayerNorm.bias")
    return f"bert.{name}" if name.startswith(("embeddings.", "encoder.")) else name


def _transposed(ours: str, value: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.ascontiguousarray(value.T) if ours.endswith("/kernel") else value


def _pairs(config: BertConfig, tagger: bool) -> Iterator[tuple[str, str | tuple[str, ...]]]:
    """Yield (our name, their name or names)."""
    yield WORD, "bert.embeddings.word_embeddings.weight"
    yield POSITION, "bert.embeddings.position_embeddings.weight"
    yield TYPE, "bert.embeddings.token_type_embeddings.weight"
    yield from _norm("embeddings/norm", "bert.embeddings.LayerNorm")
    for i in range(config.layers):
        ours, theirs = f"layer_{i}", f"bert.encoder.layer.{i}"
        for kind, suffix in (("kernel", "weight"), ("bias", "bias")):
            yield (
                f"{ours}/qkv/{kind}",
                tuple(f"{theirs}.attention.self.{part}.{suffix}" for part in _QKV),
            )
        yield from _linear(f"{ours}/attention_output", f"{theirs}.attention.output.dense")
        yield from _norm(f"{ours}/attention_norm", f"{theirs}.attention.output.LayerNorm")
        yield from _linear(f"{ours}/intermediate", f"{theirs}.intermediate.dense")
        yield from _linear(f"{ours}/output", f"{theirs}.output.dense")
        yield from _norm(f"{ours}/output_norm", f"{theirs}.output.LayerNorm")
    if tagger:
        yield from _linear(TAGGER, "classifier")
        return
    yield from _linear("mlm/transform", "cls.predictions.transform.dense")
    yield from _norm("mlm/norm", "cls.predictions.transform.LayerNorm")
    yield MLM_BIAS, "cls.predictions.bias"


def _linear(ours: str, theirs: str) -> Iterator[tuple[str, str]]:
    yield f"{ours}/kernel", f"{theirs}.weight"
    yield f"{ours}/bias", f"{theirs}.bias"


def _norm(ours: str, theirs: str) -> Iterator[tuple[str, str]]:
    yield f"{ours}/gain", f"{theirs}.weight"
    yield f"{ours}/bias", f"{theirs}.bias"
