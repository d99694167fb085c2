"""Each update has its own noise, of the plan's scale."""

from __future__ import annotations

import pytest

from dp_core.privacy.execution_plan import AdaptiveClipping
from dp_core.privacy.noise_addition import UpdateNoise
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.loop import PrivateUpdates, noised_count

SEED = PrivacySeed.fixed(5)


class Watched:
    """Stands in for a trainer: notes down what it is told."""

    def __init__(self):
        self.added, self.moved = [], []

    def add(self, batch, clip_norm):
        self.added.append((batch, clip_norm))

    def move(self, **what):
        self.moved.append(what)


@pytest.fixture()
def updates(plan_of):
    return PrivateUpdates(plan_of(), SEED, b"manifest")


def test_every_micro_batch_is_clipped_at_the_plans_norm(updates, plan_of):
    trainer = Watched()
    for batch in ("one", "two"):
        updates.add(trainer, batch)
    assert trainer.added == [("one", plan_of().clip_norm), ("two", plan_of().clip_norm)]


def test_every_update_gets_the_noise_of_its_own_number(updates, plan_of):
    trainer, plan = Watched(), plan_of()
    for t in range(3):
        updates.move(trainer, t, 0.1)
    assert trainer.moved == [
        {
            "t": t,
            "rate": 0.1,
            "divisor": plan.expected_batch(t),
            "noise": UpdateNoise(SEED, b"manifest", t, plan.noise_multiplier, plan.clip_norm),
        }
        for t in range(3)
    ]


def test_the_clip_norm_is_learned_from_the_noised_count(plan_of):
    """As accounted: the next norm is a function of count + N(0, σ_b²), noise and all."""
    adaptive = AdaptiveClipping(0.5, 3.0)
    plan = plan_of(adaptive=adaptive)
    updates = PrivateUpdates(plan, SEED, b"manifest")
    trainer, count, norm = Watched(), 1.5, plan.clip_norm
    trainer.noised_below = lambda stddev: count
    for t in range(3):
        updates.move(trainer, t, 0.1)
        seen = noised_count(count, SEED, b"manifest", t, 3.0)
        assert abs(seen - count) > 1e-3
        share = adaptive.share_within(seen, plan.expected_batch(t))
        norm = adaptive.next_norm(norm, share, plan.clip_norm)
        assert updates.clip_norm == pytest.approx(norm, rel=1e-12)
