"""Each update has its own noise, of the plan's scale."""

from __future__ import annotations

import pytest

from dp_core.privacy.seeds import PrivacySeed
from dp_core.training.noised_means import UpdateNoise
from dp_core.training.private_updates import PrivateUpdates

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
    stddev = plan.noise_multiplier_per_draw() * plan.clip_norm
    assert trainer.moved == [
        {
            "t": t,
            "rate": 0.1,
            "divisor": plan.expected_batch(t),
            "noise": UpdateNoise(SEED, b"manifest", t, stddev, plan.noise_draws()),
        }
        for t in range(3)
    ]
