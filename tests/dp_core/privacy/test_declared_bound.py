"""The declared number of units is an upper bound that data may reach but not exceed."""

from __future__ import annotations

import pytest

from benchmarks.vocabulary_corpora import item_sets
from dp_core.errors import BadInput

DECLARED = 20


def test_a_histogram_counts_no_more_units_than_declared() -> None:
    units = [(str(number), ["pain"]) for number in range(DECLARED + 1)]
    assert item_sets(units[:-1], 1, b"k", declared_units=DECLARED).units == DECLARED
    with pytest.raises(BadInput, match="more units than the declared bound"):
        item_sets(units, 1, b"k", declared_units=DECLARED)
