"""A clip norm that follows a quantile of the gradient norms, learned under the plan's own ε.

Andrew, Thakkar, McMahan and Ramaswamy 2021 (arXiv:1905.03871). Each update also releases how many
units were within the clip norm, with noise; the noise of the gradients grows so that both
together are one Gaussian mechanism with the plan's noise multiplier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dp_core.errors import PlanError

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
