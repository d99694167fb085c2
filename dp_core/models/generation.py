"""Text from a causal model: top-k sampling, token by token.

What a released model writes is post-processing of its weights, and costs no privacy. n texts, P
tokens of their beginning, T tokens behind it, V of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.data.tokens import SpecialIds
from dp_core.errors import BadInput
from dp_core.models.causal import causal_logits
from dp_core.models.config import CausalConfig
from dp_core.models.parameters import AnyModel
from dp_core.nn.layers import Layers, Tensor

TOP_K = 40  # tokens that are drawn from, as Radford et al. 2019 have it


def continuations(
    model: AnyModel, beginning: Sequence[int], *, texts: int, tokens: int, seed: int
) -> list[list[int]]:
    """Return what a causal model writes behind a beginning, each text a draw of its own.

    Each token is drawn from the `TOP_K` likeliest by their chances (Fan et al. 2018,
    arXiv:1805.04833). A text ends with the model's end token; other markers are never drawn.

    Args:
        model: a causal one.
        beginning: ids, without the marker before it.
        texts: n.
        tokens: T, at most; fewer where the model's rows are too short.
        seed: public.

    Returns:
        The ids behind the beginning, without it.

    Raises:
        BadInput: a model that is not causal or answers with what is no number, or no room for a
            token.
    """
    config = model.config
    if not isinstance(config, CausalConfig):
        raise BadInput("a masked model writes no text", where="model")
    shown = [config.begin, *beginning]
    width = min(len(shown) + tokens, config.max_positions)
    if len(shown) >= width:
        raise BadInput(
            f"a beginning of {len(beginning)} tokens leaves no room in rows of "
            f"{config.max_positions}",
            where="sample_prompt",
            fix="Give a shorter one.",
        )
    layers = Layers({name: tf.constant(value) for name, value in model.parameters.items()})

    def logits_at(ids: Tensor, place: Tensor) -> Tensor:
        return causal_logits(layers, config, ids, tf.fill((texts, 1), place))  # (n, V)

    compiled = tf.function(logits_at, autograph=False)
    coins = np.random.default_rng(seed)
    ids = np.full((texts, width), config.end, np.int32)
    ids[:, : len(shown)] = shown
    for place in range(len(shown), width):
        logits = compiled(tf.constant(ids), tf.constant(place - 1)).numpy().astype(np.float64)
        if not np.isfinite(logits).all():
            raise BadInput("the model answers with what is no number", where="model")
        ids[:, place] = _drawn(logits, config.end, coins)
    return [_until(row, config.end) for row in ids[:, len(shown) :].tolist()]


def _drawn(logits: NDArray[np.float64], end: int, coins: np.random.Generator) -> NDArray[np.int64]:
    """(n, V) -> (n,): one of each row's likeliest tokens, by their chances."""
    markers = [marker for marker in SpecialIds().as_tuple() if marker != end]
    logits[:, markers] = -np.inf
    kept = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K]  # (n, k)
    values = np.take_along_axis(logits, kept, axis=1)
    chances = np.exp(values - values[:, :1])
    reached = np.cumsum(chances, axis=1) / chances.sum(axis=1, keepdims=True)
    places = (reached < coins.random((len(logits), 1))).sum(axis=1)
    return np.take_along_axis(kept, places[:, None], axis=1)[:, 0]


def _until(row: list[int], end: int) -> list[int]:
    return row[: row.index(end)] if end in row else row
