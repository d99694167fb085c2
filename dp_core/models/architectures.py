"""Architectures in Hugging Face's layout: their `config.json`, and the names of their tensors.

`architectures.toml` lists the layouts.

`transformers` has no feed-forward models; they are stored in the same way.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dp_core.errors import BadInput
from dp_core.models import config as shapes
from dp_core.models.config import (
    Gpt2Config,
    LlamaConfig,
    ModernBertConfig,
    RobertaConfig,
    RopeScaling,
)
from dp_core.models.parameters import POSITION, WORD, Arrays, ModelConfig


@dataclass(frozen=True)
class Architecture:
    """The layout of an architecture's `config.json` and tensors.

    Attributes:
        config: class of its shape.
        name: name of its class in Hugging Face.
        fields: our fields and Hugging Face's.
        expected: values that a file must have; a missing or null value counts as expected.
        written: values that are not read, such as dropout rates of 0.
        tensors: our modules and tables, and their names in Hugging Face's layout, where `{}` is the
            number of the layer. A fused kernel consists of several tensors.
        fixed: fields of ours that the file lacks.
    """

    config: type[ModelConfig]
    name: str
    fields: Mapping[str, str]
    expected: Mapping[str, Any]
    written: Mapping[str, Any]
    tensors: Mapping[str, str | tuple[str, ...]]
    fixed: Mapping[str, Any] = field(default_factory=dict)


_MARKERS = ("begin", "end")


def _architecture(layout: Mapping[str, Any]) -> Architecture:
    """Return a layout of `architectures.toml`."""
    tensors = {n: tuple(t) if isinstance(t, list) else t for n, t in layout["tensors"].items()}
    of_shape = getattr(shapes, layout["config"])
    return Architecture(**{**layout, "config": of_shape, "tensors": tensors})


ARCHITECTURES = {
    kind: _architecture(layout)
    for kind, layout in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
}


def config_from_hf(about: Mapping[str, Any]) -> ModelConfig:
    """Return the shape that a `config.json` describes. Of several end tokens, the first is used.

    Raises:
        BadInput: an unsupported architecture or variant; a field is missing or out of range.
    """
    kind = about.get("model_type", "bert")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        fix = f"Supported architectures are {', '.join(ARCHITECTURES)}."
        raise BadInput(f"model_type is {kind!r}", where="config.json", fix=fix)
    layout = ARCHITECTURES[kind]
    given = {key: value for key, value in about.items() if value is not None}
    if layout.config is ModernBertConfig:
        given |= _layers_of_modernbert(given)
    for key, value in layout.expected.items():
        if given.get(key, value) != value:
            raise BadInput(
                f"{key} is {given[key]!r}", where="config.json", fix=f"Only {value!r} works."
            )
    required = {f.name for f in dataclass_fields(layout.config) if f.default is MISSING}
    values = dict(layout.fixed)
    for ours, theirs in layout.fields.items():
        if theirs in given:
            value = given[theirs]
            if isinstance(value, list):
                value = value[0] if ours in _MARKERS and value else tuple(value)
            values[ours] = value
        elif ours in required:
            raise BadInput(f"{theirs} is missing", where="config.json")
    rope = _rotary_positions(given) if layout.config is LlamaConfig else {}
    config = layout.config(**values, **rope)
    return replace(config, max_positions=config.max_positions - unused_positions(about))


def unused_positions(about: Mapping[str, Any]) -> int:
    """Return the number of unused first rows of the position table that a `config.json` describes.

    RoBERTa's positions begin after `pad_token_id`, which is 1 in published checkpoints.

    Raises:
        BadInput: `pad_token_id` is not a token's id.
    """
    if about.get("model_type") != RobertaConfig.KIND:
        return 0
    pad = about.get("pad_token_id", 1)
    if not isinstance(pad, int) or pad < 0:
        raise BadInput(f"pad_token_id is {pad!r}", where="config.json")
    return pad + 1


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` of a shape, without dropout."""
    layout = ARCHITECTURES[config.kind]
    about = {
        "architectures": [layout.name],
        "model_type": config.kind,
        **layout.expected,
        **{theirs: getattr(config, ours) for ours, theirs in layout.fields.items()},
        "pad_token_id": 0,
        "torch_dtype": "float32",
        **layout.written,
    }
    if isinstance(config, LlamaConfig):
        theta = about["rope_theta"] = config.rope_theta
        about["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        if config.rope_scaling:
            about["rope_parameters"] |= {"rope_type": "llama3", **asdict(config.rope_scaling)}
            about["rope_scaling"] = about["rope_parameters"]  # as version 4 of transformers reads
    about[layout.fields["max_positions"]] += unused_positions(about)
    return about


_BASES = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}


def _layers_of_modernbert(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers of a ModernBERT in the fields of version 4 of transformers."""
    fields: dict[str, Any] = {}
    kinds, (whole, local) = about.get("layer_types"), _BASES
    if isinstance(kinds, list):
        every = fields["global_attn_every_n_layers"] = [*kinds[1:], whole].index(whole) + 1
        if kinds != [local if i % every else whole for i in range(len(kinds))]:
            fix = "Only every nth layer, beginning with the first, may be global."
            raise BadInput("layer_types are irregular", where="config.json", fix=fix)
    rope = about.get("rope_parameters")
    for kind, name in _BASES.items():
        given = rope.get(kind) if isinstance(rope, Mapping) else None
        given = given if isinstance(given, Mapping) else {}
        if about.get("rope_scaling") or given.get("rope_type", "default") != "default":
            raise BadInput("positions are scaled", where="config.json", fix="Only unscaled work.")
        fields[name] = given.get("rope_theta", about.get(name))
    return {name: value for name, value in fields.items() if value is not None}


def _rotary_positions(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Llama's rotary positions, which are scaled as in Llama 3 or not at all."""
    rope = about.get("rope_parameters") or about.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise BadInput("rope_parameters is not an object", where="config.json")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        fix = "Only 'default' and 'llama3' work."
        raise BadInput(f"rope_type is {kind!r}", where="config.json", fix=fix)
    if (part := rope.get("partial_rotary_factor")) not in (None, 1.0):
        what = f"partial_rotary_factor is {part!r}"
        raise BadInput(what, where="config.json", fix="Only 1.0 works.")
    scaling: dict[str, Any] = {f.name: rope.get(f.name) for f in dataclass_fields(RopeScaling)}
    return {
        "rope_scaling": RopeScaling(**scaling) if kind == "llama3" else None,
        "rope_theta": rope.get("rope_theta", about.get("rope_theta", 10_000.0)),
    }


_LAYER = re.compile(r"^layer_(\d+)")
_SUFFIXES = {"kernel": ".weight", "gain": ".weight", "table": ".weight", "bias": ".bias"}


def tensors_of(name: str, config: ModelConfig) -> tuple[str, ...]:
    """Return the names of a parameter's tensors in Hugging Face's layout; empty if it has none.

    A fused query-key-value kernel consists of three tensors.
    """
    table = ARCHITECTURES[config.kind].tensors
    module, leaf = (name, "table") if name in table else name.rpartition("/")[::2]
    layer = _LAYER.match(module)
    theirs = table.get(_LAYER.sub("layer_{}", module), ())
    if leaf not in _SUFFIXES:
        return ()
    return tuple(
        tensor.format(layer and layer[1]) + _SUFFIXES[leaf]
        for tensor in ((theirs,) if isinstance(theirs, str) else theirs)
    )


def tensors_to_hf(parameters: Mapping[str, NDArray[np.float32]], config: ModelConfig) -> Arrays:
    """Return the parameters by their names in Hugging Face's layout.

    Raises:
        BadInput: a parameter has no name there and would be lost, like unmerged adapters.
    """
    out: Arrays = {}
    if unused := unused_positions(config_to_hf(config)):
        table = np.pad(parameters[POSITION], ((unused, 0), (0, 0)))
        parameters = {**parameters, POSITION: table}
    names = {ours: tensors_of(ours, config) for ours in parameters}
    if unnamed := [ours for ours, theirs in names.items() if not theirs]:
        raise BadInput(
            f"{len(unnamed)} parameters have no name in Hugging Face's layout, for example "
            f"{min(unnamed)}",
            where="model",
            fix="Merge adapters before the model is written.",
        )
    for ours, theirs in names.items():
        parts = np.split(parameters[ours], len(theirs), axis=-1)
        pairs = zip(theirs, parts, strict=True)
        out |= {name: transposed(ours, part, config) for name, part in pairs}
    return out


def tensors_from_hf(
    stored: Mapping[str, NDArray[np.float32]], config: ModelConfig, names: Iterable[str]
) -> Arrays:
    """Return the named parameters that the tensors contain, by our names.

    Reads the older names `gamma` and `beta`, and models saved without the architecture's prefix.
    """
    theirs = {ours: tensors_of(ours, config) for ours in names}
    expected = {name for tensors in theirs.values() for name in tensors}
    prefix = tensors_of(WORD, config)[0].partition(".")[0] + "."
    known: Arrays = {}
    for name, value in stored.items():
        modern = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        modern = modern.replace("LayerNorm.beta", "LayerNorm.bias")
        known[modern if modern in expected else prefix + modern] = value
    return {
        ours: np.concatenate([transposed(ours, known[name], config) for name in tensors], axis=-1)
        for ours, tensors in theirs.items()
        if tensors and known.keys() >= set(tensors)
    }


def transposed(ours: str, value: NDArray[np.float32], config: ModelConfig) -> NDArray[np.float32]:
    """Convert a parameter between the two layouts: kernels are transposed, except in GPT-2."""
    transpose = ours.endswith("/kernel") and not isinstance(config, Gpt2Config)
    return np.ascontiguousarray(value.T if transpose else value)
