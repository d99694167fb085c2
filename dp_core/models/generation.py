"""Text generation from a causal model by top-k sampling.

The text of a released model is post-processing of its weights and has no privacy cost. Shapes: n
texts, a prompt of P tokens, T generated tokens, a vocabulary of V tokens.
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

TOP_K = 40  # as in Radford et al. 2019


def continuations(
    model: AnyModel, beginning: Sequence[int], *, texts: int, tokens: int, seed: int
) -> list[list[int]]:
    """Return independent samples of texts that continue a prompt.

    Each token is sampled from the `TOP_K` most likely tokens in proportion to their probabilities
    (Fan et al. 2018, arXiv:1805.04833). A text ends with the model's end token. Other special
    tokens are never sampled.

    Args:
        model: a causal model.
        beginning: the prompt as ids, without the begin token.
        texts: n.
        tokens: the largest T; a row of the model may have room for fewer.
        seed: public.

    Returns:
        The ids of each continuation, without the prompt.

    Raises:
        BadInput: the model is not causal, its logits are not finite, or a row has no room for a
            token.
    """
    config = model.config
    if not isinstance(config, CausalConfig):
        raise BadInput("a masked model generates no text", where="model")
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
            raise BadInput("the model's logits are not finite", where="model")
        ids[:, place] = _drawn(logits, config.end, coins)
    return [_until(row, config.end) for row in ids[:, len(shown) :].tolist()]


def _drawn(logits: NDArray[np.float64], end: int, coins: np.random.Generator) -> NDArray[np.int64]:
    """Sample one of the `TOP_K` most likely tokens of each row: (n, V) -> (n,)."""
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
