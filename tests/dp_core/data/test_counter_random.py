"""The bits for masks: uniform, keyed, and independent of layout."""

import numpy as np
import pytest

from dp_core.data.hashing import bits, fold, mix


def test_mix_is_splitmix64() -> None:
    # Reference outputs of SplitMix64 for seed 1234567 (Vigna's C code): state advances by γ.
    gamma = np.uint64(0x9E3779B97F4A7C15)
    states = np.uint64(1234567) + gamma * np.arange(1, 4, dtype=np.uint64)
    assert mix(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    keys = np.arange(50, dtype=np.uint64)
    whole = bits(keys, 1, 20)
    assert np.array_equal(bits(keys[17:18], 1, 20)[0], whole[17])
    assert np.array_equal(bits(keys, 1, 9), whole[:, :9])
    assert not np.array_equal(bits(keys, 2, 20), whole)


@pytest.mark.statistical
def test_bits_are_balanced_even_for_consecutive_keys() -> None:
    drawn = bits(np.arange(4000, dtype=np.uint64), 0, 16).ravel()
    for bit in range(64):
        ones = int(((drawn >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - 32_000) < 6 * np.sqrt(64_000 / 4)
    assert len(np.unique(drawn)) == drawn.size  # consecutive keys do not share a sequence


def test_folding_binds_every_number() -> None:
    keys = np.arange(3, dtype=np.uint64)
    assert len({tuple(fold(keys, *n)) for n in ((1, 2), (2, 1), (1,), (1, 2, 0))}) == 4
