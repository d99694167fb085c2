"""A feed-forward language model, which predicts a token from a window of earlier tokens.

Bengio et al. 2003 (JMLR 3:1137-1155), with ReLU instead of tanh and without direct connections, as
in Kerrigan et al. 2020 (arXiv:2009.05886). Shapes: M rows, S tokens, embeddings of size D, a window
of W tokens.
"""

from __future__ import annotations

import tensorflow as tf

from dp_core.models.config import FeedForwardConfig
from dp_core.models.parameters import HEAD, WORD
from dp_core.nn.layers import Layers, Tensor, shape_of


def feed_forward_logits(
    layers: Layers, config: FeedForwardConfig, ids: Tensor, positions: Tensor | None = None
) -> Tensor:
    """Return the logits of the next token; arguments and result are as in `causal_logits`."""
    m, s = shape_of(ids)
    before = tf.fill((m, config.window - 1), config.begin)  # left padding of the first windows
    every = layers.embed(tf.concat([before, ids], axis=1), None, WORD, None, None)
    if positions is None:  # (M, S + W − 1, D): the window of position i begins at i
        windows = tf.concat([every[:, i : i + s] for i in range(config.window)], axis=2)
    else:
        windows = tf.gather(every, positions[:, :, None] + tf.range(config.window), batch_dims=1)
    x = tf.reshape(windows, (-1, config.window * config.hidden))
    for i in range(config.layers):
        x = tf.nn.relu(layers.linear(f"layer_{i}/intermediate", x))
    return layers.linear(HEAD, x)
