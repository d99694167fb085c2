"""Lower bounds from a number of guesses that was not fixed before the coins were seen."""

import numpy as np

from dp_core.audit.lower_bounds import GuessOutcome, OneRunBound


def surest_first(scores: np.ndarray, coins: np.ndarray) -> np.ndarray:
    """Return whether each guess is right, from the ends of the scores: highest in, lowest out."""
    order = np.argsort(-scores, kind="stable")
    half = len(order) - len(order) // 2
    ranks = np.empty(len(order), np.int64)
    ranks[0::2], ranks[1::2] = order[:half], order[half:][::-1]
    return np.asarray(coins[ranks] == (np.arange(len(order)) % 2 == 0))


def best_epsilon(bound: OneRunBound, right: np.ndarray, delta: float, confidence: float) -> float:
    """Return the bound over every r of the first r guesses, by a union bound over r."""
    m = len(right)
    significance, best = (1 - confidence) / max(m, 1), 0.0
    counts, made = np.cumsum(right), np.arange(1, m + 1)
    shares = counts / made
    # After the most promising r, a single test is enough for most of the others.
    promise = shares - np.sqrt(np.maximum(shares * (1 - shares), 1 / made) / made)
    for index in np.argsort(-promise, kind="stable"):
        if 2 * counts[index] > made[index]:  # better than chance
            outcome = GuessOutcome(m, int(made[index]), int(counts[index]))
            best = bound._search(outcome, delta, significance, best)
    return best
