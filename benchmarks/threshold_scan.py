"""A lower bound on ε whose number of guesses was not fixed: every possible number is paid for."""

import numpy as np

from dp_core.audit.canaries import Coins
from dp_core.audit.lower_bounds import GuessOutcome, OneRunBound
from dp_core.audit.one_run import Scores


def surest_first(scores: Scores, coins: Coins) -> Coins:
    """Return whether each of m guesses is right, the most certain first, for `best_epsilon`.

    Guesses alternate between the ends of the scores: the highest is guessed in, the lowest out.
    """
    order = np.argsort(-scores, kind="stable")
    half = len(order) - len(order) // 2
    ranks = np.empty(len(order), np.int64)
    ranks[0::2], ranks[1::2] = order[:half], order[half:][::-1]
    says_in = np.arange(len(order)) % 2 == 0
    return np.asarray(coins[ranks] == says_in)


def best_epsilon(bound: OneRunBound, right: Coins, delta: float, confidence: float = 0.95) -> float:
    """Return the lower bound over all numbers of guesses.

    The first r guesses are tested for every r from 1 to m, each at the error probability
    (1 − confidence)/m: a union bound over every possible number of guesses.

    Args:
        bound: the test of each claim.
        right: (m,) whether the guess on each canary is right, the most certain guess first.
        delta: δ of the claim.
        confidence: probability that the bound is right.
    """
    m = len(right)
    significance, best = (1 - confidence) / max(m, 1), 0.0
    counts, made = np.cumsum(right), np.arange(1, m + 1)
    shares = counts / made
    # After the most promising r, a single test is enough for most of the others.
    promise = shares - np.sqrt(np.maximum(shares * (1 - shares), 1 / made) / made)
    for index in np.argsort(-promise, kind="stable"):
        if 2 * counts[index] > made[index]:  # better than chance
            outcome = GuessOutcome(m, int(made[index]), int(counts[index]))
            if bound.refutes(outcome, best, delta, significance):
                best = bound.epsilon(outcome, delta, 1 - significance)
    return best
