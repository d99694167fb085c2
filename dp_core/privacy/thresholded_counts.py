"""Mechanisms of partition selection: releasing words, or phrases, of private text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dp_core.privacy.accounting.profiles import (
    DiscreteGaussianTail,
    HistogramProfile,
    NewItemsProfile,
    Profile,
    SelfComposed,
)
from dp_core.privacy.accounting.rdp import Floats
from dp_core.privacy.discrete_gaussian import lattice_deviation
from dp_core.privacy.mechanism_event import (
    ADD_REMOVE,
    REPLACE,
    ZERO_OUT,
    MechanismEvent,
    compose,
)


@dataclass(frozen=True)
class ThresholdedHistogram(MechanismEvent):
    """A word histogram with discrete Gaussian noise on the words present, cut at a threshold.

    Attributes:
        words_per_unit: most distinct words N that a unit counts towards, each once.
        sigma: parameter of the discrete Gaussian.
        threshold: whole number C; noised counts below it are not released.
    """

    kind = "thresholded_histogram"
    assumed = (
        "each unit's words were bounded before anything was counted, independently of all other "
        "data",
    )
    title = "word histogram"
    conversions = frozenset({ZERO_OUT, REPLACE})
    words_per_unit: int
    sigma: float
    threshold: int
    mechanism: str = "set-counts"
    noise: str = "discrete-gaussian"

    def __post_init__(self) -> None:
        self.require(self.words_per_unit >= 1, "words_per_unit must be 1 or more")
        self.require(math.isfinite(self.sigma) and self.sigma > 0, "sigma must be above 0")
        whole = self.threshold >= 1 and self.threshold == int(self.threshold)
        self.require(whole, "threshold must be a whole number, 1 or more")
        self.require(self.mechanism == "set-counts", f"unknown mechanism {self.mechanism!r}")
        self.require(self.noise == "discrete-gaussian", f"unknown noise {self.noise!r}")

    @property
    def mu(self) -> float:
        """μ of the Gaussian on words that others hold too."""
        return math.sqrt(self.words_per_unit) / self.sigma

    @property
    def units_to_pass(self) -> float:
        """Number of units that must hold a word so that it passes half of the time."""
        return self.threshold

    @property
    def profile(self) -> HistogramProfile:
        """The privacy profile of the release."""
        return HistogramProfile(self.words_per_unit, self.sigma, int(self.threshold))

    def steps(self) -> list[SelfComposed]:
        """Return the one release."""
        return [SelfComposed(self.profile, 1)]

    def approximate_rdp(self, order: float, delta: float) -> tuple[float, float]:
        """Return (αN/2σ², Pr[a word that only this unit holds passes the threshold]).

        It has N such words at most, and they pass independently of everything else. While none
        does, the neighbours differ by 1 in at most N counts, and ρ = αN/2σ² (Canonne, Kamath and
        Steinke 2020, Proposition 5).
        """
        coin = -math.expm1(self.words_per_unit * math.log1p(-self.profile.tail))
        return order * self.words_per_unit / (2 * self.sigma**2), coin

    def noise_in_words(self) -> str:
        """Return the deviation."""
        return f"discrete Gaussian on each count, σ = {self.sigma:g} counts"

    def describe(self) -> str:
        """Return bound, noise and threshold."""
        return (
            f"counts of words, at most {self.words_per_unit} distinct words per unit, discrete "
            f"Gaussian noise of σ = {self.sigma:g} on each, noised counts below {self.threshold} "
            "dropped"
        )


_SMOOTHING = 4.0  # places: τ of the argument "Lattice" in `noise_addition`
_RULES = {  # how the weights of a unit's items are bounded, in words
    "weighted": "a unit's items share a weight of norm 1 evenly",
    "policy": "each unit in turn moves the weights of its items towards a level, by norm 1",
    "mad": "weight beyond a level goes back to the units, which give it to their other items",
    "mad2r": "weight beyond a level goes back to the units; then once more without what passed "
    "and what cannot",
    "elimination": "a unit's items share a weight of norm 1 evenly, round by round, without what "
    "passed and what fell behind",
}


@dataclass(frozen=True)
class NoisedWeights(MechanismEvent):
    """Partition selection: noised weights of items, summed over rounds and cut at thresholds.

    Weights are whole numbers of places of a lattice; noise is a discrete Gaussian of S places on
    each item's weight in each round. Given the results of earlier rounds, a unit moves the sums of
    a round by `norm(round)` places at most.

    Attributes:
        rule: how a unit's weight is shared among its items.
        items_per_unit: N, the most distinct items of a unit that count.
        levels: of the noise: S = `lattice_deviation(levels)`.
        scales: for each round, the number of places that make a weight of 1.
        checks: (first round, last round, threshold): an item whose noised weights of these rounds
            add up to the threshold or more is released after the last.
        largest: the most weight that a unit gives one item in a round, at most 1.
        rounding: places that rounding adds to the norm, where sums are rounded and not weights.
    """

    kind = "noised_weights"
    title = "partition selection"
    assumed = (
        "each unit's items were bounded before anything was counted, independently of all other "
        "data",
    )
    conversions = frozenset({ZERO_OUT, REPLACE})
    rule: str
    items_per_unit: int
    levels: int
    scales: tuple[int, ...]
    checks: tuple[tuple[int, int, int], ...]
    largest: float = 1.0
    rounding: int = 0

    def __post_init__(self) -> None:
        rounds = range(len(self.scales))
        self.require(self.rule in _RULES, f"unknown rule {self.rule!r}")
        self.require(self.items_per_unit >= 1, "items_per_unit must be 1 or more")
        self.require(self.levels in (1, 2), "levels must be 1 or 2")
        self.require(len(self.scales) > 0, "at least one round")
        whole = all(scale >= 1 and scale == int(scale) for scale in self.scales)
        self.require(whole, "scales must be whole numbers, 1 or more")
        self.require(len(self.checks) > 0, "at least one threshold")
        for check in self.checks:
            self.require(len(check) == 3, "a check is (first round, last round, threshold)")
            first, last, threshold = check
            self.require(first in rounds and last in rounds, "a check is of rounds there are")
            adds_up = first < last and self.rule == "elimination"
            self.require(first == last or adds_up, "only elimination adds rounds up")
            self.require(threshold >= 1 and threshold == int(threshold), "thresholds are whole")
        self.require(0 < self.largest <= 1, "largest must be above 0, at most 1")
        exact = self.rounding >= 0 and self.rounding == int(self.rounding)
        self.require(exact, "rounding must be a whole number, 0 or more")

    @property
    def deviation(self) -> float:
        """S: standard deviation of the noise, in places."""
        return lattice_deviation(self.levels)

    def norm(self, number: int) -> float:
        """Return the most places by which a unit moves a round's sums, in l2 norm.

        Where weight is rerouted it is √(1 + 1/d) for units of at most d items, d the larger of N
        and 4 (docs/proofs.md, "Rerouted weight").
        """
        rerouted = self.rule in ("mad", "mad2r")
        stretch = math.sqrt(1 + 1 / max(4, self.items_per_unit)) if rerouted else 1.0
        return self.scales[number] * stretch + self.rounding

    @property
    def mu(self) -> float:
        """μ of the one Gaussian that all rounds together are, on items that others hold too."""
        squares = math.fsum(self.norm(r) ** 2 for r in range(len(self.scales)))
        return math.sqrt(squares / (self.deviation**2 - _SMOOTHING**2))

    @property
    def coin(self) -> float:
        """The most probability with which items that one unit alone holds are released.

        Each of t such items in a round has a weight of at most `largest`, and of at most 1/√t
        unless the rule drops items between rounds ("elimination"). The bound takes the worst t for
        each threshold.
        """
        t = np.arange(1, self.items_per_unit + 1, dtype=np.float64)
        weight = np.full(len(t), self.largest)
        if self.rule != "elimination":
            weight = np.minimum(weight, 1 / np.sqrt(t))
        total = 0.0
        for first, last, threshold in self.checks:
            places = sum(np.ceil(weight * s) + 1 for s in self.scales[first : last + 1])
            tail = DiscreteGaussianTail(math.sqrt(last - first + 1) * self.deviation)
            passes = np.minimum(tail.upper(threshold - places), 1 - 1e-16)
            total += float(np.max(-np.expm1(t * np.log1p(-passes))))
        return min(1.0, total)

    @property
    def units_to_pass(self) -> float:
        """Number of units of N items that must hold an item so that it passes half of the time.

        Fewer may be enough: a unit of fewer items gives each of them more weight, and later rounds
        may add some.
        """
        first, last, threshold = self.checks[-1]
        weight = min(self.largest, 1 / math.sqrt(self.items_per_unit))
        return threshold / (weight * sum(self.scales[first : last + 1]))

    @property
    def profile(self) -> NewItemsProfile:
        """The privacy profile of the release."""
        return NewItemsProfile(self.mu, self.coin)

    def steps(self) -> list[SelfComposed]:
        """Return all rounds as one."""
        return [SelfComposed(self.profile, 1)]

    def approximate_rdp(self, order: float, delta: float) -> tuple[float, float]:
        """Return (αμ²/2, the probability that an item of one unit alone passes)."""
        return order * self.mu**2 / 2, self.coin

    def noise_in_words(self) -> str:
        """Return the deviation of all rounds as one, in norms of a unit."""
        return f"discrete Gaussian on each weight, in all σ = {1 / self.mu:.4g} of a unit's norm"

    def describe(self) -> str:
        """Return bound, rule, rounds, noise and thresholds, in weights of one unit."""
        scale, rounds = self.scales[0], len(self.scales)
        return (
            f"noised weights ({self.rule}), at most {self.items_per_unit} items per unit: "
            f"{_RULES[self.rule]}; {rounds} round{'s' * (rounds > 1)} of Gaussian noise, in all "
            f"σ = {1 / self.mu:.4g} times a unit's norm, noised weights below "
            f"{self.checks[-1][2] / scale:.4g} dropped"
        )


@dataclass(frozen=True)
class PhraseRounds(MechanismEvent):
    """Phrases released in rounds; the candidates of a round depend on the earlier releases.

    Whatever earlier rounds released, a round is one of `rounds`, so that all of them are dominated
    by their composition (Zhu, Dong and Wang 2022, Theorem 10, which is adaptive). DPNE: Kim et al.
    2021, arXiv:2108.02831.

    Attributes:
        rounds: the mechanism of each round.
        lengths: words of a phrase in each round.
    """

    kind = "phrase_rounds"
    title = "phrases"
    assumed = ("what a round counted was chosen by the earlier rounds' released counts alone",)
    conversions = frozenset({ZERO_OUT, REPLACE})
    rounds: tuple[MechanismEvent, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        self.require(len(self.rounds) > 0, "a phrase release needs at least one round")
        self.require(len(self.lengths) == len(self.rounds), "each round has its length")
        whole = all(isinstance(n, int) and n >= 2 for n in self.lengths)
        self.require(whole, "a phrase has two words or more")
        alike = {(part.unit, part.relation) for part in self.rounds} == {(self.unit, ADD_REMOVE)}
        self.require(alike, "the rounds protect different units or neighbours")

    def steps(self) -> list[SelfComposed]:
        """Return the steps of all rounds, with equal profiles counted as one step."""
        counted: dict[Profile, int] = {}
        for part in self.rounds:
            for profile, times in part.steps():
                counted[profile] = counted.get(profile, 0) + times
        return [SelfComposed(profile, times) for profile, times in counted.items()]

    def rdp(self, orders: Sequence[float]) -> Floats | None:
        """Return the sum of the rounds' curves, or None where one has none."""
        return compose(*self.rounds).rdp(orders)

    def approximate_rdp(self, order: float, delta: float) -> tuple[float, float]:
        """Return the sum over the rounds, each of which has a separate coin."""
        return compose(*self.rounds).approximate_rdp(order, delta)

    def describe(self) -> str:
        """Return the rounds."""
        return "phrases in rounds: " + "; then ".join(
            f"of {length} words, {part.describe()}"
            for length, part in zip(self.lengths, self.rounds, strict=True)
        )
