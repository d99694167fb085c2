"""The ways in which a batch of units may be drawn, and what is proven for each.

| sampling            | proven ε                                     | neighbours        |
| ------------------- | -------------------------------------------- | ----------------- |
| Poisson             | PLD of the subsampled Gaussian               | add or remove one |
| truncated Poisson   | PLD mixture with the probability of the cut  | add or remove one |
| fixed size          | profile of sampling without replacement      | replace one       |
| shuffled epochs     | one unamplified Gaussian per epoch           | zero out one      |
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from dp_core.errors import PlanError
from dp_core.privacy.accounting.composition import refuse_large_delta
from dp_core.privacy.mechanisms import (
    FixedSizeGaussian,
    MechanismEvent,
    NeighboringRelation,
    PoissonGaussian,
    PrivacyUnit,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
)


@dataclass(frozen=True)
class PoissonSampling:
    """Each unit enters each batch independently, at the plan's rate for that update."""

    kind: ClassVar[str] = "poisson"

    def check_batch(self, expected_batch: float) -> None:
        """Accept any expected batch: the rate follows from it."""


@dataclass(frozen=True)
class TruncatedPoissonSampling:
    """Poisson, then a uniform subset of `cap` units when more were drawn.

    The cut is global, by unit, over all shards of an update together: a cap per shard is another
    mechanism, and a far worse one.
    """

    kind: ClassVar[str] = "truncated-poisson"
    cap: int

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise PlanError(f"{self.cap} is below 1", where="plan.sampling.cap")

    def check_batch(self, expected_batch: float) -> None:
        """Accept any expected batch: the accounting covers every cap."""


@dataclass(frozen=True)
class FixedSizeSampling:
    """Each batch is a uniform subset of exactly `batch` of the units, drawn afresh."""

    kind: ClassVar[str] = "fixed-size"
    batch: int

    def check_batch(self, expected_batch: float) -> None:
        """Refuse an expected batch that is not the batch."""
        _check_same(self.batch, expected_batch)


@dataclass(frozen=True)
class ShuffledSampling:
    """Each epoch is a fresh permutation of the units, cut into whole batches."""

    kind: ClassVar[str] = "shuffled"
    batch: int

    def check_batch(self, expected_batch: float) -> None:
        """Refuse an expected batch that is not the batch."""
        _check_same(self.batch, expected_batch)


def _check_same(batch: int, expected_batch: float) -> None:
    if batch < 1 or batch != expected_batch:
        raise PlanError(
            f"batches of {batch} units, but the schedule says {expected_batch:g}",
            where="plan.sampling.batch",
        )


Sampling = PoissonSampling | TruncatedPoissonSampling | FixedSizeSampling | ShuffledSampling


HALF = 0.5  # a unit adds +1/2 or -1/2 to the count, an absent one 0: sensitivity 1/2
RANGE = 1e4  # the clip norm stays within this factor of its start: weights stay finite


@dataclass(frozen=True)
class AdaptiveClipping:
    """How the clip norm is learned.

    Attributes:
        quantile: γ, the share of units that should be within the clip norm.
        count_noise: σ_b, standard deviation of the noise on Σ(bᵢ − 1/2), in units, where bᵢ is 1
            for a unit within the clip norm. The authors take a twentieth of the batch.
        rate: η, how fast the clip norm follows: C ← C·exp(−η(share − γ)).
    """

    quantile: float
    count_noise: float
    rate: float = 0.2

    def __post_init__(self) -> None:
        _refuse(not 0 < self.quantile < 1, f"{self.quantile} is not in (0, 1)", "quantile")
        for name in ("count_noise", "rate"):
            value = getattr(self, name)
            _refuse(not (math.isfinite(value) and value > 0), f"{value} is not above 0", name)

    def gradient_noise_multiplier(self, noise_multiplier: float) -> float:
        """Return z_Δ, the noise that gradients get, of the update's noise multiplier z.

        Theorem 1 of the paper: z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2). A unit's pair (clipped gradient
        over z_Δ·C, its half over σ_b) then has norm at most (z_Δ⁻² + (2σ_b)⁻²)^(1/2) = 1/z: what
        z·C on the gradients alone would give. This holds whichever batches are drawn and whatever
        C earlier releases led to.

        Raises:
            PlanError: the count alone would spend all of z and more.
        """
        left = noise_multiplier**-2 - (self.count_noise / HALF) ** -2
        _refuse(
            left <= 0,
            f"{self.count_noise} is not above half the noise multiplier {noise_multiplier}: the "
            "count alone would spend more than the update may",
            "count_noise",
        )
        return float(left**-0.5)

    def share_within(self, noised: float, expected_batch: float) -> float:
        """Return the noised share of units within the clip norm.

        Divided by the expected batch, as gradients are. Where fewer units exist than the plan
        declares, batches are smaller and the share is drawn towards 1/2.

        Args:
            noised: Σ(bᵢ − 1/2) over the units drawn, plus a draw of N(0, `count_noise`²).
            expected_batch: of this update, in units.
        """
        return HALF + noised / expected_batch

    def next_norm(self, clip_norm: float, share: float, first: float) -> float:
        """Return the clip norm of the next update: post-processing of a noised share.

        Args:
            clip_norm: of this update.
            share: from `share_within`.
            first: clip norm of the first update.
        """
        moved = math.log(clip_norm / first) - self.rate * (share - self.quantile)
        bound = math.log(RANGE)
        return first * math.exp(min(max(moved, -bound), bound))


def _refuse(wrong: bool, what: str, where: str) -> None:
    if wrong:
        raise PlanError(what, where=f"plan.adaptive.{where}")


NoisePlacement = Literal["update", "per-draw"]
Denominator = Literal["expected", "realised"]

LEAST_NOISE, MOST_NOISE = 1e-2, 1e6  # below, ε is in the thousands; above, nothing is learned


@dataclass(frozen=True)
class BatchPhase:
    """A stretch of updates with one expected batch, in units (not rows)."""

    steps: int
    expected_batch: float


@dataclass(frozen=True)
class ExecutionPlan:
    """A DP-SGD run: g̃ = (Σ clip(gᵢ, C) + N(0, (σC)²)) / B, one gᵢ per sampled *unit*.

    *Formal guarantee.* If updates follow the plan, `event()` describes the mechanism, and its ε
    (see `accounting`) holds for `unit` under `relation`, for everything that training releases.

    Attributes:
        unit: what is protected as a whole.
        declared_units: public upper bound on the number of units (the number of
            slots where `needs_exact_units`).
        sampling: how batches are drawn.
        clip_norm: bound C on one unit's gradient, summed over the unit's rows; with `adaptive`,
            that of the first update.
        noise_multiplier: *effective* σ of one whole update, in units of C; with `adaptive`, of
            gradients and count together.
        schedule: phases of updates with their expected batch.
        delta: δ at which ε is stated.
        shards: parallel shards P. accumulation: micro-batches T summed in time for an update.
        noise_placement: "update": one draw after the cross-device sum (default). "per-draw":
            each of the P·T micro-batches adds its own σ/√(P·T) (paper mode; Hoory 2021, Eq. 3).
        examples_per_step: rows of a sampled unit that one update reads; clipped together.
        max_examples_per_unit: rows of a unit that the store keeps (None: the store bounds them).
        denominator: what sums are divided by; only the expected batch is private.
        amplification: the sampling whose ε is claimed; None means the one that is run.
        adaptive: how C is learned from noised counts; None keeps it.
        noise_multiplier_per_draw_stated: what the trainer was told each draw adds, if someone
            else computed it; it must agree.

    Raises:
        PlanError: the parts contradict each other.
    """

    unit: PrivacyUnit
    declared_units: int
    sampling: Sampling
    clip_norm: float
    noise_multiplier: float
    schedule: tuple[BatchPhase, ...]
    delta: float
    shards: int = 1
    accumulation: int = 1
    noise_placement: NoisePlacement = "update"
    examples_per_step: int = 1
    max_examples_per_unit: int | None = None
    denominator: Denominator = "expected"
    amplification: str | None = None
    noise_multiplier_per_draw_stated: float | None = None
    adaptive: AdaptiveClipping | None = None
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", PrivacyUnit(self.unit))
        object.__setattr__(self, "schedule", tuple(self.schedule))
        self._check_numbers()
        ends = itertools.accumulate(phase.steps for phase in self.schedule)
        object.__setattr__(self, "_ends", tuple(ends))
        self._check_noise()
        self._check_claims()

    # --- constructors: the usual ways to state a plan

    @classmethod
    def poisson(
        cls,
        *,
        unit: PrivacyUnit,
        declared_units: int,
        expected_batch: float,
        steps: int,
        noise_multiplier: float,
        clip_norm: float,
        delta: float,
        **more: Any,
    ) -> ExecutionPlan:
        """Return a plan with Poisson sampling at rate expected_batch / declared_units."""
        return cls(
            unit=unit,
            declared_units=declared_units,
            sampling=PoissonSampling(),
            schedule=(BatchPhase(steps, expected_batch),),
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            delta=delta,
            **more,
        )

    # --- what the trainer executes

    @property
    def steps(self) -> int:
        """Number of updates, over all phases."""
        return self._ends[-1]

    def expected_batch(self, t: int) -> float:
        """Return the denominator B of update t (0-based), in units."""
        if not 0 <= t < self.steps:
            raise IndexError(f"update {t} is outside 0..{self.steps - 1}")
        return self.schedule[bisect.bisect_right(self._ends, t)].expected_batch

    def sampling_rate(self, t: int) -> float:
        """Return the rate q at which each unit enters update t: expected batch / declared."""
        return self.expected_batch(t) / self.declared_units

    def noise_draws(self) -> int:
        """Return how many independent noise draws make up one update's noise."""
        return self.shards * self.accumulation if self.noise_placement == "per-draw" else 1

    def gradient_noise_multiplier(self) -> float:
        """Return σ of an update's gradients: the plan's, or more where a count shares it."""
        if self.adaptive is None:
            return self.noise_multiplier
        return self.adaptive.gradient_noise_multiplier(self.noise_multiplier)

    def noise_multiplier_per_draw(self) -> float:
        """Return σ of each draw on the gradients: the draws of one update sum to all of it."""
        return self.gradient_noise_multiplier() / math.sqrt(self.noise_draws())

    @property
    def needs_exact_units(self) -> bool:
        """Whether batches must be drawn from exactly `declared_units` slots.

        True for fixed-size and shuffled batches: with fewer slots each unit would be drawn more
        often than is accounted. Units fill the first slots; the rest stay empty.
        """
        return isinstance(self.sampling, FixedSizeSampling | ShuffledSampling)

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in one pass over `declared_units`; the remainder sits the epoch out."""
        return int(self.declared_units // self.schedule[0].expected_batch)

    # --- what is charged

    @property
    def relation(self) -> NeighboringRelation:
        """The neighbouring relation of the guarantee."""
        return self.event().relation

    def event(self) -> MechanismEvent:
        """Return the mechanism that executing this plan is."""
        sigma = self.noise_multiplier
        match self.sampling:
            case PoissonSampling():
                return PoissonGaussian(self._phases(self.declared_units), unit=self.unit)
            case TruncatedPoissonSampling(cap=cap):
                phases = self._phases(self.declared_units)
                return TruncatedPoissonGaussian(self.declared_units, cap, phases, unit=self.unit)
            case FixedSizeSampling():
                return FixedSizeGaussian(self.declared_units, self._phases(1), unit=self.unit)
            case ShuffledSampling():
                epochs = math.ceil(self.steps / self.batches_per_epoch)
                return ShuffledGaussian(sigma, epochs, unit=self.unit)

    def _phases(self, divisor: int) -> tuple[tuple[float, float, int], ...]:
        return tuple(
            (phase.expected_batch / divisor, self.noise_multiplier, phase.steps)
            for phase in self.schedule
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON data."""
        body = {k: v for k, v in asdict(self).items() if k != "_ends"}
        body["sampling"] = {"kind": self.sampling.kind, **asdict(self.sampling)}
        body["schedule"] = [asdict(phase) for phase in self.schedule]
        return body | {"unit": self.unit.value}

    def digest(self) -> str:
        """Return SHA-256 over the whole plan, in hex: part of the run's manifest."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    # --- what cannot be built

    def _check_numbers(self) -> None:
        _refuse_if(self.declared_units < 1, "declared_units must be 1 or more", "declared_units")
        refuse_large_delta([self.delta], self.declared_units, "plan.delta")
        for name in ("clip_norm", "noise_multiplier"):
            value = getattr(self, name)
            _refuse_if(
                not (math.isfinite(value) and value > 0), f"{value} is not finite and > 0", name
            )
        _refuse_if(
            not LEAST_NOISE <= self.noise_multiplier <= MOST_NOISE,
            f"{self.noise_multiplier:g} is not from {LEAST_NOISE:g} to {MOST_NOISE:g}",
            "noise_multiplier",
        )
        for name in ("shards", "accumulation", "examples_per_step"):
            _refuse_if(getattr(self, name) < 1, f"{getattr(self, name)} is below 1", name)
        kept = self.max_examples_per_unit
        _refuse_if(
            kept is not None and kept < self.examples_per_step,
            f"{self.examples_per_step} rows a step, but a unit keeps {kept}",
            "examples_per_step",
        )
        _refuse_if(not self.schedule, "a schedule needs at least one phase", "schedule")
        for phase in self.schedule:
            _refuse_if(phase.steps < 1, f"{phase.steps} updates in a phase", "schedule")
            _refuse_if(
                not 0 < phase.expected_batch <= self.declared_units,
                f"expected batch {phase.expected_batch} is not above 0 and at most the "
                f"{self.declared_units} declared units: the sampling rate would pass 1",
                "schedule",
            )
            self.sampling.check_batch(phase.expected_batch)

    def _check_noise(self) -> None:
        self.gradient_noise_multiplier()  # refuses a count that takes all of the noise
        _refuse_if(
            self.noise_placement not in ("update", "per-draw"),
            "unknown placement",
            "noise_placement",
        )
        stated, each = self.noise_multiplier_per_draw_stated, self.noise_multiplier_per_draw()
        _refuse_if(
            stated is not None and not math.isclose(stated, each, rel_tol=1e-9),
            f"each of {self.noise_draws()} draws would add σ={stated}, which makes the update's "
            f"σ={(stated or 0) * math.sqrt(self.noise_draws()):.6g}, not the plan's "
            f"{self.gradient_noise_multiplier():.6g}: noise of all shards and micro-batches "
            "counts once each",
            "noise_multiplier_per_draw_stated",
        )

    def _check_claims(self) -> None:
        _refuse_if(
            self.denominator != "expected",
            "dividing by the realised batch makes every gradient depend on who else was drawn, "
            "which no accounting here covers: divide by the expected batch",
            "denominator",
        )
        claimed = self.amplification or self.sampling.kind
        _refuse_if(
            claimed != self.sampling.kind,
            f"the ε of {claimed} sampling does not hold for {self.sampling.kind} batches",
            "amplification",
        )


def _refuse_if(wrong: bool, what: str, where: str) -> None:
    if wrong:
        raise PlanError(what, where=f"plan.{where}")
