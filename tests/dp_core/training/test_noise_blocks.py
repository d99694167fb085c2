"""The noise vector: cut into blocks, dealt to parameters, every value its own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

from dp_core.privacy.seeds import PrivacySeed
from dp_core.privacy.tf_noise import noise_words, scaled_normals
from dp_core.training import noise_blocks
from dp_core.training.noise_blocks import NoiseBlocks

SHAPES = {"b": (70,), "a": (11, 13), "c": (2, 3, 5)}
SEED = PrivacySeed.fixed(2)


def drawn(draws=1, stddev=1.0):
    blocks = NoiseBlocks(SHAPES)
    return blocks, blocks.draw(blocks.keys(SEED, b"m", 3, draws), stddev).tensors()


def flat(arrays):
    return np.concatenate([arrays[n].numpy().ravel() for n in ("a", "b", "c")])


def test_every_parameter_gets_its_shape_and_no_value_twice(monkeypatch):
    monkeypatch.setattr(noise_blocks, "_LARGEST_BLOCK", 50)
    _, noise = drawn()
    assert {n: tuple(v.shape) for n, v in noise.items()} == SHAPES
    assert len(np.unique(flat(noise))) == 243


@pytest.mark.parametrize("largest", [50, 64, 10_000])
def test_the_parameters_in_order_of_name_are_the_blocks_one_after_the_other(monkeypatch, largest):
    monkeypatch.setattr(noise_blocks, "_LARGEST_BLOCK", largest)
    blocks, noise = drawn(stddev=0.3)
    assert blocks.count == -(-243 // largest)
    scale = tf.constant(0.3)
    expected = [
        scaled_normals(noise_words(key, blocks.block_size), scale).numpy().view(np.float32)
        for key in blocks.keys(SEED, b"m", 3, 1)[0]
    ]
    np.testing.assert_array_equal(flat(noise), np.concatenate(expected)[:243])


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
    noise = blocks.draw(blocks.keys(SEED, b"m", 0, 1), 0.3).tensors()["w"].numpy().ravel()
    assert blocks.count == 57
    assert stats.kstest(noise / 0.3, "norm").pvalue > 1e-4
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(noise / (0.3 * wrong), "norm").pvalue < 1e-9


def test_several_draws_are_added():
    blocks = NoiseBlocks(SHAPES)
    keys = blocks.keys(SEED, b"m", 3, 3)
    total = blocks.draw(keys, 0.5).tensors()
    each = [blocks.draw(keys[d : d + 1], 0.5).tensors() for d in range(3)]
    for name in SHAPES:
        np.testing.assert_allclose(total[name], sum(e[name].numpy() for e in each), atol=1e-6)


def test_a_noise_that_was_begun_later_leaves_the_earlier_one_as_it_is():
    blocks = NoiseBlocks(SHAPES)
    first = blocks.draw(blocks.keys(SEED, b"m", 0, 1), 1.0)
    before = flat(first.tensors()).copy()
    second = blocks.draw(blocks.keys(SEED, b"m", 1, 1), 1.0)
    assert not np.array_equal(flat(second.tensors()), before)
    np.testing.assert_array_equal(flat(first.tensors()), before)


def test_who_waits_for_the_noise_draws_what_no_other_thread_has_begun(monkeypatch):
    monkeypatch.setattr(noise_blocks, "_LARGEST_BLOCK", 50)
    blocks, expected = drawn()
    halt = threading.Event()
    blocks._threads = ThreadPoolExecutor(1)
    blocks._threads.submit(halt.wait)
    try:
        noise = blocks.draw(blocks.keys(SEED, b"m", 3, 1), 1.0).tensors()
    finally:
        halt.set()
    np.testing.assert_array_equal(flat(noise), flat(expected))


def test_an_error_in_a_thread_is_not_a_noise_of_zeros(monkeypatch):
    blocks, _ = drawn()
    monkeypatch.setattr(noise_blocks, "noise_words", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        blocks.draw(blocks.keys(SEED, b"m", 0, 1), 1.0).tensors()


def test_what_is_not_wanted_is_not_drawn():
    blocks, _ = drawn()
    blocks.close()
    with pytest.raises(RuntimeError):
        blocks.draw(blocks.keys(SEED, b"m", 0, 1), 1.0)


def test_what_is_printed_of_a_noise_does_not_hold_it():
    blocks, _ = drawn()
    assert repr(blocks.draw(blocks.keys(SEED, b"m", 0, 1), 1.5)) == "Noise(stddev=1.5)"
