"""What makes each update private: its clip norm, the noise on its sum, what it is divided by.

The clip norm is fixed, or learned from noised counts (Andrew et al. 2021, arXiv:1905.03871).
"""

from __future__ import annotations

import numpy as np

from dp_core.bert.parameters import Arrays
from dp_core.privacy.adaptive_clipping import HALF
from dp_core.privacy.gaussian_noise import lattice_places, noised_mean
from dp_core.privacy.noise import noise_key
from dp_core.privacy.plan import TrainingPlan
from dp_core.privacy.seeds import PrivacySeed
from dp_core.training.noised_means import UpdateNoise
from dp_core.training.rows import MicroBatch
from dp_core.training.trainer import Clipping, Trainer

_STATE = "clip-norm"


class PrivateUpdates:
    """The plan as it is carried out. The clip norm is state of the run, kept in checkpoints.

    Args:
        plan: what is accounted.
        seed: of the reservation; all noise is drawn from it.
        manifest: what the noise is drawn for.
    """

    def __init__(self, plan: TrainingPlan, seed: PrivacySeed, manifest: bytes) -> None:
        self._plan, self._seed, self._manifest = plan, seed, manifest
        self.clip_norm = plan.clip_norm

    def clipping(self, style: str) -> Clipping:
        """Return how the first update clips; `add` says what changes."""
        return Clipping(self.clip_norm, style)

    def add(self, trainer: Trainer, batch: MicroBatch) -> None:
        """Add a micro-batch of the update at hand, clipped."""
        trainer.add(batch, self.clip_norm)

    def move(self, trainer: Trainer, t: int, rate: float) -> None:
        """Make update t: noise on the sum, divided by the expected batch; learn the clip norm."""
        multiplier = self._plan.gradient_noise_multiplier()
        noise = UpdateNoise(self._seed, self._manifest, t, multiplier, self.clip_norm)
        trainer.move(t=t, rate=rate, divisor=self._plan.expected_batch(t), noise=noise)
        self._learn(trainer, t)

    def state(self) -> Arrays:
        """Return what a checkpoint needs."""
        return {_STATE: np.array([self.clip_norm], np.float64)}

    def restore(self, state: Arrays) -> None:
        """Set what `state` returned."""
        self.clip_norm = float(state[_STATE][0])

    def _learn(self, trainer: Trainer, t: int) -> None:
        """Set the next clip norm from how many units of update t were within this one.

        Only the noised count is seen, whose cost is in the plan's noise multiplier.
        """
        adaptive = self._plan.adaptive
        if adaptive is None:
            return
        noised = noised_count(
            trainer.noised_below(0.0), self._seed, self._manifest, t, adaptive.count_noise
        )
        share = adaptive.share_within(noised, self._plan.expected_batch(t))
        self.clip_norm = adaptive.next_norm(self.clip_norm, share, self._plan.clip_norm)


def noised_count(count: float, seed: PrivacySeed, manifest: bytes, t: int, stddev: float) -> float:
    """Return update t's count plus N(0, stddev²), on a lattice as noised sums are.

    Args:
        count: Σ (bᵢ − 1/2).
        seed: of the reservation.
        manifest: what the noise is drawn for.
        t: number of the update.
        stddev: σ_b, in units.
    """
    key = noise_key(seed, manifest, t, "units within the clip norm")
    noised = np.empty(1, np.float32)
    places = lattice_places(stddev / HALF, HALF, values=1)
    noised_mean(np.array([count], np.float32), key, 0, places, 1.0, noised)
    return float(noised[0])
