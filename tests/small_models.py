"""Small models of every architecture, with random values in every parameter."""

from typing import Any

import numpy as np
import tensorflow as tf

from dp_core.models.bert import mlm_logits, tag_logits
from dp_core.models.causal import causal_logits
from dp_core.models.config import (
    BertConfig,
    CausalConfig,
    FeedForwardConfig,
    Gpt2Config,
    LlamaConfig,
    RobertaConfig,
)
from dp_core.models.parameters import TAGGER, AnyModel, Model, fresh
from dp_core.nn import LORA_SCALE, Layers

SIZES: dict[str, Any] = {
    "vocab_size": 30, "hidden": 8, "layers": 2, "heads": 2, "intermediate": 12, "max_positions": 12,
}  # fmt: skip
SHAPES: dict[str, Any] = {
    "bert": BertConfig(**SIZES),
    "distilbert": BertConfig(**SIZES, type_vocab=0),
    "roberta": RobertaConfig(**SIZES),
    "gpt2": Gpt2Config(**SIZES),
    "llama": LlamaConfig(**SIZES, key_heads=1),
    "feed-forward": FeedForwardConfig(
        vocab_size=30, hidden=8, window=4, units=(16, 12, 10), max_positions=12
    ),
}


def randomised(model: Any, seed: int = 0, scale: float = 0.3, ending: Any = "") -> Any:
    """Return the model with noise on the parameters whose names have one of the endings."""
    rng = np.random.default_rng(seed)
    values = {
        n: a + scale * rng.standard_normal(a.shape).astype("f") if n.endswith(ending) else a
        for n, a in model.parameters.items()
        if n != LORA_SCALE
    }
    return Model(model.config, model.parameters | values, model.labels)


def random_model(config: Any, seed: int = 0) -> Any:
    return randomised(fresh(config, 0), seed)


def logits_of(model: AnyModel, ids: np.ndarray, lengths: Any = None) -> np.ndarray:
    """Return the logits at each token, (M, S, ·), of the classifier of tokens if there is one."""
    (m, s), layers, config = ids.shape, Layers(model.parameters), model.config
    ids = tf.constant(ids, tf.int32)
    lengths = tf.fill(m, s) if lengths is None else tf.constant(lengths, tf.int32)
    if f"{TAGGER}/kernel" in model.parameters:
        logits = tag_logits(layers, config, ids, lengths)
    elif isinstance(config, CausalConfig):
        logits = causal_logits(layers, config, ids)
    else:
        logits = mlm_logits(layers, config, ids, lengths, tf.tile(tf.range(s)[None], (m, 1)))
    return logits.numpy().reshape(m, s, -1)
