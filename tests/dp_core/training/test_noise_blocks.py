"""The noise vector: cut into blocks, dealt to parameters, every value its own."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from dp_core.privacy.seeds import PrivacySeed
from dp_core.training import noise_blocks
from dp_core.training.noise_blocks import NoiseBlocks

SHAPES = {"b": (70,), "a": (11, 13), "c": (2, 3, 5)}
SEED = PrivacySeed.fixed(2)


def drawn(draws=1):
    blocks = NoiseBlocks(SHAPES)
    return blocks, blocks.draw(tf.constant(blocks.keys(SEED, b"m", 3, draws)), 1.0)


def test_every_parameter_gets_its_shape_and_no_value_twice():
    _, noise = drawn()
    assert {n: tuple(v.shape) for n, v in noise.items()} == SHAPES
    values = np.concatenate([v.numpy().ravel() for v in noise.values()])
    assert len(np.unique(values)) == len(values) == 243


def test_blocks_are_drawn_independently(monkeypatch):
    monkeypatch.setattr(noise_blocks, "_LARGEST_BLOCK", 50)
    blocks, noise = drawn()
    assert blocks.count == 5
    values = np.concatenate([noise[n].numpy().ravel() for n in ("a", "b", "c")])
    assert len(np.unique(values)) == 243
    parts = [values[i * 49 : (i + 1) * 49] for i in range(4)]
    assert np.abs(np.corrcoef(parts) - np.eye(4)).max() < 0.6


def test_several_draws_are_added():
    blocks = NoiseBlocks(SHAPES)
    keys = blocks.keys(SEED, b"m", 3, 3)
    total = blocks.draw(tf.constant(keys), 0.5)
    each = [blocks.draw(tf.constant(keys[d : d + 1]), 0.5) for d in range(3)]
    for name in SHAPES:
        np.testing.assert_allclose(total[name], sum(e[name].numpy() for e in each), atol=1e-6)
