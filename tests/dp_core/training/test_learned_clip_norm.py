"""A clip norm that is learned: from the noised count, and from nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dp_core.privacy.execution_plan import AdaptiveClipping, ExecutionPlan
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.loop import PrivateUpdates, noised_count

COUNT = 3.5  # Σ (bᵢ − ½), as the devices counted it
BATCH = 9


class Counted:
    """Stands in for a trainer that counted the units within the clip norm."""

    def move(self, **what: Any) -> None:
        """Move nothing."""

    def noised_below(self, noise: float) -> float:
        return COUNT + noise


def learned(seed: PrivacySeed, count_noise: float, updates: int = 1) -> float:
    """Return the clip norm after some updates."""
    adaptive = AdaptiveClipping(0.5, count_noise, rate=1.0)
    plan = ExecutionPlan.poisson(
        unit=PrivacyUnit.PATIENT,
        declared_units=30,
        expected_batch=BATCH,
        steps=4,
        noise_multiplier=0.7,
        clip_norm=0.5,
        delta=1e-4,
        adaptive=adaptive,
    )
    private = PrivateUpdates(plan, seed, b"manifest")
    for t in range(updates):
        private.move(Counted(), t, 0.1)  # type: ignore[arg-type]
    return private.clip_norm


def test_the_next_norm_follows_from_the_noised_count() -> None:
    sigma, seed = 4.0, PrivacySeed.fixed(5)
    noised = noised_count(COUNT, seed, b"manifest", 0, sigma)
    assert abs(noised - COUNT) > 0.1
    assert learned(seed, sigma) == pytest.approx(0.5 * math.exp(-noised / BATCH))


def test_another_seed_and_another_update_learn_another_norm() -> None:
    """One count: whatever differs is noise, of the stated scale and drawn afresh."""
    shifts = []
    for number in range(64):
        seed = PrivacySeed.fixed(number)
        one, two = (learned(seed, 4.0, updates) for updates in (1, 2))
        shifts += [math.log(one / 0.5) * BATCH + COUNT, math.log(two / one) * BATCH + COUNT]
    assert len(set(shifts)) > 100  # it lies on a grid: some may agree
    scale = math.sqrt(sum(shift**2 for shift in shifts) / 128)
    assert 2 / 3 * 4 < scale < 3 / 2 * 4  # χ² with 128 degrees: by chance under 10⁻⁷
