"""Odds of row suffixes under a causal model, from one forward pass per row and no generated text.

Shapes: n rows, M rows at a time, T tokens of a row, the last L of them its suffix, V tokens of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import tensorflow as tf

from dp_core.audit.extraction import Ids, Odds, OddsOf, Prompts
from dp_core.errors import BadInput
from dp_core.models.causal import causal_logits
from dp_core.models.config import CausalConfig
from dp_core.models.parameters import AnyModel
from dp_core.nn import FAR_BELOW, Layers, Tensor

_PREDICTIONS_AT_ONCE = 1024


def suffix_odds(model: AnyModel) -> OddsOf:
    """Return a function that computes a causal model's odds of row suffixes.

    Raises:
        BadInput: raised by the function if a probability is not finite.
    """
    config = model.config
    assert isinstance(config, CausalConfig)  # noqa: S101 - narrows the type
    layers = Layers({name: tf.constant(value) for name, value in model.parameters.items()})
    return partial(_odds, layers, config)


def _odds(
    layers: Layers,
    config: CausalConfig,
    prompts: Prompts,
    top_k: int,
    among: Sequence[int] | None,
) -> Odds:
    """Return the odds of each suffix; k is at most the number of allowed tokens."""
    allowed = np.arange(config.vocab_size) if among is None else np.unique(among)
    barred = np.full(config.vocab_size, FAR_BELOW, np.float32)
    barred[allowed] = 0.0
    suffix, k = prompts.suffix, min(top_k, len(allowed))

    def odds(ids: Tensor) -> tuple[Tensor, ...]:
        m, t = ids.shape
        asked = tf.tile(tf.range(t - 1 - suffix, t - 1)[None], (m, 1))  # before each suffix token
        logits = causal_logits(layers, config, ids[:, :-1], asked)  # (M·L, V)
        sound = tf.reduce_all(tf.math.is_finite(logits))
        values, tokens = tf.math.top_k(logits + barred, k)  # (M·L, k); lower ids win ties
        hit = tokens == tf.reshape(ids[:, -suffix:], (-1, 1))
        # Sampling normalises over the k tokens. Logarithms prevent underflow of the product.
        logs = tf.where(hit, tf.nn.log_softmax(values), 0.0)
        return (
            sound,
            tf.reshape(hit[:, 0], (m, suffix)),
            tf.reshape(tf.reduce_any(hit, axis=1), (m, suffix)),
            tf.reshape(tf.reduce_sum(logs, axis=1), (m, suffix)),
        )

    compiled = tf.function(odds, autograph=False)
    answers = []
    for part in _parts(prompts):
        sound, *found = compiled(tf.constant(part))
        if not bool(sound):
            raise BadInput("the model's probabilities are not finite", where="model")
        answers.append([values.numpy() for values in found])
    first, within, logs = (
        np.concatenate(a)[: len(prompts.ids)] for a in zip(*answers, strict=True)
    )
    inside = within.all(axis=1)
    chance = np.where(inside, np.exp(logs.astype(np.float64).sum(axis=1)), 0.0)
    return Odds(first.all(axis=1), inside, chance)


def _parts(prompts: Prompts) -> Iterator[Ids]:
    """Yield the rows in parts of one size; the last part repeats its rows to reach the size."""
    size = max(1, _PREDICTIONS_AT_ONCE // prompts.suffix)
    for start in range(0, len(prompts.ids), size):
        places = np.resize(np.arange(start, min(start + size, len(prompts.ids))), size)
        yield prompts.ids[places]
