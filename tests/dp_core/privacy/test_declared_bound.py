"""The declared number of units is a bound: it may be reached, and not passed by one."""

from __future__ import annotations

import pytest

from dp_core.data.privacy_units import Unit
from dp_core.errors import BadInput
from dp_core.vocabulary.dp_histogram import set_counts

DECLARED = 20


def test_a_histogram_counts_no_more_units_than_declared() -> None:
    units = [Unit(str(number), ["pain"]) for number in range(DECLARED + 1)]
    assert set_counts(units[:-1], 1, b"k", declared_units=DECLARED) == {"pain": DECLARED}
    with pytest.raises(BadInput, match="more units than the declared bound"):
        set_counts(units, 1, b"k", declared_units=DECLARED)
