"""Calibration of all rounds of a phrase release together, to one target (ε, δ).

Every round gets the same share of the budget: the same bound N, the same σ, the same threshold.
The ε of all rounds is computed by PLD, as the ledger computes what it charges.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from scipy.optimize import brentq

from dp_core.config.privacy import MOST_PHRASE, MOST_ROUNDS, refuse_large_delta
from dp_core.errors import BadInput, PlanError
from dp_core.privacy.accounting import epsilon_pld
from dp_core.privacy.accounting.calibration import round_up
from dp_core.privacy.accounting.profiles import gaussian_delta, upper_tail
from dp_core.privacy.mechanisms import PhraseRounds, PrivacyUnit, ThresholdedHistogram
from dp_core.vocabulary.calibration import HistogramPlan, check_target

_TAIL_SHARE = 0.5  # of δ, for phrases that one unit alone holds; the rest is for shared counts
_PRECISION = 1e-3  # of σ


@dataclass(frozen=True)
class PhrasePlan:
    """A phrase release in rounds: what is drawn, and the (ε, δ) that all rounds earn together.

    *Formal guarantee.* Adding or removing one unit, which in each round counts towards at most
    `per_unit` phrases, each once: (ε, δ)-DP for all rounds' released counts together.

    Attributes:
        lengths: words of a phrase in each round, rising.
        per_unit: N, the most distinct phrases of a unit that count in one round.
        sigma: parameter of the discrete Gaussian noise of every round, in counts.
        threshold: whole number C; noised counts below it are not released.
        epsilon, delta: claimed, of all rounds.
        unit: what is added or removed (None: a bare calculation).
        declared_units: public upper bound on the number of units, if the plan states one.

    Raises:
        PlanError: noise and threshold do not earn (ε, δ), δ is not below 1/declared_units, or the
            lengths do not rise.
    """

    lengths: tuple[int, ...]
    per_unit: int
    sigma: float
    threshold: int
    epsilon: float
    delta: float
    unit: PrivacyUnit | None = None
    declared_units: int | None = None

    def __post_init__(self) -> None:
        refuse_lengths(self.lengths)
        if self.declared_units is not None:
            refuse_large_delta([self.delta], self.declared_units, "phrase plan, delta")
        earned = epsilon_pld(self.event(), self.delta)
        if not earned <= self.epsilon:
            raise PlanError(
                f"{len(self.lengths)} rounds of σ={self.sigma:g} and threshold {self.threshold} "
                f"give ε={earned:.3g} at δ={self.delta:g}, not {self.epsilon:g}",
                where="phrase plan",
                fix="Calibrate: dp_core.phrases.calibration.calibrate.",
            )

    def event(self) -> PhraseRounds:
        """Return all rounds as one mechanism, for the ledger."""
        one = ThresholdedHistogram(self.per_unit, self.sigma, self.threshold, unit=self.unit)
        return PhraseRounds((one,) * len(self.lengths), self.lengths, unit=self.unit)

    def round_plan(self) -> HistogramPlan:
        """Return one round as the histogram that it is, with the ε of its share of δ."""
        share = self.delta / len(self.lengths)
        event = self.event().rounds[0]
        assert isinstance(event, ThresholdedHistogram)  # noqa: S101 - narrows the type
        epsilon = epsilon_pld(event, share)
        return HistogramPlan(
            self.per_unit, self.sigma, self.threshold, epsilon, share, unit=self.unit
        )


def refuse_lengths(lengths: tuple[int, ...]) -> None:
    """Refuse lengths of phrases that are not one to eight rising numbers from 2 to 16.

    Raises:
        PlanError: they are not.
    """
    rising = list(lengths) == sorted(set(lengths))
    in_range = all(2 <= n <= MOST_PHRASE for n in lengths)
    if not (rising and in_range and 1 <= len(lengths) <= MOST_ROUNDS):
        raise PlanError(
            f"lengths must rise, from 2 to {MOST_PHRASE} words, in at most {MOST_ROUNDS} rounds",
            where="phrases_lengths",
            fix="Use for example 3,5.",
        )


def calibrate(
    epsilon: float,
    delta: float,
    lengths: tuple[int, ...],
    per_unit: int,
    *,
    unit: PrivacyUnit | None = None,
    declared_units: int | None = None,
) -> PhrasePlan:
    """Return the plan with (nearly) the least noise whose rounds are charged at most ε together.

    Half of δ is for phrases that one unit alone holds; it fixes the threshold for a given σ.

    Args:
        epsilon: target ε > 0. delta: target δ in (0, 1).
        lengths: words of a phrase in each round.
        per_unit: N, the most distinct phrases of a unit that count in one round.

    Raises:
        BadInput: a target out of range, or one that no noise reaches.
        PlanError: lengths that do not rise, or δ is not below 1/declared_units.
    """
    refuse_lengths(lengths)
    check_target(epsilon, delta, per_unit)
    sigma, threshold = _least_noise(epsilon, delta, len(lengths), per_unit)
    return PhrasePlan(lengths, per_unit, sigma, threshold, epsilon, delta, unit, declared_units)


@functools.lru_cache(maxsize=64)  # several steps of a run ask for the same plan
def _least_noise(epsilon: float, delta: float, rounds: int, per_unit: int) -> tuple[float, int]:
    """Return the least σ, by bisection, and its threshold, that are charged at most ε."""
    tail = delta * _TAIL_SHARE / (rounds * per_unit)

    def charged(sigma: float) -> tuple[bool, int]:
        threshold = threshold_of(sigma, tail)
        one = ThresholdedHistogram(per_unit, sigma, threshold)
        event = PhraseRounds((one,) * rounds, tuple(range(2, 2 + rounds)))
        return epsilon_pld(event, delta) <= epsilon, threshold

    # What shared counts alone need: a Gaussian at the δ that the lone phrases leave.
    need = math.sqrt(rounds * per_unit)
    mu = brentq(lambda mu: gaussian_delta(epsilon, mu) - delta * (1 - _TAIL_SHARE), 1e-6, 1e3)
    high = round_up(need / mu)
    low = 0.95 * high
    while charged(low)[0]:
        low, high = low / 2, low
    while not charged(high)[0]:
        low, high = high, round_up(1.02 * high)
        if high > 1e7:
            raise BadInput(
                f"no noise reaches ε={epsilon:g} at δ={delta:g}",
                where="phrases_epsilon, phrases_delta",
                fix="Ask for more ε or δ, or for fewer phrases per unit.",
            )
    while high > low * (1 + _PRECISION):
        middle = round_up((low * high) ** 0.5)
        if not low < middle < high:
            break
        low, high = (low, middle) if charged(middle)[0] else (middle, high)
    return high, charged(high)[1]


def threshold_of(sigma: float, tail: float) -> int:
    """Return the least threshold that a lone phrase's count of 1 passes with chance ≤ `tail`."""
    low, high = 0, 1
    while upper_tail(high - 1, sigma) > tail:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if upper_tail(middle - 1, sigma) > tail else (low, middle)
    return high
