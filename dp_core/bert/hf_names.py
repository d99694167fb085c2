"""Parameters under Hugging Face's names and layouts, both ways.

BERT's and DistilBERT's kernels are [out, in] there, with query, key and value apart; GPT-2's are
[in, out], with the three in one, as ours are.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dp_core.bert.gpt2_config import Gpt2Config
from dp_core.bert.hf_layouts import pairs, prefix
from dp_core.bert.parameters import CLASSIFIER, MLM_BIAS, TAGGER, Arrays, ModelConfig

_BODY = ("embeddings.", "encoder.", "transformer.", "pooler.", "wte.", "wpe.", "h.", "ln_f.")
_KERNEL = "/kernel"


def to_hf(parameters: Mapping[str, NDArray[np.float32]], config: ModelConfig) -> Arrays:
    """Return the same parameters under Hugging Face's names; a head's become `classifier`."""
    out: Arrays = {}
    for ours, theirs in pairs(config, heads_of(parameters)):
        value = parameters[ours]
        if isinstance(theirs, str):
            out[theirs] = _turned(ours, value, config)
        else:
            thirds = np.split(value, 3, axis=-1)
            names = zip(theirs, thirds, strict=True)
            out |= {name: _turned(ours, third, config) for name, third in names}
    return out


def from_hf(
    tensors: Mapping[str, NDArray[np.float32]], config: ModelConfig, heads: frozenset[str]
) -> Arrays:
    """Return the parameters that are there under our names; the rest is left out.

    Understands the older `gamma` and `beta`, and bodies saved without the architecture's prefix.
    """
    known = {_modern(name, config): value for name, value in tensors.items()}
    out: Arrays = {}
    for ours, theirs in pairs(config, heads):
        names = [theirs] if isinstance(theirs, str) else list(theirs)
        if all(name in known for name in names):
            parts = [_turned(ours, known[name].astype(np.float32), config) for name in names]
            out[ours] = np.ascontiguousarray(np.concatenate(parts, axis=-1))
    return out


def heads_of(parameters: Mapping[str, NDArray[np.float32]]) -> frozenset[str]:
    """Return which heads these parameters have."""
    marks = {"mlm": MLM_BIAS, TAGGER: TAGGER + _KERNEL, CLASSIFIER: CLASSIFIER + _KERNEL}
    return frozenset(head for head, name in marks.items() if name in parameters)


def _modern(name: str, config: ModelConfig) -> str:
    name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
    name = name.replace("LayerNorm.beta", "LayerNorm.bias")
    own = prefix(config)
    return own + name if name.startswith(_BODY) and not name.startswith(own) else name


def _turned(ours: str, value: NDArray[np.float32], config: ModelConfig) -> NDArray[np.float32]:
    turn = ours.endswith(_KERNEL) and not isinstance(config, Gpt2Config)
    return np.ascontiguousarray(value.T if turn else value)
