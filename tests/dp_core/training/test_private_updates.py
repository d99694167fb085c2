from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from noised_updates import assert_gaussian

from dp_core.privacy.accounting.calibration import with_bands
from dp_core.privacy.execution_plan import AdaptiveClipping, noised_count
from dp_core.privacy.matrix_factorization import Workload
from dp_core.privacy.noise_addition import UpdateNoise
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.loop import PrivateUpdates

SEED = PrivacySeed.fixed(5)
COUNT = 3.5  # Σ (bᵢ − ½), as the devices counted it


def carry_out(plan, steps, seed=SEED):
    """Return the updates that a trainer is called to make, and the clip norms in between."""
    calls, updates = [], PrivateUpdates(plan, seed, b"manifest")
    trainer = SimpleNamespace(
        clipper=updates.clipper(),
        apply_update=lambda **what: calls.append(what),
        take_count_within=lambda: COUNT,
    )
    norms = []
    for step in range(steps):
        updates.apply_update(trainer, step, 0.1)
        norms.append(trainer.clipper.clip_norm)
    return calls, norms


def test_noise_of_an_update_is_keyed_by_its_number(plan_of):
    plan = plan_of()
    calls, norms = carry_out(plan, 3)
    assert calls == [
        {
            "step": t,
            "learning_rate": 0.1,
            "divisor": plan.expected_batch(t),
            "noise": UpdateNoise(SEED, b"manifest", t, plan.noise_multiplier, plan.clip_norm),
            "loudness": 1.0,
        }
        for t in range(3)
    ]
    assert norms == [plan.clip_norm] * 3


def test_correlated_noise_keeps_its_past_over_all_updates(plan_of):
    plan = plan_of()
    plan = with_bands(plan, 2, Workload.prefix_sums(plan.steps))
    calls, _ = carry_out(plan, 3)
    noises = [what["noise"] for what in calls]
    assert [noise.strategy for noise in noises] == [plan.strategy] * 3
    assert noises[0].past is noises[1].past is noises[2].past is not None
    louder = plan.strategy.loudness(plan.steps)
    assert [what["loudness"] for what in calls] == [louder] * 3
    assert louder > 1.2
    other, _ = carry_out(plan, 1)
    assert other[0]["noise"].past is not noises[0].past


def test_clip_norm_is_learned_from_the_noised_count(plan_of):
    """As accounted: the next norm is a function of count + N(0, σ_b²)."""
    adaptive = AdaptiveClipping(0.5, 3.0)
    plan = plan_of(adaptive=adaptive)
    calls, norms = carry_out(plan, 3)
    norm = plan.clip_norm
    for t in range(3):
        assert calls[t]["noise"].clip_norm == pytest.approx(norm)
        seen = noised_count(COUNT, SEED, b"manifest", t, 3.0)
        assert abs(seen - COUNT) > 1e-3
        norm = adaptive.next_norm(norm, seen, plan.expected_batch(t), plan.clip_norm)
        assert norms[t] == pytest.approx(norm, rel=1e-12)


@pytest.mark.statistical
def test_noise_of_the_count_has_its_sigma():
    sigma = 3.0
    sample = np.array([noised_count(11.5, SEED, b"m", t, sigma) for t in range(400)]) - 11.5
    assert_gaussian(sample, sigma)
    assert noised_count(11.5, SEED, b"n", 0, sigma) != 11.5 + sample[0]
