"""The noise vector: cut into blocks, dealt to parameters, every value its own."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from dp_core.privacy.seeds import PrivacySeed
from dp_core.training import noise_blocks
from dp_core.training.noise_blocks import NoiseBlocks

SHAPES = {"b": (70,), "a": (11, 13), "c": (2, 3, 5)}
SEED = PrivacySeed.fixed(2)


def drawn(draws=1, stddev=1.0, divisor=1.0, sums=None):
    blocks = NoiseBlocks(SHAPES)
    sums = {n: tf.constant(0.0, shape=s) for n, s in SHAPES.items()} if sums is None else sums
    noise = blocks.noised_means(sums, blocks.keys(SEED, b"m", 3, draws), stddev, divisor)
    return blocks, noise


def flat(arrays):
    return np.concatenate([arrays[n].numpy().ravel() for n in ("a", "b", "c")])


def test_every_parameter_gets_its_shape_and_no_value_twice(monkeypatch):
    monkeypatch.setattr(noise_blocks, "_LARGEST_BLOCK", 50)
    _, noise = drawn()
    assert {n: tuple(v.shape) for n, v in noise.items()} == SHAPES
    assert len(flat(noise)) == 243
    assert len(np.unique(flat(noise))) > 230  # the grid has some 8000 places


@pytest.mark.parametrize("largest", [50, 64, 10_000])
def test_sums_come_back_at_their_own_places_divided(monkeypatch, largest):
    monkeypatch.setattr(noise_blocks, "_LARGEST_BLOCK", largest)
    sums = {n: tf.random.stateless_normal(s, [1, len(s)]) for n, s in SHAPES.items()}
    blocks, means = drawn(stddev=1e-4, divisor=4.0, sums=sums)
    assert blocks.count == -(-243 // largest)
    for name, sum_ in sums.items():
        np.testing.assert_allclose(means[name], sum_ / 4.0, atol=2e-4)


def test_blocks_are_drawn_independently(monkeypatch):
    monkeypatch.setattr(noise_blocks, "_LARGEST_BLOCK", 50)
    blocks, noise = drawn()
    assert (blocks.count, blocks.block_size) == (5, 50)
    parts = [flat(noise)[i * 50 : (i + 1) * 50] for i in range(4)]
    assert np.abs(np.corrcoef(parts) - np.eye(4)).max() < 0.6


@pytest.mark.statistical
def test_all_blocks_together_have_the_scale(monkeypatch):
    monkeypatch.setattr(noise_blocks, "_LARGEST_BLOCK", 1000)
    blocks = NoiseBlocks({"w": (123, 456)})
    keys = blocks.keys(SEED, b"m", 0, 1)
    noise = blocks.noised_means({"w": tf.zeros((123, 456))}, keys, 0.3, 1.0)["w"].numpy().ravel()
    assert blocks.count == 57
    assert stats.kstest(noise / 0.3, "norm").pvalue > 1e-4
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(noise / (0.3 * wrong), "norm").pvalue < 1e-9


def test_several_draws_are_added():
    blocks = NoiseBlocks(SHAPES)
    keys = blocks.keys(SEED, b"m", 3, 3)
    sums = {n: tf.zeros(s) for n, s in SHAPES.items()}
    total = blocks.noised_means(sums, keys, 0.5, 1.0)
    each = [blocks.noised_means(sums, keys[d : d + 1], 0.5, 1.0) for d in range(3)]
    for name in SHAPES:
        added = sum(e[name].numpy() for e in each)
        np.testing.assert_allclose(total[name], added, atol=4 * 0.5 * 2.0**-12)
