"""The learning rate's course, and settings that are refused."""

from __future__ import annotations

import pytest

from dp_core.errors import BadInput
from dp_core.training.recipe import Recipe


def test_the_rate_rises_to_its_peak_and_falls_towards_zero():
    rates = [Recipe(1, 10, 1.0, warmup=0.3).rate(t) for t in range(10)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7])


def test_one_update_has_the_peak_rate():
    assert Recipe(1, 1, 0.5).rate(0) == 0.5


@pytest.mark.parametrize(
    "field,value",
    [("batch_size", 0), ("updates", 0), ("learning_rate", 0.0), ("warmup", 1.1), ("micro_rows", 0)],
)
def test_impossible_settings_are_refused(field, value):
    settings = {"batch_size": 1, "updates": 1, "learning_rate": 1.0}
    with pytest.raises(BadInput, match=field):
        Recipe(**(settings | {field: value}))
