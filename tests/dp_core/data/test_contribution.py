"""What a unit contributes is bounded, and drawn for that unit alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dp_core.data.privacy_units import bounded_sample, is_held_out


@given(st.lists(st.integers(), max_size=30), st.integers(1, 10), st.text(max_size=5))
def test_at_most_the_limit_and_in_order(items: list[int], limit: int, unit: str) -> None:
    chosen = bounded_sample(items, limit, unit, b"k")
    assert len(chosen) == min(limit, len(items))
    rest = iter(items)
    assert all(any(x == y for y in rest) for x in chosen)  # a subsequence


@pytest.mark.statistical
def test_every_item_is_as_likely() -> None:
    counts = np.zeros(10)
    for unit in range(20_000):
        counts[bounded_sample(range(10), 3, str(unit), b"k")] += 1
    # Binomial(20000, 0.3): standard deviation 64.8.
    assert np.abs(counts - 6000).max() < 6 * 64.8


@pytest.mark.statistical
def test_held_out_share() -> None:
    held = sum(is_held_out(str(i), 0.05, b"k") for i in range(40_000))
    assert abs(held - 2000) < 6 * np.sqrt(40_000 * 0.05 * 0.95)
    assert not any(is_held_out(str(i), 0.0, b"k") for i in range(100))
