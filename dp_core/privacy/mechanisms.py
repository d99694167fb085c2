"""The mechanisms: training with Gaussian noise, and partition selection of words and phrases.

A mechanism is one class of this file, or of a file that this one imports, which registers its kind.
Import mechanisms from here: reading a ledger's entries needs every kind to be registered.
"""

# ruff: noqa: F401 - other files import every mechanism from here

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from dp_core.privacy.accounting import profiles
from dp_core.privacy.discrete_gaussian import LATTICE_DEVIATION
from dp_core.privacy.lattice import SMOOTHING
from dp_core.privacy.mechanism_event import (
    ADD_REMOVE,
    REPLACE,
    ZERO_OUT,
    Composed,
    Composition,
    MechanismEvent,
    NeighboringRelation,
    PrivacyUnit,
    Unaccounted,
    compose,
)
from dp_core.privacy.private_selection import RandomCountSelection

# --- training: Gaussian noise on sums of clipped gradients over sampled batches

Phases = tuple[tuple[float, float, int], ...]  # (rate or batch, noise multiplier σ, steps)


def _check_noise(event: MechanismEvent, sigma: float, steps: int) -> None:
    message = f"noise multiplier {sigma} is not finite and above 0"
    event.require(math.isfinite(sigma) and sigma > 0, message)
    event.require(steps >= 1 and steps == int(steps), f"steps {steps} is not 1 or more")


class _PhasedGaussian(MechanismEvent):
    """Gaussian sums over sampled batches, phase by phase, composed in order."""

    every_iterate = True  # the composition of its updates, each of which releases its noised sum
    phases: Phases

    def __post_init__(self) -> None:
        self.require(len(self.phases) > 0, "an event needs at least one phase")
        for phase in self.phases:
            self.require(len(phase) == 3, "a phase is (rate or batch, noise multiplier, steps)")
            _check_noise(self, *phase[1:])
            self._check_size(phase[0])
        plain = tuple((float(a), float(sigma), int(steps)) for a, sigma, steps in self.phases)
        object.__setattr__(self, "phases", plain)

    def _check_size(self, size: float) -> None:
        self.require(0 < size <= 1, f"sampling rate {size} is not in (0, 1]")

    def _turns(self, updates: int) -> int:
        """Return the most updates of a phase that may draw one unit."""
        return updates

    def _step(self, size: float, mu: float) -> profiles.Profile:
        return profiles.SubsampledGaussian(size, mu)

    def steps(self) -> list[profiles.SelfComposed]:
        """Return the step of each phase."""
        return [
            profiles.SelfComposed(self._step(a, 1 / s), self._turns(n)) for a, s, n in self.phases
        ]


@dataclass(frozen=True)
class PoissonGaussian(_PhasedGaussian):
    """Gaussian sums over Poisson samples, phase by phase (Mironov, Talwar and Zhang 2019).

    Attributes:
        phases: (sampling rate q, noise multiplier σ, steps), composed in order.
    """

    kind = "poisson_gaussian"
    phases: Phases

    @classmethod
    def single(cls, sampling_rate: float, noise_multiplier: float, steps: int, **more: Any) -> Self:
        """Return the event with one phase."""
        return cls(phases=((sampling_rate, noise_multiplier, steps),), **more)


@dataclass(frozen=True)
class TruncatedPoissonGaussian(_PhasedGaussian):
    """Poisson samples cut to at most `cap` units, uniformly at random over the whole batch.

    Attributes:
        declared_units: upper bound on the number of units from which one samples.
        cap: the largest batch, in units, over all shards together.
        phases: (sampling rate q, noise multiplier σ, steps).
    """

    kind = "truncated_poisson_gaussian"
    declared_units: int
    cap: int
    phases: Phases

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.declared_units >= 1, "declared_units must be 1 or more")
        self.require(self.cap >= 1, "cap must be 1 or more")

    def _step(self, size: float, mu: float) -> profiles.Profile:
        return profiles.TruncatedSubsampledGaussian(self.declared_units, self.cap, size, mu)


@dataclass(frozen=True)
class CyclicPoissonGaussian(_PhasedGaussian):
    """Noise of at most b bands on Poisson samples from b parts of the units, taken in turn.

    A unit lies in one part, so of n updates ⌈n/b⌉ at most may draw it, each with the rate q within
    the part. Each of them is one Gaussian mechanism over the b updates that its row of the strategy
    reaches, whatever the others released meanwhile, and these stretches are disjoint: together
    they are ⌈n/b⌉ Poisson-subsampled Gaussians of noise multiplier σ (Choquette-Choo et al. 2023,
    arXiv:2306.08153, Theorem 4; docs/proofs.md, "Correlated noise", for parts drawn by coins).

    Attributes:
        cycle: b, the number of parts.
        phases: (sampling rate q within a part, noise multiplier σ for columns of norm 1, updates).
    """

    kind = "cyclic_poisson_gaussian"
    cycle: int
    phases: Phases

    def __post_init__(self) -> None:
        whole = type(self.cycle) is int and self.cycle >= 1
        self.require(whole, "cycle must be a whole number, 1 or more")
        super().__post_init__()

    def _turns(self, updates: int) -> int:
        return -(-updates // self.cycle)


@dataclass(frozen=True)
class FixedSizeGaussian(_PhasedGaussian):
    """Gaussian sums over uniformly drawn batches of a fixed size, without replacement.

    The relation is replace-one over a public number of slots, of which some may be empty (an
    emptied slot is one way of replacing). `slots` is the number sampled from, not an upper bound:
    with fewer each unit is drawn more often.

    Attributes:
        slots: number of slots from which one samples.
        phases: (batch in slots, noise multiplier σ for clip norm 1, steps).
    """

    kind = "fixed_size_gaussian"
    neighbours = REPLACE  # no bound for add-or-remove is claimed
    slots: int
    phases: Phases

    def __post_init__(self) -> None:
        self.require(self.slots >= 1, "slots must be 1 or more")
        super().__post_init__()

    def _check_size(self, size: float) -> None:
        whole = 1 <= size <= self.slots and size == int(size)
        self.require(whole, f"batch {size} is not a whole number from 1 to {self.slots}")

    def _step(self, size: float, mu: float) -> profiles.Profile:
        return profiles.FixedSizeProfile(self.slots, int(size), mu)


@dataclass(frozen=True)
class Gaussian(MechanismEvent):
    """`count` Gaussian mechanisms without sampling: every unit takes part in each.

    Together they are one Gaussian mechanism with μ = √count/σ (Dong, Roth and Su 2022, Corollary
    3.3).
    """

    kind = "gaussian"
    every_iterate = True  # all of them are released
    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        _check_noise(self, self.noise_multiplier, self.count)

    def steps(self) -> list[profiles.SelfComposed]:
        """Return all of them as one."""
        mu = math.sqrt(self.count) / self.noise_multiplier
        return [profiles.SelfComposed(profiles.gaussian(mu), 1)]


@dataclass(frozen=True)
class ShuffledGaussian(Gaussian):
    """Batches cut from shuffled epochs: each unit takes part once an epoch, unamplified.

    Whatever the permutation, one epoch is one Gaussian mechanism for each unit (the other
    batches do not depend on it), so `count` epochs are as many Gaussian mechanisms, adaptively
    composed. The relation is zero-out: adding a unit would shift all later batches.
    """

    kind = "shuffled_gaussian"
    neighbours = ZERO_OUT


# --- partition selection: releasing words, or phrases, of private text


@dataclass(frozen=True)
class ThresholdedHistogram(MechanismEvent):
    """A word histogram with discrete Gaussian noise on the words present, cut at a threshold.

    Attributes:
        words_per_unit: most distinct words N that a unit counts towards, each once.
        sigma: parameter of the discrete Gaussian.
        threshold: whole number C; noised counts below it are not released.
    """

    kind = "thresholded_histogram"
    words_per_unit: int
    sigma: float
    threshold: int

    def __post_init__(self) -> None:
        self.require(self.words_per_unit >= 1, "words_per_unit must be 1 or more")
        self.require(math.isfinite(self.sigma) and self.sigma > 0, "sigma must be above 0")
        whole = self.threshold >= 1 and self.threshold == int(self.threshold)
        self.require(whole, "threshold must be a whole number, 1 or more")

    @property
    def mu(self) -> float:
        """μ of the Gaussian on words that others hold too."""
        return math.sqrt(self.words_per_unit) / self.sigma

    @property
    def units_to_pass(self) -> float:
        """Number of units that must hold a word so that it passes half of the time."""
        return self.threshold

    @property
    def profile(self) -> profiles.HistogramProfile:
        """The privacy profile of the release."""
        return profiles.HistogramProfile(self.words_per_unit, self.sigma, int(self.threshold))

    def steps(self) -> list[profiles.SelfComposed]:
        """Return the one release."""
        return [profiles.SelfComposed(self.profile, 1)]

    def approximate_rdp(self, order: float, delta: float) -> tuple[float, float]:
        """Return (αN/2σ², Pr[a word that only this unit holds passes the threshold]).

        It has N such words at most, and they pass independently of everything else. While none
        does, the neighbours differ by 1 in at most N counts, and ρ = αN/2σ² (Canonne, Kamath and
        Steinke 2020, Proposition 5).
        """
        return order * self.words_per_unit / (2 * self.sigma**2), self.profile.coin


@dataclass(frozen=True)
class NoisedWeights(MechanismEvent):
    """Partition selection: noised weights of items, summed over rounds and cut at thresholds.

    Weights are whole numbers of places of a lattice; noise is a discrete Gaussian of S places on
    each item's weight in each round. Given the results of earlier rounds, a unit moves the sums of
    a round by `norm(round)` places at most.

    Attributes:
        items_per_unit: N, the most distinct items of a unit that count.
        scales: for each round, the number of places that make a weight of 1.
        checks: (first round, last round, threshold): an item whose noised weights of these rounds
            add up to the threshold or more is released after the last.
        largest: the most weight that a unit gives one item in a round, at most 1.
    """

    kind = "noised_weights"
    items_per_unit: int
    scales: tuple[int, ...]
    checks: tuple[tuple[int, int, int], ...]
    largest: float = 1.0

    def __post_init__(self) -> None:
        rounds = range(len(self.scales))
        self.require(self.items_per_unit >= 1, "items_per_unit must be 1 or more")
        self.require(len(self.scales) > 0, "at least one round")
        whole = all(scale >= 1 and scale == int(scale) for scale in self.scales)
        self.require(whole, "scales must be whole numbers, 1 or more")
        self.require(len(self.checks) > 0, "at least one threshold")
        for check in self.checks:
            self.require(len(check) == 3, "a check is (first round, last round, threshold)")
            first, last, threshold = check
            self.require(first in rounds and last in rounds, "a check is of rounds there are")
            self.require(first <= last, "a check adds up rounds in their order")
            self.require(threshold >= 1 and threshold == int(threshold), "thresholds are whole")
        self.require(0 < self.largest <= 1, "largest must be above 0, at most 1")

    @property
    def deviation(self) -> float:
        """S: standard deviation of the noise, in places."""
        return LATTICE_DEVIATION

    def norm(self, number: int) -> float:
        """Return the most places by which a unit moves a round's sums, in l2 norm."""
        return float(self.scales[number])

    def largest_weights(self) -> profiles.Floats:
        """Return the most weight of each of t = 1 … N items that one unit alone holds: (N,).

        Items are dropped between rounds, so it is `largest` for every t.
        """
        return np.full(self.items_per_unit, self.largest)

    @property
    def mu(self) -> float:
        """μ of the one Gaussian that all rounds together are, on items that others hold too."""
        squares = math.fsum(self.norm(r) ** 2 for r in range(len(self.scales)))
        return math.sqrt(squares / (self.deviation**2 - SMOOTHING**2))

    @property
    def coin(self) -> float:
        """The most probability with which items that one unit alone holds are released.

        The bound takes the worst number t of such items for each threshold.
        """
        t = np.arange(1, self.items_per_unit + 1, dtype=np.float64)
        weight, total = self.largest_weights(), 0.0
        for first, last, threshold in self.checks:
            places = sum(np.ceil(weight * s) + 1 for s in self.scales[first : last + 1])
            tail = profiles.DiscreteGaussianTail(math.sqrt(last - first + 1) * self.deviation)
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
    def profile(self) -> profiles.NewItemsProfile:
        """The privacy profile of the release."""
        return profiles.NewItemsProfile(self.mu, self.coin)

    def steps(self) -> list[profiles.SelfComposed]:
        """Return all rounds as one."""
        return [profiles.SelfComposed(self.profile, 1)]

    def approximate_rdp(self, order: float, delta: float) -> tuple[float, float]:
        """Return (αμ²/2, the probability that an item of one unit alone passes)."""
        return order * self.mu**2 / 2, self.coin


@dataclass(frozen=True)
class PhraseRounds(Composition):
    """Phrases released in rounds; the candidates of a round depend on the earlier releases.

    Whatever earlier rounds released, a round is one of `rounds`, so that all of them are dominated
    by their composition (Zhu, Dong and Wang 2022, Theorem 10, which is adaptive). DPNE: Kim et al.
    2021, arXiv:2108.02831.

    Attributes:
        rounds: the mechanism of each round.
        lengths: words of a phrase in each round.
    """

    kind = "phrase_rounds"
    rounds: tuple[MechanismEvent, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        self.require(len(self.rounds) > 0, "a phrase release needs at least one round")
        self.require(len(self.lengths) == len(self.rounds), "each round has its length")
        whole = all(isinstance(n, int) and n >= 2 for n in self.lengths)
        self.require(whole, "a phrase has two words or more")
        alike = {(part.unit, part.relation) for part in self.rounds} == {(self.unit, ADD_REMOVE)}
        self.require(alike, "the rounds protect different units or neighbours")

    def steps(self) -> list[profiles.SelfComposed]:
        """Return the steps of all rounds, with equal profiles counted as one step."""
        counted: dict[profiles.Profile, int] = {}
        for profile, times in super().steps():
            counted[profile] = counted.get(profile, 0) + times
        return [profiles.SelfComposed(profile, times) for profile, times in counted.items()]
