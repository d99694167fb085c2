"""Conformance suite of lower bounds on ε: no alarm on noise, no bound above the true ε, bugs found.

A subclass names a bound and the choice of its guesses, and inherits the tests. Published bounds
that are known to be wrong must fail the same checks in `test_lower_bounds.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import stats

DELTA = 1e-5
# (scores, coins, δ, confidence) -> lower bound on ε
Auditor = Callable[[np.ndarray, np.ndarray, float, float], float]
TRIALS, SIGNIFICANCE = 1000, 0.001


def coins_of(rng: np.random.Generator, canaries: int) -> np.ndarray:
    return rng.random(canaries) < 0.5


def null_alarms(auditor: Auditor, *, canaries: int = 60, confidence: float = 0.999) -> int:
    """Return the number of 1,000 audits of uninformative scores whose bound on ε is above 0."""
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(TRIALS):
        scores, coins = rng.normal(size=canaries), coins_of(rng, canaries)
        alarms += auditor(scores, coins, DELTA, confidence) > 0
    return alarms


def randomised_response(rng, coins, epsilon: float) -> np.ndarray:
    """Release every coin, right with probability e^ε/(1 + e^ε): an ε-DP mechanism."""
    honest = rng.random(len(coins)) < 1 / (1 + math.exp(-epsilon))
    return np.where(coins == honest, 1.0, 0.0) + 1e-6 * rng.random(len(coins))


def subsampled_gaussian(rng, coins, rate: float, sigma: float, steps: int) -> np.ndarray:
    """Return each Dirac canary's component in the sum of all noised sums of DP-SGD."""
    taken = rng.binomial(steps, rate, len(coins)) * coins
    return taken + rng.normal(0, sigma * math.sqrt(steps), len(coins))


def all_or_nothing(rng, coins, delta: float) -> np.ndarray:
    """Release all coins with probability δ, else none: a (0, δ)-DP mechanism."""
    if rng.random() < delta:
        return np.where(coins, 1.0, 0.0)
    return rng.random(len(coins))


def excesses(draw, auditor: Auditor, truth: float, *, trials: int, canaries: int, delta: float):
    """Return the lower bounds at 95% confidence, and the number of them above the truth."""
    rng = np.random.default_rng(3)
    found = []
    for _ in range(trials):
        coins = coins_of(rng, canaries)
        found.append(auditor(draw(rng, coins), coins, delta, 0.95))
    return np.array(found), int(np.sum(np.array(found) > truth + 1e-3))


def most_excesses(trials: int, significance: float = 0.05) -> int:
    """Return the number of excesses that chance exceeds with probability at most 10⁻⁶."""
    return int(stats.binom.isf(1e-6, trials, significance))


class LowerBoundConformance:
    """Base class of the tests of every bound."""

    shapes: frozenset[str] = frozenset({"pure", "gaussian", "delta"})
    canaries = 400
    trials = 40
    refuting = 0.999, 1.5  # confidence, and the least bound for a large ε
    delta = DELTA  # with the correction for all thresholds, a larger δ leaves no power
    near = 0.5  # share of the true ε that the median audit exceeds

    def auditor(self, scores, coins, delta, confidence) -> float:
        raise NotImplementedError

    def test_noise_is_silent(self):
        assert null_alarms(self.auditor) <= 1

    def test_constant_scores_are_silent(self):
        rng = np.random.default_rng(1)
        found = [self.auditor(np.zeros(60), coins_of(rng, 60), DELTA, 0.999) for _ in range(TRIALS)]
        assert sum(epsilon > 0 for epsilon in found) <= 1

    def test_randomised_response_is_not_overstated(self):
        if "pure" not in self.shapes:
            return
        found, above = excesses(
            lambda rng, coins: randomised_response(rng, coins, 1.5),
            self.auditor,
            1.5,
            trials=self.trials,
            canaries=self.canaries,
            delta=self.delta,
        )
        assert above <= most_excesses(self.trials)
        assert np.median(found) > self.near * 1.5

    def test_a_subsampled_gaussian_is_not_overstated(self):
        found, above = excesses(
            lambda rng, coins: subsampled_gaussian(rng, coins, 0.5, 1.9845, 10),
            self.auditor,
            4.0,  # ε of the mechanism by PLD
            trials=self.trials,
            canaries=2 * self.canaries,
            delta=self.delta,
        )
        assert above == 0
        assert np.median(found) > self.near * 1.2

    def test_leaks_within_delta_are_no_evidence(self):
        if "delta" not in self.shapes:
            return
        _, above = excesses(
            lambda rng, coins: all_or_nothing(rng, coins, 0.1),
            self.auditor,
            0.0,
            trials=300,
            canaries=40,
            delta=0.1,
        )
        assert above <= most_excesses(300)

    def test_a_claim_below_the_truth_is_refuted(self):
        rng = np.random.default_rng(5)
        coins = coins_of(rng, 3 * self.canaries)
        confidence, claimed = self.refuting
        observations = randomised_response(rng, coins, 4.0)
        assert self.auditor(observations, coins, self.delta, confidence) > claimed
        half_the_noise = subsampled_gaussian(rng, coins, 1.0, 0.3, 1)
        assert self.auditor(half_the_noise, coins, self.delta, confidence) > claimed
