"""A linear-chain conditional random field over tags (Lafferty et al. 2001), in log space.

For n words with emissions e and transitions T, the score of tags y is Σₖ eₖ[yₖ] + Σₖ T[yₖ₋₁, yₖ]
and their probability is exp(score) / Z. The forward algorithm computes Z, the Viterbi algorithm the
most likely tags. The ends of a chain have no parameters: the encoder sees them as special tokens.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dp_core.nn.layers import FAR_BELOW, Tensor, shape_of

Floats = NDArray[np.float32]


def chain_losses(emissions: Tensor, transitions: Tensor, tags: Tensor, weights: Tensor) -> Tensor:
    """Return the negative log-likelihood of each row's tags in nats: (M,); 0 without words.

    Args:
        emissions: (M, K, L).
        transitions: (M, L, L) from a tag to the next; one copy per row, for per-row gradients.
        tags: (M, K) int32.
        weights: (M, K), 1 for words and 0 for padding; words come first.
    """
    m, _, n = shape_of(emissions)
    at_tags = tf.gather(emissions, tags, batch_dims=2) * weights  # (M, K)
    steps = tags[:, :-1] * n + tags[:, 1:]  # (M, K − 1)
    between = tf.gather(tf.reshape(transitions, (m, n * n)), steps, batch_dims=1) * weights[:, 1:]
    score = tf.reduce_sum(at_tags, axis=1) + tf.reduce_sum(between, axis=1)
    return (_log_partition(emissions, transitions, weights) - score) * weights[:, 0]


def _log_partition(emissions: Tensor, transitions: Tensor, weights: Tensor) -> Tensor:
    """Return log Z of each row's chain: (M,)."""

    def step(alpha: Tensor, word: tuple[Tensor, Tensor]) -> Tensor:
        emission, weight = word  # (M, L), (M,)
        ways = alpha[:, :, None] + transitions + emission[:, None, :]  # (M, from, to)
        return tf.where(weight[:, None] > 0, tf.reduce_logsumexp(ways, axis=1), alpha)

    by_word = tf.transpose(emissions, (1, 0, 2)), tf.transpose(weights)  # (K, M, L), (K, M)
    later = tuple(values[1:] for values in by_word)
    if later[0].shape[0] == 0:
        return tf.reduce_logsumexp(emissions[:, 0], axis=1)
    alphas = tf.scan(step, later, initializer=by_word[0][0])
    return tf.reduce_logsumexp(alphas[-1], axis=1)


def best_tags(
    emissions: Floats,
    transitions: Floats,
    may_begin: NDArray[np.bool_],
    may_follow: NDArray[np.bool_],
) -> NDArray[np.int32]:
    """Return the most likely allowed tags of one chain by the Viterbi algorithm: (n,).

    Args:
        emissions: (n, L).
        transitions: (L, L).
        may_begin: (L,), true for tags that may be the first.
        may_follow: (L, L), true at [i, j] if tag j may follow tag i.
    """
    ways = np.where(may_follow, transitions.astype(np.float64), FAR_BELOW)
    best = np.where(may_begin, emissions[0].astype(np.float64), FAR_BELOW)  # (L,)
    came_from = np.zeros(emissions.shape, np.int32)
    for k in range(1, len(emissions)):
        through = best[:, None] + ways  # (from, to)
        came_from[k] = through.argmax(0)
        best = through.max(0) + emissions[k]
    tags = np.zeros(len(emissions), np.int32)
    tags[-1] = best.argmax()
    for k in range(len(emissions) - 1, 0, -1):
        tags[k - 1] = came_from[k, tags[k]]
    return tags
