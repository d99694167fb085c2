import numpy as np
import pytest

from dp_core.data.hashing import ShuffledRange, bits, coin, digest64, fold, mix, seed_key


def test_parts_cannot_be_shifted_into_one_another():
    assert digest64(b"k", "p", "ab", "c") != digest64(b"k", "p", "a", "bc")
    assert digest64(b"k", "p", "ab") != digest64(b"k", "pa", "b")
    assert digest64(b"k", "p", "a") != digest64(b"l", "p", "a")


def test_values_do_not_change_between_versions() -> None:
    # A changed hash would change every mask and every bounded sample of a resumed run.
    assert digest64(b"key", "unit", "P000001") == 0xA63FF39563A7E483
    assert digest64(b"k" * 100, "unit", "P000001") == 0xB7D2E156F6378C51


@pytest.mark.statistical
def test_coins_are_uniform_over_units_and_keys():
    for values in (
        [coin(b"k", "p", str(i)) for i in range(20_000)],
        [coin(seed_key(i), "p", "u") for i in range(20_000)],
    ):
        cells = np.histogram(values, bins=20, range=(0, 1))[0]
        chi2 = ((cells - 1000) ** 2 / 1000).sum()
        assert chi2 < 68  # 19 degrees of freedom: exceeded once in 2·10^7


def test_mix_is_splitmix64() -> None:
    # Reference outputs of SplitMix64 for seed 1234567 (Vigna's C code): state advances by γ.
    gamma = np.uint64(0x9E3779B97F4A7C15)
    states = np.uint64(1234567) + gamma * np.arange(1, 4, dtype=np.uint64)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert mix(states).tolist() == expected


def test_a_row_does_not_depend_on_its_neighbours():
    keys = np.arange(50, dtype=np.uint64)
    whole = bits(keys, 1, 20)
    assert np.array_equal(bits(keys[17:18], 1, 20)[0], whole[17])
    assert np.array_equal(bits(keys, 1, 9), whole[:, :9])
    assert not np.array_equal(bits(keys, 2, 20), whole)


@pytest.mark.statistical
def test_bits_are_balanced_even_for_consecutive_keys():
    drawn = bits(np.arange(4000, dtype=np.uint64), 0, 16).ravel()
    for bit in range(64):
        ones = int(((drawn >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - 32_000) < 6 * np.sqrt(64_000 / 4)
    assert len(np.unique(drawn)) == drawn.size  # consecutive keys do not share a sequence


def test_folding_binds_every_number():
    keys = np.arange(3, dtype=np.uint64)
    assert len({tuple(fold(keys, *n)) for n in ((1, 2), (2, 1), (1,), (1, 2, 0))}) == 4


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 4096, 4097])
def test_every_item_has_one_place(size):
    for epoch in (0, 1):
        order = ShuffledRange(size, 3, epoch)
        items = order.items(np.arange(size))
        assert sorted(items) == list(range(size))
        np.testing.assert_array_equal(order.items(np.arange(size)[::-3]), items[::-3])


@pytest.mark.statistical
def test_items_land_anywhere_alike():
    """χ² over (item, place) of 12 items, 1800 orders: 121 degrees of freedom."""
    counts = np.zeros((12, 12))
    for epoch in range(1800):
        counts[ShuffledRange(12, 5, epoch).items(np.arange(12)), np.arange(12)] += 1
    chi_square = ((counts - 150) ** 2 / 150).sum()
    assert chi_square < 121 + 6 * np.sqrt(2 * 121)
