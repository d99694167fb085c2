"""Lower bounds on ε from one training run with m canaries, each in or out by a fair coin.

Each canary is a whole privacy unit. An independent fair coin includes it in the training data or
leaves it out. An adversary sees the release and guesses the coins of r canaries, v of them rightly.
Too many right guesses contradict the claim. Two theorems bound the number of right guesses:

* `BINOMIAL` (Steinke, Nasr and Jagielski 2023, arXiv:2305.08846, Theorem 5.2). Under
  (ε, δ)-DP, with W ~ Binomial(r, e^ε/(1 + e^ε)),

      P[right ≥ v] ≤ P[W ≥ v] + 2mδ · max_{1≤i≤v} P[v − i ≤ W < v]/i.

* `TRADE_OFF` (Mahloujifar, Melis and Chaudhuri 2024, arXiv:2410.22235). Let p_i be the
  probability of i right guesses, and x(·) a claimed trade-off. Flip the coin of a random canary: if
  its guess was right, the number of right guesses falls from i to i − 1. So for k ≥ 1

      Σ_{i≥k−1} (r − i)·p_i/m ≥ x(Σ_{i≥k} i·p_i/m),

  by the convexity of x. For P[right ≥ v] = α, these inequalities force the p_i to add up to more
  than 1 unless α is small. The bound uses the whole curve, which is stronger than any one point
  (ε, δ) of the curve. With the curve of a single (ε, δ) the bound has no further assumption.

Both theorems assume independent coins, but not that the training treats canaries independently. The
bounds are void if training or guessing learns the coins by another way than the model, if r is
chosen with knowledge of the coins, or if a fixed split replaces the coins. If a threshold is chosen
after the scores are known, the error probability must be divided by the number m of possible
thresholds, not by the few that the scores favour (docs/audits.md).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtrc, expit

from dp_core.errors import BadInput
from dp_core.privacy.accounting.tradeoff import GaussianTradeOff, PrivacyProfile, TradeOff

_TOLERANCE = 1e-4  # precision of ε
_STRIDE = 0.25  # step of the upward search in ε; every step below the bound is refuted
_LARGEST = 50.0  # upper end of the search in ε, which no audit reaches


@dataclass(frozen=True)
class GuessOutcome:
    """The number of canaries, guesses and right guesses of an audit.

    Attributes:
        canaries: m, the number of canaries with a coin.
        guesses: r, the number of guesses; the other canaries are abstentions.
        right: v, the number of right guesses.

    Raises:
        BadInput: 0 ≤ v ≤ r ≤ m does not hold.
    """

    canaries: int
    guesses: int
    right: int

    def __post_init__(self) -> None:
        if not 0 <= self.right <= self.guesses <= self.canaries:
            raise BadInput(
                f"{self.right} right of {self.guesses} guesses on {self.canaries} canaries",
                where="audit",
            )


def binomial_p_value(outcome: GuessOutcome, epsilon: float, delta: float) -> float:
    """Return the upper bound on P[right ≥ v] under (ε, δ)-DP (Steinke et al., Theorem 5.2)."""
    m, r, v = outcome.canaries, outcome.guesses, outcome.right
    q = float(expit(epsilon))
    tail = float(bdtrc(v - 1, r, q)) if v else 1.0  # P[W ≥ v]
    if delta == 0 or v == 0:
        return tail
    i = np.arange(1, v + 1)
    nearly = np.where(i < v, bdtrc(np.maximum(v - i - 1, 0), r, q), 1.0) - tail  # P[v − i ≤ W < v]
    return min(1.0, tail + 2 * m * delta * float(np.max(nearly / i)))


def trade_off_refuted(outcome: GuessOutcome, trade_off: TradeOff, significance: float) -> bool:
    """Return whether P[right ≥ v] < `significance` under the trade-off.

    Let h_k = Σ_{i≥k} (r − i)p_i/m and c_k = Σ_{i≥k} i·p_i/m. The theorem states h_{k−1} ≥ x(c_k).
    By definition, c_{k−1} = c_k + (h_{k−1} − h_k)·(k − 1)/(r − k + 1). For P[right ≥ v] = α the
    smallest start is c_v = αv/m, h_v = α(r − v)/m, and every step increases with its predecessor.
    All p_i add up to (c_0 + h_0)·m/r, which must not exceed 1.
    """
    m, r, v = outcome.canaries, outcome.guesses, outcome.right
    if r == 0:
        return False
    right, wrong = significance * v / m, significance * (r - v) / m
    for i in range(v - 1, -1, -1):
        least = trade_off.least_false_positive_rate(min(1.0, right))
        if least <= wrong:  # the remaining steps add nothing
            break
        right += (least - wrong) * i / (r - i)
        wrong = least
        if right + wrong > r / m:
            return True
    return right + wrong > r / m


def trade_off_p_value(outcome: GuessOutcome, trade_off: TradeOff) -> float:
    """Return the smallest significance at which the trade-off is refuted, rounded up.

    The result is at least 10⁻¹²; smaller p-values are not computed.
    """
    if not trade_off_refuted(outcome, trade_off, 1.0 - 1e-12):
        return 1.0
    low, high = math.log(1e-12), 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        if trade_off_refuted(outcome, trade_off, math.exp(middle)):
            high = middle
        else:
            low = middle
    return math.exp(high)


@dataclass(frozen=True)
class OneRunBound:
    """A family of claims, one for each ε at a δ, with a test that can refute each claim.

    Every bound passes one conformance suite: null models, mechanisms of known ε, planted bugs
    (tests/dp_core/audit/test_lower_bounds.py).

    Attributes:
        name: name of the bound.
        refutes: (outcome, ε, δ, significance) -> whether the outcome has probability at most
            `significance` under the claim.
    """

    name: str
    refutes: Callable[[GuessOutcome, float, float, float], bool]

    def epsilon(self, outcome: GuessOutcome, delta: float, confidence: float = 0.95) -> float:
        """Return the lower bound on ε at δ: every smaller ε is refuted. 0 if no ε is refuted.

        Args:
            outcome: outcome of guesses whose number was fixed before the coins were seen.
            delta: δ of the claim.
            confidence: probability that the bound is right, 1 − significance.
        """
        if not 0 < confidence < 1:
            raise BadInput(f"{confidence} is not between 0 and 1", where="confidence")
        if not 0 <= delta < 1:
            raise BadInput(f"{delta} is not a probability below 1", where="delta")

        def refutes(epsilon: float) -> bool:
            return self.refutes(outcome, epsilon, delta, 1 - confidence)

        if not refutes(0.0):
            return 0.0
        low, high = 0.0, _STRIDE
        while refutes(high) and high < _LARGEST:
            low, high = high, high + _STRIDE
        while high - low > _TOLERANCE:
            middle = (low + high) / 2
            low, high = (middle, high) if refutes(middle) else (low, middle)
        return low

    def power(self, canaries: int, guesses: int, delta: float, confidence: float = 0.95) -> float:
        """Return the largest ε that an audit of this size can refute: all of its guesses right.

        The power is known before the training. About 3·e^ε right guesses refute ε at 95%.
        """
        return self.epsilon(GuessOutcome(canaries, guesses, guesses), delta, confidence)


def _refuted_by_tail(
    outcome: GuessOutcome, epsilon: float, delta: float, significance: float
) -> bool:
    likely = binomial_p_value(outcome, epsilon, 0.0) > significance  # a quick test first
    return not likely and binomial_p_value(outcome, epsilon, delta) <= significance


def _refuted_by_claim(
    outcome: GuessOutcome, epsilon: float, delta: float, significance: float
) -> bool:
    return trade_off_refuted(outcome, PrivacyProfile.of_claim(epsilon, delta), significance)


def _refuted_by_gaussian(
    outcome: GuessOutcome, epsilon: float, delta: float, significance: float
) -> bool:
    if delta == 0:
        return False  # no Gaussian mechanism has a finite ε at δ = 0
    return trade_off_refuted(outcome, GaussianTradeOff.of_epsilon(epsilon, delta), significance)


# Steinke, Nasr and Jagielski 2023: refutes (ε, δ)-DP by the tail of a binomial.
BINOMIAL = OneRunBound("binomial", _refuted_by_tail)
# Mahloujifar, Melis and Chaudhuri 2024, with only the trade-off of (ε, δ)-DP assumed.
TRADE_OFF = OneRunBound("trade-off", _refuted_by_claim)
# The trade-off bound for Gaussian curves, stated as the ε of a curve at δ. Every smaller μ-GDP is
# refuted without an assumption. The conclusion that the training's ε at δ is larger assumes that
# its trade-off is Gaussian, as it nearly is for noised sums over many updates.
GAUSSIAN = OneRunBound("Gaussian", _refuted_by_gaussian)
BOUNDS = (BINOMIAL, TRADE_OFF, GAUSSIAN)
