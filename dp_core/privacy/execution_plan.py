"""The execution plan of a private training: it makes sampler, clipper, noise and accounting event.

One object defines both the training and its charge, so the two cannot differ.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from dp_core.config.privacy import LEAST_CLIP, LEAST_NOISE, MOST_CLIP, refuse_large_delta
from dp_core.config.training import LEAST_GROWING
from dp_core.errors import BadInput, PlanError, PrivateTextRefusal
from dp_core.privacy.batch_selection import BatchSampler, PoissonSampling, SamplingLaw
from dp_core.privacy.lattice import MOST_VALUES, lattice_scale
from dp_core.privacy.matrix_factorization import INDEPENDENT, LARGEST_UPDATE, ToeplitzStrategy
from dp_core.privacy.mechanisms import MechanismEvent, PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed

if TYPE_CHECKING:  # computing a plan's ε must not import TensorFlow or Numba
    from dp_core.nn import Tensor, Variables
    from dp_core.privacy.clipping.book_keeping import ClippedSum, UnitLosses
    from dp_core.privacy.correlated_noise import PastNoise
    from dp_core.privacy.noise_addition import UpdateNoise

ClippingStyle = Literal["flat", "automatic"]
MOST_NOISE = 1e6  # above it, nothing is learned

COUNT_SENSITIVITY = 0.5  # a unit adds +1/2 or -1/2 to the count, an absent one 0
RANGE = 1e4  # the clip norm stays within this factor of its start: weights stay finite


@dataclass(frozen=True)
class AdaptiveClipping:
    """Adaptive clipping: the clip norm follows a quantile of the gradient norms.

    Andrew et al. 2021 (arXiv:1905.03871).

    Attributes:
        quantile: γ, the share of units that should be within the clip norm.
        count_noise: σ_b, standard deviation of the noise on Σ(bᵢ − 1/2), in units, where bᵢ is 1
            for a unit within the clip norm. The authors take a twentieth of the batch.
        learning_rate: η, how fast the clip norm follows: C ← C·exp(−η(share − γ)).
    """

    quantile: float
    count_noise: float
    learning_rate: float = 0.2

    def __post_init__(self) -> None:
        _refuse_if(
            not 0 < self.quantile < 1, f"{self.quantile} is not in (0, 1)", "adaptive.quantile"
        )
        for name in ("count_noise", "learning_rate"):
            value = getattr(self, name)
            _refuse_if(not 0 < value < math.inf, f"{value} is not above 0", f"adaptive.{name}")

    def gradient_noise_multiplier(self, noise_multiplier: float) -> float:
        """Return z_Δ, the noise that gradients get, of the update's noise multiplier z.

        Theorem 1 of the paper: z_Δ = (z⁻² − (2σ_b)⁻²)^(−1/2). A unit's pair (clipped gradient
        over z_Δ·C, its half over σ_b) then has norm at most (z_Δ⁻² + (2σ_b)⁻²)^(1/2) = 1/z: what
        z·C on the gradients alone would give. This holds whichever batches are drawn and whatever
        C earlier releases led to.

        Raises:
            PlanError: the count alone would spend all of z and more.
        """
        left = noise_multiplier**-2 - (self.count_noise / COUNT_SENSITIVITY) ** -2
        _refuse_if(
            left <= 0,
            f"{self.count_noise} is not above half the noise multiplier {noise_multiplier}: the "
            "count alone would spend more than the update may",
            "adaptive.count_noise",
        )
        return float(left**-0.5)

    def next_norm(
        self, clip_norm: float, noised: float, expected_batch: float, first: float
    ) -> float:
        """Return the clip norm of the next update: post-processing of a noised count.

        The noised share of units within the clip norm is the count over the expected batch, as for
        gradients. Where fewer units exist than the plan declares, batches are smaller and the share
        is drawn towards 1/2.

        Args:
            clip_norm: of this update.
            noised: Σ(bᵢ − 1/2) over the units drawn, plus a draw of N(0, `count_noise`²).
            expected_batch: of this update, in units.
            first: clip norm of the first update.
        """
        share = COUNT_SENSITIVITY + noised / expected_batch
        moved = math.log(clip_norm / first) - self.learning_rate * (share - self.quantile)
        bound = math.log(RANGE)
        return first * math.exp(min(max(moved, -bound), bound))


class Clipper:
    """Clips each unit's gradient and adds the results up: the query to which noise is added.

    Attributes:
        clip_norm: bound C on one unit's gradient in the update at hand.
        style: as below.

    Args:
        clip_norm: of the first update.
        style: `flat` or `automatic`; see `dp_core.privacy.clipping.book_keeping`.
        adaptive: how the clip norm is learned from noised counts; None keeps it.

    Raises:
        PlanError: no such style, or a clip norm to be learned that has no effect.
    """

    def __init__(
        self,
        clip_norm: float,
        style: ClippingStyle = "flat",
        adaptive: AdaptiveClipping | None = None,
    ) -> None:
        known = get_args(ClippingStyle)
        _refuse_if(style not in known, f"{style!r} is not one of {', '.join(known)}", "clipping")
        _refuse_if(
            adaptive is not None and style != "flat",
            "automatic clipping has no clip norm to learn",
            "clipping",
        )
        self.clip_norm, self._first = clip_norm, clip_norm
        self.style, self._adaptive = style, adaptive

    def clipped_grad_sum(
        self,
        unit_losses: UnitLosses,
        parameters: Variables,
        units: int,
        clip_norm: Tensor,
        precision: str = "float32",
        frozen: Variables | None = None,
    ) -> ClippedSum:
        """Return Σᵤ clip(gradientᵤ, C); as `book_keeping.clipped_grad_sum`."""
        from dp_core.privacy.clipping.book_keeping import CLIP_FACTORS, clipped_grad_sum

        return clipped_grad_sum(
            unit_losses,
            parameters,
            units,
            clip_norm,
            clip_factors=CLIP_FACTORS[self.style],
            precision=precision,
            frozen=frozen,
        )

    def learn_clip_norm(
        self, count: float, seed: PrivacySeed, manifest: bytes, step: int, expected_batch: float
    ) -> None:
        """Set the next update's clip norm, if it is learned, from this update's noised count.

        Only the noised count is used; the plan's noise multiplier includes its cost.

        Args:
            count: Σ (1{norm ≤ C} − 1/2) over the units of the update, without noise.
            seed: of the reservation.
            manifest: identifies the run for which the noise is drawn.
            step: number of the update.
            expected_batch: of the update, in units.
        """
        if self._adaptive is None:
            return
        noised = noised_count(count, seed, manifest, step, self._adaptive.count_noise)
        self.clip_norm = self._adaptive.next_norm(
            self.clip_norm, noised, expected_batch, self._first
        )


def noised_count(
    count: float, seed: PrivacySeed, manifest: bytes, step: int, stddev: float
) -> float:
    """Return a count plus N(0, stddev²), on a lattice as noised sums are.

    Args:
        count: Σ (bᵢ − 1/2).
        seed: of the reservation.
        manifest: identifies the run for which the noise is drawn.
        step: number of the update.
        stddev: σ_b, in units.
    """
    from dp_core.privacy.noise_addition import noise_key, noised_mean

    key = noise_key(seed, manifest, step, "units within the clip norm")
    noised = np.empty(1, np.float32)
    scale = lattice_scale(stddev / COUNT_SENSITIVITY, COUNT_SENSITIVITY, values=1)
    noised_mean(np.array([count], np.float32), key, 0, scale, 1.0, noised)
    return float(noised[0])


@dataclass(frozen=True)
class BatchPhase:
    """A stretch of updates with one expected batch, in units (not rows)."""

    steps: int
    expected_batch: float


def growing_batches(first: int, last: int, steps: int) -> tuple[BatchPhase, ...]:
    """Return a schedule whose batches grow from `first` by equal factors, then stay at `last`.

    There are three phases over the first 3/8 of the updates, then a fourth. Anil et al. 2021
    (arXiv:2108.01624) use such a schedule with other numbers.

    Args:
        first: expected batch of the first phase.
        last: expected batch of the last one.
        steps: of the whole run.

    Raises:
        BadInput: there are too few updates.
    """
    if steps < LEAST_GROWING:
        raise BadInput(
            f"{steps} updates are too few for batches that grow",
            where="schedule",
            fix=f"Make {LEAST_GROWING} updates or more.",
        )
    phases, over = 3, 3 * steps // 8
    ends = [round(over * (i + 1) / phases) for i in range(phases)]
    sizes = [round(first * (last / first) ** (i / phases)) for i in range(phases)]
    lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    grown = [BatchPhase(n, size) for n, size in zip(lengths, sizes, strict=True)]
    return (*grown, BatchPhase(steps - over, last))


@dataclass(frozen=True)
class ExecutionPlan:
    """A DP-SGD run: g̃ = (Σ clip(gᵢ, C) + N(0, (σC)²)) / B, one gᵢ per sampled *unit*.

    Formal guarantee: training with the plan's sampler, clipper and noise is the mechanism that
    `event()` describes, and its ε (see `accounting`) holds for adding or removing one `unit`, for
    everything that training releases. The denominator B is the *expected* batch: the realised one
    depends on the drawn units.

    Noise is drawn once an update. Hoory et al. 2021 (Eq. 3) add σ/√(P·T) in each of P shards and T
    micro-batches, which sums to the same law.

    Attributes:
        unit: the protected unit.
        declared_units: public upper bound on the number of units.
        sampling: how batches are drawn.
        clip_norm: bound C on one unit's gradient, summed over the unit's rows; with `adaptive`,
            the bound in the first update.
        noise_multiplier: σ of one whole update, in units of C; with `adaptive`, of gradients and
            count together.
        schedule: phases of updates with their expected batch.
        delta: δ at which ε is stated.
        examples_per_step: rows of a sampled unit that one update reads; clipped together.
        maskings_per_example: masked copies of each of these rows, averaged into the unit's gradient
            before it is clipped (augmentation multiplicity, De et al. 2022, arXiv:2204.13650).
        max_examples_per_unit: rows of a unit that the store keeps, or None if the store bounds
            them.
        clipping: style of clipping.
        adaptive: learns C from noised counts; None keeps C constant.
        strategy: correlates the noise of the updates; with one band they are independent.

    Raises:
        PlanError: a part is impossible, or parts contradict each other.
    """

    unit: PrivacyUnit
    declared_units: int
    sampling: SamplingLaw
    clip_norm: float
    noise_multiplier: float
    schedule: tuple[BatchPhase, ...]
    delta: float
    examples_per_step: int = 1
    max_examples_per_unit: int | None = None
    clipping: ClippingStyle = "flat"
    adaptive: AdaptiveClipping | None = None
    maskings_per_example: int = 1
    strategy: ToeplitzStrategy = INDEPENDENT

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", PrivacyUnit(self.unit))
        object.__setattr__(self, "schedule", tuple(self.schedule))
        self._check_numbers()
        self._check_strategy()
        self.clipper()
        self.gradient_noise_multiplier()  # refuses a count that takes all of the noise

    @classmethod
    def poisson(cls, *, expected_batch: float, steps: int, **fields: Any) -> ExecutionPlan:
        """Return a plan with Poisson sampling and batches of one expected size.

        Args:
            expected_batch: in units.
            steps: number of updates.
            fields: the other fields of the plan.
        """
        schedule = (BatchPhase(steps, expected_batch),)
        return cls(sampling=PoissonSampling(), schedule=schedule, **fields)

    @functools.cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(phase.steps for phase in self.schedule))

    @property
    def steps(self) -> int:
        """Number of updates, over all phases."""
        return self._ends[-1]

    def expected_batch(self, step: int) -> float:
        """Return the denominator B of update `step` (from 0), in units."""
        if not 0 <= step < self.steps:
            raise IndexError(f"update {step} is outside 0..{self.steps - 1}")
        return self.schedule[bisect.bisect_right(self._ends, step)].expected_batch

    def sampling_rate(self, step: int) -> float:
        """Return the rate q at which each unit enters an update: expected batch / declared."""
        return self.expected_batch(step) / self.declared_units

    def gradient_noise_multiplier(self) -> float:
        """Return σ of an update's gradients: the plan's, or more where a count shares it."""
        if self.adaptive is None:
            return self.noise_multiplier
        return self.adaptive.gradient_noise_multiplier(self.noise_multiplier)

    def refuse_coarse_lattice(self) -> None:
        """Refuse noise for which the sums of a large model would be rounded too coarsely.

        A run executes every other plan, for a model of up to `MOST_VALUES` trained parameters.

        Raises:
            PlanError: rounding would take half of the noise or more.
        """
        lattice_scale(self.gradient_noise_multiplier(), self.clip_norm, MOST_VALUES, self.strategy)

    # --- the parts of a run

    def sampler(self, seed: PrivacySeed, n_units: int) -> BatchSampler:
        """Return the sampler of a run.

        Args:
            seed: of the reservation.
            n_units: true number of units; private, so no message may hold it.

        Raises:
            PrivateTextRefusal: more units than the plan declares.
        """
        if n_units > self.declared_units:
            raise PrivateTextRefusal(
                "the data set has more units than declared",
                where="declared_units",
                fix=f"The declared bound is {self.declared_units}: declare a larger one.",
            )
        return BatchSampler(self.sampling, seed, n_units, self.sampling_rate)

    def clipper(self) -> Clipper:
        """Return the clipper of a run, before its first update."""
        return Clipper(self.clip_norm, self.clipping, self.adaptive)

    def noise(
        self,
        seed: PrivacySeed,
        manifest: bytes,
        step: int,
        clipper: Clipper,
        past: PastNoise | None = None,
    ) -> UpdateNoise:
        """Return the noise on the clipped sum of one update: of deviation σC if it has one band.

        Args:
            seed: of the reservation; all noise is drawn from it.
            manifest: identifies the run for which the noise is drawn.
            step: number of the update.
            clipper: at that update.
            past: state of the run's correlated noise; if it is None, it is recomputed.
        """
        from dp_core.privacy.noise_addition import UpdateNoise

        multiplier, norm = self.gradient_noise_multiplier(), clipper.clip_norm
        return UpdateNoise(seed, manifest, step, multiplier, norm, self.strategy, past)

    def event(self) -> MechanismEvent:
        """Return the mechanism of executing this plan."""
        phases = tuple(
            (phase.expected_batch / self.declared_units, self.noise_multiplier, phase.steps)
            for phase in self.schedule
        )
        return self.sampling.event(self.declared_units, phases, self.unit)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON data."""
        return asdict(self) | {"sampling": self.sampling.to_json(), "unit": self.unit.value}

    def digest(self) -> str:
        """Return SHA-256 over the whole plan, in hex: part of the run's manifest."""
        canonical = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def _check_numbers(self) -> None:
        _refuse_if(self.declared_units < 1, "declared_units must be 1 or more", "declared_units")
        refuse_large_delta([self.delta], self.declared_units, "plan.delta")
        _refuse_if(
            not LEAST_CLIP <= self.clip_norm <= MOST_CLIP,
            f"{self.clip_norm:g} is not from {LEAST_CLIP:g} to {MOST_CLIP:g}",
            "clip_norm",
        )
        _refuse_if(
            not LEAST_NOISE <= self.noise_multiplier <= MOST_NOISE,
            f"{self.noise_multiplier:g} is not from {LEAST_NOISE:g} to {MOST_NOISE:g}",
            "noise_multiplier",
        )
        rows, kept = self.examples_per_step, self.max_examples_per_unit
        _refuse_if(rows < 1, f"{rows} is below 1", "examples_per_step")
        maskings = self.maskings_per_example
        _refuse_if(maskings < 1, f"{maskings} is below 1", "maskings_per_example")
        _refuse_if(
            kept is not None and kept < rows,
            f"{rows} rows a step, but a unit keeps {kept}",
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

    def _check_strategy(self) -> None:
        """Refuse correlated noise without a proof, and parts too small for a batch.

        Raises:
            PlanError: the strategy or the number of parts is refused.
        """
        bands, separation = self.strategy.bands, self.sampling.separation
        for phase in self.schedule:
            _refuse_if(
                phase.expected_batch * separation > self.declared_units,
                f"expected batch {phase.expected_batch} is above one of {separation} parts of the "
                f"{self.declared_units} declared units",
                "sampling",
            )
        if bands == 1:
            return
        learned, grows = self.adaptive is not None, len(self.schedule) > 1
        loud = f"an update's noise would exceed {LARGEST_UPDATE:g} times the noise of DP-SGD"
        often = f"noise of {bands} bands, but a unit may take part every {separation} updates"
        _refuse_if(bands > separation, often, "strategy")
        _refuse_if(learned, "correlated noise needs a clip norm that stays the same", "clipping")
        _refuse_if(grows, "correlated noise needs batches of one expected size", "schedule")
        _refuse_if(not self.strategy.is_calm(self.steps), loud, "strategy")


def _refuse_if(wrong: bool, message: str, where: str) -> None:
    if wrong:
        raise PlanError(message, where=f"plan.{where}")
