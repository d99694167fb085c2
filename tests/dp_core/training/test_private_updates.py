"""Each update has its own noise, begun with its first micro-batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from dp_core.privacy.seeds import PrivacySeed
from dp_core.training.noise_blocks import NoiseBlocks
from dp_core.training.private_updates import PrivateUpdates

SEED = PrivacySeed.fixed(5)


class Watched:
    """Stands in for a trainer: notes down what happens in which order."""

    def __init__(self):
        self.happened = []
        blocks = NoiseBlocks({"w": (500,)})

        def draw(keys, stddev):
            self.happened.append("draw")
            return blocks.draw(keys, stddev)

        self.noise = SimpleNamespace(keys=blocks.keys, draw=draw)
        self.moved = []

    def add(self, batch, clip_norm):
        self.happened.append("add")

    def move(self, *, t, rate, divisor, noise):
        self.happened.append("move")
        self.moved.append(noise.tensors()["w"].numpy())


@pytest.fixture()
def updates(plan_of):
    return PrivateUpdates(plan_of(), SEED, b"manifest")


def expected(plan, t):
    blocks = NoiseBlocks({"w": (500,)})
    stddev = plan.noise_multiplier_per_draw() * plan.clip_norm
    keys = blocks.keys(SEED, b"manifest", t, plan.noise_draws())
    return blocks.draw(keys, stddev).tensors()["w"].numpy()


def test_the_noise_is_begun_with_the_first_micro_batch_and_drawn_once(updates):
    trainer = Watched()
    for t, micro_batches in enumerate((2, 0, 1)):
        for _ in range(micro_batches):
            updates.add(trainer, t, None)
        updates.move(trainer, t, 0.1)
    first, empty, last = ["draw", "add", "add", "move"], ["draw", "move"], ["draw", "add", "move"]
    assert trainer.happened == first + empty + last


def test_every_update_gets_the_noise_of_its_own_key(updates, plan_of):
    trainer = Watched()
    for t in range(3):
        updates.add(trainer, t, None)
        updates.move(trainer, t, 0.1)
    for t, noise in enumerate(trainer.moved):
        np.testing.assert_array_equal(noise, expected(plan_of(), t))
    assert len({noise.tobytes() for noise in trainer.moved}) == 3


def test_noise_begun_for_another_update_is_not_used(updates, plan_of):
    trainer = Watched()
    updates.add(trainer, 0, None)
    updates.move(trainer, 1, 0.1)
    np.testing.assert_array_equal(trainer.moved[0], expected(plan_of(), 1))
