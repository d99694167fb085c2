"""The mechanisms that release something, one class each (the interface: `MechanismEvent`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from dp_core.errors import BadInput
from dp_core.privacy.accounting.pld import epsilon_pld
from dp_core.privacy.accounting.profiles import (
    NO_GUARANTEE,
    EpsilonDelta,
    FixedSizeProfile,
    HistogramProfile,
    SelfComposed,
    SubsampledGaussian,
    TruncatedSubsampledGaussian,
    gaussian,
)
from dp_core.privacy.accounting.rdp import (
    ORDERS,
    Floats,
    epsilon_rdp,
    negative_binomial_curve,
    poisson_curve,
    worst,
)
from dp_core.privacy.mechanism_event import (
    ADD_REMOVE,
    REPLACE,
    ZERO_OUT,
    MechanismEvent,
    NeighboringRelation,
    PrivacyUnit,
)

__all__ = [
    "Composed",
    "ConvertedRelation",
    "FixedSizeGaussian",
    "Gaussian",
    "MechanismEvent",
    "NeighboringRelation",
    "PoissonGaussian",
    "PrivacyUnit",
    "RandomCountSelection",
    "ShuffledGaussian",
    "ThresholdedHistogram",
    "TruncatedPoissonGaussian",
    "Unaccounted",
    "compose",
    "under",
]
_DELTA_SLACK = 1 + 1e-5  # more than what rounding may take from δ when parts are added up

# --- training: noised sums of clipped gradients

Phases = tuple[tuple[float, float, int], ...]  # (rate or batch, noise multiplier σ, steps)
_TRAINING = (
    "every row of a unit was clipped together with the unit's other rows",
    "training noise and arithmetic are float32, the ε is that of real numbers",
)


def _check_noise(event: MechanismEvent, sigma: float, steps: int) -> None:
    what = f"noise multiplier {sigma} is not finite and above 0"
    event.require(math.isfinite(sigma) and sigma > 0, what)
    event.require(steps >= 1 and steps == int(steps), f"steps {steps} is not 1 or more")


@dataclass(frozen=True)
class _PhasedGaussian(MechanismEvent):
    """Gaussian sums over sampled batches, phase by phase, composed in order."""

    title = "DP training"
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
        """Return the phases with the share of units in an expected batch."""
        return self.phases  # type: ignore[attr-defined, no-any-return]

    def unamplified_mu(self, sensitivity: float) -> float:
        """Return √(Σ epochs·(sensitivity/σ)²), an epoch having ⌊1/q⌋ whole batches."""
        total = 0.0
        for rate, sigma, steps in self._rates():
            batches_per_epoch = math.floor(1 / rate + 1e-9)  # 1/q whole but for rounding
            total += math.ceil(steps / batches_per_epoch) * (sensitivity / sigma) ** 2
        return math.sqrt(total)

    def _describe_phases(self) -> str:
        return "; then ".join(
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

    def steps(self) -> list[SelfComposed]:
        """Return the subsampled Gaussian of each phase."""
        return [SelfComposed(SubsampledGaussian(q, 1 / s), n) for q, s, n in self.phases]

    def describe(self) -> str:
        """Return the sampling, and each phase's rate, noise and updates."""
        return f"DP-SGD on Poisson samples: {self._describe_phases()}"


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

    def steps(self) -> list[SelfComposed]:
        """Return each phase's mixture of batches that are cut and those that are not."""
        units, cap = self.declared_units, self.cap
        return [
            SelfComposed(TruncatedSubsampledGaussian(units, cap, rate, 1 / sigma), steps)
            for rate, sigma, steps in self.phases
        ]

    def describe(self) -> str:
        """Return the sampling with its cap, and each phase."""
        return f"DP-SGD on Poisson samples cut to {self.cap} units: {self._describe_phases()}"


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

    @property
    def relation(self) -> NeighboringRelation:
        """Replace one: no bound for add-or-remove is claimed."""
        return REPLACE

    def _rates(self) -> Phases:
        return tuple((batch / self.slots, sigma, steps) for batch, sigma, steps in self.phases)

    def steps(self) -> list[SelfComposed]:
        """Return the Gaussian on a fixed-size subset, of each phase."""
        return [
            SelfComposed(FixedSizeProfile(self.slots, int(batch), 1 / sigma), steps)
            for batch, sigma, steps in self.phases
        ]

    def describe(self) -> str:
        """Return the sampling, and each phase's batch, noise and updates."""
        return f"DP-SGD on batches of a fixed size: {self._describe_phases()}"


@dataclass(frozen=True)
class Gaussian(MechanismEvent):
    """`count` Gaussian mechanisms in which every unit takes part: no sampling."""

    kind = "gaussian"
    assumed = ("no unit took part more often than once an epoch", *_TRAINING)
    title = "Gaussian mechanism"
    conversions = frozenset({ZERO_OUT, REPLACE})
    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        _check_noise(self, self.noise_multiplier, self.count)

    def steps(self) -> list[SelfComposed]:
        """Return them as one, with μ = √count/σ (Dong, Roth and Su 2022, Corollary 3.3)."""
        return [SelfComposed(gaussian(self.unamplified_mu(1.0)), 1)]

    def unamplified_mu(self, sensitivity: float) -> float:
        """Return μ of all of them together."""
        return sensitivity * math.sqrt(self.count) / self.noise_multiplier

    def describe(self) -> str:
        """Return count and noise."""
        return f"the Gaussian mechanism, {self.count} times, σ = {self.noise_multiplier:g}"


@dataclass(frozen=True)
class ShuffledGaussian(MechanismEvent):
    """Batches cut from shuffled epochs: each unit takes part once an epoch, unamplified.

    Whatever the permutation, one epoch is one Gaussian mechanism for each unit (the other
    batches do not depend on it), so `participations` epochs are as many Gaussian mechanisms,
    adaptively composed. The relation is zero-out: adding a unit would shift all later batches.
    """

    kind = "shuffled_gaussian"
    assumed = ("no unit took part more often than once an epoch", *_TRAINING)
    title = "DP training"
    noise_multiplier: float
    participations: int

    def __post_init__(self) -> None:
        _check_noise(self, self.noise_multiplier, self.participations)

    @property
    def relation(self) -> NeighboringRelation:
        """Zero-out; `accounting.epsilon_unamplified` has replace-one."""
        return ZERO_OUT

    def steps(self) -> list[SelfComposed]:
        """Return one Gaussian for all epochs."""
        return [SelfComposed(gaussian(self.unamplified_mu(1.0)), 1)]

    def unamplified_mu(self, sensitivity: float) -> float:
        """Return μ of all epochs together."""
        return sensitivity * math.sqrt(self.participations) / self.noise_multiplier

    def describe(self) -> str:
        """Return epochs and noise."""
        return (
            f"DP-SGD on shuffled epochs, unamplified: {self.participations} epochs, "
            f"σ = {self.noise_multiplier:g}"
        )


# --- other mechanisms


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

    def describe(self) -> str:
        """Return bound, noise and threshold."""
        return (
            f"counts of words, at most {self.words_per_unit} distinct words per unit, discrete "
            f"Gaussian noise of σ = {self.sigma:g} on each, noised counts below {self.threshold} "
            "dropped"
        )


@dataclass(frozen=True)
class Unaccounted(MechanismEvent):
    """A release with no privacy guarantee: ε is infinite, whatever it is composed with."""

    kind = "unaccounted"
    reason: str

    @property
    def title(self) -> str:  # type: ignore[override]
        """What was done."""
        return self.reason

    @property
    def is_unaccounted(self) -> bool:
        """It is."""
        return True

    def steps(self) -> list[SelfComposed]:
        """Return a step that guarantees nothing."""
        return [SelfComposed(NO_GUARANTEE, 1)]

    def describe(self) -> str:
        """Return why there is no guarantee."""
        return f"no private mechanism ({self.reason})"


# --- mechanisms made of others


def compose(*events: MechanismEvent) -> MechanismEvent:
    """Return all events together, as one: releases on the same data, registered as one plan.

    Raises:
        BadInput: no events, or events with different units or neighbour relations. (A
            patient-level ε and an example-level ε protect different things; their sum protects
            nothing.)
    """
    if not events:
        raise BadInput("nothing to compose", where="compose")
    first = events[0]
    for other in events[1:]:
        if other.unit is not first.unit or other.relation is not first.relation:
            raise BadInput(
                f"{_protects(first)} does not compose with {_protects(other)}",
                where="compose",
                fix="Account for every release by the same unit and neighbour relation.",
            )
    flat = [p for event in events for p in (event.parts if type(event) is Composed else (event,))]
    return flat[0] if len(flat) == 1 else Composed(tuple(flat), unit=first.unit)


def _protects(event: MechanismEvent) -> str:
    unit = event.unit.value if event.unit else "unstated unit"
    return f"{event.kind} ({unit}, {event.relation.value})"


@dataclass(frozen=True)
class Composed(MechanismEvent):
    """Several events on the same data; build it with `compose`, which checks and flattens them."""

    kind = "composed"
    title = "several releases"
    conversions = frozenset()  # convert each part
    events: tuple[MechanismEvent, ...]

    def __post_init__(self) -> None:
        self.require(len(self.events) > 0, "a composition needs at least one event")
        protected = {(e.unit, e.relation) for e in self.events} | {(self.unit, self.relation)}
        self.require(
            len(protected) == 1,
            "events with different units or neighbour relations do not compose",
        )

    @property
    def parts(self) -> tuple[MechanismEvent, ...]:
        """The releases."""
        return self.events

    @property
    def relation(self) -> NeighboringRelation:
        """The relation that all parts share."""
        return self.events[0].relation

    def steps(self) -> list[SelfComposed]:
        """Return the steps of all parts."""
        return [step for part in self.events for step in part.steps()]

    def rdp(self, orders: Sequence[float]) -> Floats | None:
        """Return the sum of the parts' curves, or None where one has none."""
        curves = [part.rdp(orders) for part in self.events]
        known = [curve for curve in curves if curve is not None]
        return np.sum(known, axis=0) if len(known) == len(curves) else None

    def approximate_rdp(self, order: float, delta: float) -> tuple[float, float]:
        """Return the sum over the parts, each with an equal share of δ for a coin of its own."""
        share = delta / len(self.events)
        charges = [part.approximate_rdp(order, share) for part in self.events]
        return math.fsum(rho for rho, _ in charges), math.fsum(coin for _, coin in charges)

    def unamplified_mu(self, sensitivity: float) -> float:
        """Return μ of all parts together."""
        return math.hypot(*(part.unamplified_mu(sensitivity) for part in self.events))

    def describe(self) -> str:
        """Return the parts."""
        return "; and ".join(part.describe() for part in self.events)


def under(
    event: MechanismEvent, relation: NeighboringRelation, delta: float
) -> MechanismEvent | None:
    """Return the event with its guarantee under `relation`, or None where none is proven.

    Args:
        event: a mechanism. relation: the neighbours wanted.
        delta: δ at which it states its ε; replace-one makes more of it (`stated_delta`).
    """
    if event.relation is relation:
        return event
    if event.relation is not ADD_REMOVE or relation not in event.conversions:
        return None
    return ConvertedRelation(
        event, relation, delta if relation is REPLACE else 0.0, unit=event.unit
    )


@dataclass(frozen=True)
class ConvertedRelation(MechanismEvent):
    """An add-or-remove guarantee, converted to other neighbours by a theorem.

    *zero-out-one*: a unit that contributes nothing leaves the output as it would be without the
    unit (its words are counted nowhere; its gradient is 0 and the other units' coins are their
    own), so the two data sets that zero-out compares give the same two distributions as those
    that add-or-remove compares, and the very same profile. Not for cut batches: there an empty
    unit may still take a place.

    *replace-one*: from one data set to the other by way of the one without the unit. If both
    halves are (ε, δ)-DP the whole is (2ε, (1 + e^ε)δ)-DP (group privacy, Dwork and Roth 2014,
    Theorem 2.2 with the δ of Vadhan 2017, Lemma 2.2). ε is the event's own at `delta`.

    Attributes:
        event: the mechanism, under add-or-remove.
        to: the relation under which it is stated.
        delta: δ of the halves, for replace-one; 0 for zero-out, which needs none.
    """

    kind = "restated"
    event: MechanismEvent
    to: NeighboringRelation
    delta: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", NeighboringRelation(self.to))
        inner = self.event
        self.require(inner.unit is self.unit, "the unit is that of the event")
        self.require(inner.relation is ADD_REMOVE, "only add-or-remove is converted")
        self.require(
            self.to in inner.conversions,
            f"no theorem converts a {inner.kind} to {self.to.value}",
        )
        if self.to is REPLACE:
            self.require(0 < self.delta < 1, f"delta {self.delta} is not in (0, 1)")
        else:
            self.require(self.delta == 0, "zero-out needs no delta")

    @property
    def parts(self) -> tuple[MechanismEvent, ...]:
        """The mechanism under add-or-remove."""
        return (self.event,)

    @property
    def title(self) -> str:  # type: ignore[override]
        """What was released."""
        return self.event.title

    @property
    def relation(self) -> NeighboringRelation:
        """The relation to which the guarantee is converted."""
        return self.to

    @property
    def has_pld(self) -> bool:
        """Whether the neighbours' distributions are those of the event."""
        return self.to is ZERO_OUT

    def steps(self) -> list[SelfComposed]:
        """Return the event's own steps, or for replace-one the (ε, δ) that is proven."""
        if self.to is ZERO_OUT:
            return self.event.steps()
        epsilon, delta = replace_one(epsilon_pld(self.event, self.delta), self.delta)
        proven = math.isfinite(epsilon) and delta < 1
        return [SelfComposed(EpsilonDelta(epsilon, delta) if proven else NO_GUARANTEE, 1)]

    def stated_delta(self, delta: float) -> float:
        """Return `delta`, or for replace-one (1 + e^ε) times that of the halves."""
        if self.to is ZERO_OUT:
            return delta
        return replace_one(epsilon_pld(self.event, self.delta), self.delta)[1] * _DELTA_SLACK

    def rdp(self, orders: Sequence[float]) -> Floats | None:
        """Return the event's curve where the distributions are the same."""
        return self.event.rdp(orders) if self.to is ZERO_OUT else None

    def approximate_rdp(self, order: float, delta: float) -> tuple[float, float]:
        """Return the event's own where the distributions are the same."""
        if self.to is ZERO_OUT:
            return self.event.approximate_rdp(order, delta)
        return super().approximate_rdp(order, delta)

    def unamplified_mu(self, sensitivity: float) -> float:
        """Return that of the event."""
        return self.event.unamplified_mu(sensitivity)

    def describe(self) -> str:
        """Return the event: the neighbours are said elsewhere."""
        return self.event.describe()

    def assumptions(self) -> tuple[str, ...]:
        """Return those of the event, and the theorem."""
        theorem = (
            "a unit without words or rows leaves a release as if it were not there"
            if self.to is ZERO_OUT
            else "replacing a unit is removing one and adding another: 2ε, and (1 + e^ε)δ"
        )
        return (*super().assumptions(), theorem)


def replace_one(epsilon: float, delta: float) -> tuple[float, float]:
    """Return what add-or-remove (ε, δ) is under replace-one: (2ε, (1 + e^ε)δ).

    Two steps of the triangle inequality: one unit removed, another added (Vadhan 2017, Lemma 2.2).
    """
    return 2 * epsilon, math.inf if epsilon > 700 else (1 + math.exp(epsilon)) * delta


@dataclass(frozen=True)
class RandomCountSelection(MechanismEvent):
    """The best of K trainings, K secret and random, each of a candidate drawn from a public list.

    Papernot and Steinke 2022 (arXiv:2110.03620). Every training draws its candidate uniformly and
    independently (with replacement); its score is part of what it releases, so it must be a
    function of the released model and of public data. Only the best training's model leaves.
    A candidate drawn uniformly is a mixture, whose Rényi divergence is at most the worst of the
    list at each order (quasi-convexity, van Erven and Harremoës 2014, Theorem 13).

    Attributes:
        candidates: the mechanism of each point of the list, all for the same neighbours.
        count: "truncated-negative-binomial" (Theorem 2) or "poisson" (Theorem 6): K's law.
        eta: shape η > −1 of the truncated negative binomial (1: geometric, 0: logarithmic).
        gamma: its γ in (0, 1).
        mean: μ of the Poisson law. The numbers of the other law are 0.
        delta: δ at which the Rényi bound is turned into ε where it meets a PLD: no PLD is known.
    """

    kind = "random_count_selection"
    assumed = (
        "how many trainings there were is secret, and no training but the best was shown to anyone",
        "trainings were compared by a score of the released model and public data alone",
    )
    title = "the best of several DP pre-trainings"
    has_pld = False
    claimed_by_rdp = True  # at the δ asked for, not at its own
    candidates: tuple[MechanismEvent, ...]
    count: str
    delta: float
    eta: float = 0.0
    gamma: float = 0.0
    mean: float = 0.0

    def __post_init__(self) -> None:
        self.require(len(self.candidates) > 0, "a selection needs candidates")
        alike = {(c.unit, c.relation) for c in self.candidates}
        self.require(len(alike) == 1, "candidates protect unlike things")
        self.require(self.candidates[0].unit is self.unit, "the unit is the candidates'")
        self.require(0 < self.delta < 1, f"delta {self.delta} is not in (0, 1)")
        if self.count == "poisson":
            fits = self.mean > 0 and math.isfinite(self.mean) and self.eta == self.gamma == 0
        else:
            negative_binomial = self.count == "truncated-negative-binomial"
            self.require(negative_binomial, f"unknown law of K {self.count!r}")
            fits = math.isfinite(self.eta) and self.eta > -1 and 0 < self.gamma < 1
            fits = fits and self.mean == 0
        self.require(fits, f"impossible numbers for the law {self.count}")

    @property
    def parts(self) -> tuple[MechanismEvent, ...]:
        """The candidates."""
        return self.candidates

    @property
    def relation(self) -> NeighboringRelation:
        """The relation that all candidates share."""
        return self.candidates[0].relation

    def steps(self) -> list[SelfComposed]:
        """Return the (ε, δ) that the Rényi curve proves at its own δ."""
        epsilon = epsilon_rdp(self, self.delta)
        return [
            SelfComposed(NO_GUARANTEE if epsilon is None else EpsilonDelta(epsilon, self.delta), 1)
        ]

    def rdp(self, orders: Sequence[float]) -> Floats | None:
        """Return the theorem's curve; its λ̂ and α run over all of `ORDERS` besides."""
        every = np.asarray([*orders, *ORDERS], dtype=np.float64)
        known = [c for event in self.candidates if (c := event.rdp(list(every))) is not None]
        if len(known) < len(self.candidates):
            return None
        base = worst(known)
        if self.count == "poisson":
            curve = poisson_curve(every, base, self.mean)
        else:
            curve = negative_binomial_curve(every, base, self.eta, self.gamma)
        return curve[: len(orders)]

    def describe(self) -> str:
        """Return K's law, and the costliest candidate (at order 8)."""
        law = f"truncated negative binomial, η = {self.eta:g}, γ = {self.gamma:.4g}"
        if self.count == "poisson":
            law = f"Poisson, mean {self.mean:g}"
        curves = [event.rdp([8]) for event in self.candidates]
        costs = [math.inf if curve is None else float(curve[0]) for curve in curves]
        costliest = self.candidates[costs.index(max(costs))]
        return (
            f"the best of a secret random number of trainings ({law}), each of one of "
            f"{len(self.candidates)} candidates drawn at random, the costliest of them "
            f"{costliest.describe()}; ε by Rényi, no PLD is known"
        )
