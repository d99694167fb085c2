"""Mechanisms of training: Gaussian noise on sums of clipped gradients over sampled batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from dp_core.privacy.accounting.profiles import (
    FixedSizeProfile,
    Profile,
    SelfComposed,
    SubsampledGaussian,
    TruncatedSubsampledGaussian,
    gaussian,
)
from dp_core.privacy.mechanism_event import REPLACE, ZERO_OUT, MechanismEvent

Phases = tuple[tuple[float, float, int], ...]  # (rate or batch, noise multiplier σ, steps)
_TRAINING = (
    "every row of a unit was clipped together with the unit's other rows",
    "clipped gradients are summed in float32, and the ε is that of exact sums; noise is exact",
)


def _check_noise(event: MechanismEvent, sigma: float, steps: int) -> None:
    message = f"noise multiplier {sigma} is not finite and above 0"
    event.require(math.isfinite(sigma) and sigma > 0, message)
    event.require(steps >= 1 and steps == int(steps), f"steps {steps} is not 1 or more")


@dataclass(frozen=True)
class _PhasedGaussian(MechanismEvent):
    """Gaussian sums over sampled batches, phase by phase, composed in order."""

    title = "DP training"
    every_iterate = True  # the composition of its updates, each of which releases its noised sum
    _sampled: ClassVar[str] = "sampling rate"

    def _check_phases(self, possible: Callable[[float], bool], impossible: str) -> None:
        phases: Phases = self.phases  # type: ignore[attr-defined]
        self.require(len(phases) > 0, "an event needs at least one phase")
        for phase in phases:
            self.require(len(phase) == 3, "a phase is (rate or batch, noise multiplier, steps)")
            _check_noise(self, *phase[1:])
            self.require(possible(phase[0]), impossible.format(phase[0]))
        plain = tuple((float(a), float(sigma), int(steps)) for a, sigma, steps in phases)
        object.__setattr__(self, "phases", plain)

    def _check_rates(self) -> None:
        self._check_phases(lambda rate: 0 < rate <= 1, "sampling rate {} is not in (0, 1]")

    def _rates(self) -> Phases:
        return self.phases  # type: ignore[attr-defined, no-any-return]

    def _step(self, rate_or_batch: float, mu: float) -> Profile:
        raise NotImplementedError

    def _batches(self) -> str:
        raise NotImplementedError

    def steps(self) -> list[SelfComposed]:
        """Return the step of each phase."""
        phases: Phases = self.phases  # type: ignore[attr-defined]
        return [SelfComposed(self._step(a, 1 / sigma), steps) for a, sigma, steps in phases]

    def unamplified_mu(self, sensitivity: float) -> float:
        """Return √(Σ epochs·(sensitivity/σ)²), an epoch having ⌊1/q⌋ whole batches."""
        total = 0.0
        for rate, sigma, steps in self._rates():
            batches_per_epoch = math.floor(1 / rate + 1e-9)  # 1/q whole but for rounding
            total += math.ceil(steps / batches_per_epoch) * (sensitivity / sigma) ** 2
        return math.sqrt(total)

    def sampling_in_words(self) -> str:
        """Return how batches are drawn, and the rate or size of each phase."""
        sizes = ", then ".join(f"{a:.4g}" for a, _, _ in self.phases)  # type: ignore[attr-defined]
        return f"{self._batches()}; {self._sampled} {sizes}"

    def noise_in_words(self) -> str:
        """Return the deviation of each phase."""
        sigmas = ", then ".join(
            dict.fromkeys(f"{s:g}" for _, s, _ in self.phases)  # type: ignore[attr-defined]
        )
        return f"Gaussian on each sum of clipped gradients, σ = {sigmas} clip norms"

    def describe(self) -> str:
        """Return how batches are drawn, and each phase's size, noise and updates."""
        return f"DP-SGD on {self._batches()}: " + "; then ".join(
            f"{steps} updates, {self._sampled} {rate:.4g}, effective noise multiplier σ = {sigma:g}"
            for rate, sigma, steps in self.phases  # type: ignore[attr-defined]
        )


@dataclass(frozen=True)
class PoissonGaussian(_PhasedGaussian):
    """Gaussian sums over Poisson samples, phase by phase (Mironov, Talwar and Zhang 2019).

    Attributes:
        phases: (sampling rate q, noise multiplier σ, steps), composed in order.
    """

    kind = "poisson_gaussian"
    assumed = ("each unit entered each batch by an independent secret coin", *_TRAINING)
    conversions = frozenset({ZERO_OUT, REPLACE})
    phases: Phases

    def __post_init__(self) -> None:
        self._check_rates()

    @classmethod
    def single(
        cls, sampling_rate: float, noise_multiplier: float, steps: int, **more: Any
    ) -> PoissonGaussian:
        """Return the event with one phase."""
        return cls(phases=((sampling_rate, noise_multiplier, steps),), **more)

    def _step(self, rate_or_batch: float, mu: float) -> Profile:
        return SubsampledGaussian(rate_or_batch, mu)

    def _batches(self) -> str:
        return "Poisson samples"


@dataclass(frozen=True)
class TruncatedPoissonGaussian(_PhasedGaussian):
    """Poisson samples cut to at most `cap` units, uniformly at random over the whole batch.

    Not convertible to zero-out: an empty unit may still take another's place in a cut batch.

    Attributes:
        declared_units: upper bound on the number of units from which one samples.
        cap: the largest batch, in units, over all shards together.
        phases: (sampling rate q, noise multiplier σ, steps).
    """

    kind = "truncated_poisson_gaussian"
    assumed = (
        "larger batches were cut at random, by unit, over all shards together",
        *_TRAINING,
    )
    declared_units: int
    cap: int
    phases: Phases

    def __post_init__(self) -> None:
        self._check_rates()
        self.require(self.declared_units >= 1, "declared_units must be 1 or more")
        self.require(self.cap >= 1, "cap must be 1 or more")

    def _step(self, rate_or_batch: float, mu: float) -> Profile:
        return TruncatedSubsampledGaussian(self.declared_units, self.cap, rate_or_batch, mu)

    def _batches(self) -> str:
        return f"Poisson samples cut to {self.cap} units"


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
    assumed = (
        "each unit was dealt to one part by an independent secret coin, and entered each batch of "
        "its part by another",
        "the noise of an update was correlated with earlier ones by a matrix that has no more bands"
        " than there are parts, and columns of norm at most 1",
        *_TRAINING,
    )
    conversions = frozenset({ZERO_OUT, REPLACE})
    cycle: int
    phases: Phases

    def __post_init__(self) -> None:
        whole = type(self.cycle) is int and self.cycle >= 1
        self.require(whole, "cycle must be a whole number, 1 or more")
        self._check_rates()

    def _turns(self, updates: int) -> int:
        """Return the most updates of a phase that may draw one unit."""
        return -(-updates // self.cycle)

    def steps(self) -> list[SelfComposed]:
        """Return the step of each phase, as often as one part has its turn."""
        return [SelfComposed(self._step(q, 1 / s), self._turns(n)) for q, s, n in self.phases]

    def _rates(self) -> Phases:
        return tuple((rate, sigma, self._turns(n)) for rate, sigma, n in self.phases)

    def _step(self, rate_or_batch: float, mu: float) -> Profile:
        return SubsampledGaussian(rate_or_batch, mu)

    def _batches(self) -> str:
        return f"Poisson samples from {self.cycle} parts in turn, noise correlated over updates"


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
    assumed = ("each batch was a uniform secret subset of the declared slots", *_TRAINING)
    _sampled = "batch"
    slots: int
    phases: Phases

    def __post_init__(self) -> None:
        self.require(self.slots >= 1, "slots must be 1 or more")
        self._check_phases(
            lambda batch: 1 <= batch <= self.slots and batch == int(batch),
            f"batch {{}} is not a whole number from 1 to {self.slots}",
        )

    def _rates(self) -> Phases:
        return tuple((batch / self.slots, sigma, steps) for batch, sigma, steps in self.phases)

    def _step(self, rate_or_batch: float, mu: float) -> Profile:
        return FixedSizeProfile(self.slots, int(rate_or_batch), mu)

    def _batches(self) -> str:
        return "batches of a fixed size"


@dataclass(frozen=True)
class Gaussian(MechanismEvent):
    """`count` Gaussian mechanisms without sampling: every unit takes part in each.

    Together they are one Gaussian mechanism with μ = √count/σ (Dong, Roth and Su 2022, Corollary
    3.3).
    """

    kind = "gaussian"
    title = "Gaussian mechanism"
    every_iterate = True  # all of them are released
    assumed = ("no unit took part more often than once an epoch", *_TRAINING)
    conversions = frozenset({ZERO_OUT, REPLACE})
    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        _check_noise(self, self.noise_multiplier, self.count)

    def steps(self) -> list[SelfComposed]:
        """Return all of them as one."""
        return [SelfComposed(gaussian(self.unamplified_mu(1.0)), 1)]

    def unamplified_mu(self, sensitivity: float) -> float:
        """Return μ of all of them together."""
        return sensitivity * math.sqrt(self.count) / self.noise_multiplier

    def noise_in_words(self) -> str:
        """Return the deviation."""
        return f"Gaussian, σ = {self.noise_multiplier:g} clip norms"

    def describe(self) -> str:
        """Return count and noise."""
        return f"the Gaussian mechanism, {self.count} times, σ = {self.noise_multiplier:g}"


@dataclass(frozen=True)
class ShuffledGaussian(MechanismEvent):
    """Batches cut from shuffled epochs: each unit takes part once an epoch, unamplified.

    Whatever the permutation, one epoch is one Gaussian mechanism for each unit (the other
    batches do not depend on it), so `participations` epochs are as many Gaussian mechanisms,
    adaptively composed. The relation is zero-out: adding a unit would shift all later batches.
    (`accounting.epsilon_unamplified` has replace-one.)
    """

    kind = "shuffled_gaussian"
    title = "DP training"
    every_iterate = True  # every epoch's sums are released
    assumed = Gaussian.assumed
    neighbours = ZERO_OUT
    noise_multiplier: float
    participations: int

    def __post_init__(self) -> None:
        _check_noise(self, self.noise_multiplier, self.participations)

    def steps(self) -> list[SelfComposed]:
        """Return one Gaussian for all epochs."""
        return [SelfComposed(gaussian(self.unamplified_mu(1.0)), 1)]

    def unamplified_mu(self, sensitivity: float) -> float:
        """Return μ of all epochs together."""
        return sensitivity * math.sqrt(self.participations) / self.noise_multiplier

    def sampling_in_words(self) -> str:
        """Return the epochs."""
        return f"shuffled epochs, unamplified; {self.participations} of them"

    def noise_in_words(self) -> str:
        """Return the deviation."""
        return (
            f"Gaussian on each sum of clipped gradients, σ = {self.noise_multiplier:g} clip norms"
        )

    def describe(self) -> str:
        """Return epochs and noise."""
        return (
            f"DP-SGD on shuffled epochs, unamplified: {self.participations} epochs, "
            f"σ = {self.noise_multiplier:g}"
        )
