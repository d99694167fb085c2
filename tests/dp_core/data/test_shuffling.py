"""The computed order is a permutation, another one in each epoch, and looks random."""

from __future__ import annotations

import numpy as np
import pytest

from dp_core.data.hashing import ShuffledRange


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 1000, 4096, 4097])
def test_every_item_has_one_place(size):
    for epoch in (0, 1):
        items = ShuffledRange(size, 3, epoch).items(np.arange(size))
        assert sorted(items) == list(range(size))


def test_a_part_of_the_order_is_that_part_of_the_whole():
    whole = ShuffledRange(1000, 1, 2).items(np.arange(1000))
    np.testing.assert_array_equal(
        ShuffledRange(1000, 1, 2).items(np.array([7, 999, 0])), whole[[7, 999, 0]]
    )


def test_seeds_and_epochs_give_other_orders():
    orders = {
        ShuffledRange(100, seed, epoch).items(np.arange(100)).tobytes()
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    }
    assert len(orders) == 6


@pytest.mark.statistical
def test_items_land_anywhere_alike():
    """χ² over (item, place) of 12 items, 1800 orders: 121 degrees of freedom."""
    counts = np.zeros((12, 12))
    for epoch in range(1800):
        counts[ShuffledRange(12, 5, epoch).items(np.arange(12)), np.arange(12)] += 1
    chi_square = ((counts - 150) ** 2 / 150).sum()
    assert chi_square < 121 + 6 * np.sqrt(2 * 121)
