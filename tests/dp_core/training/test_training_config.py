"""The learning rate's course, and settings that are refused."""

from __future__ import annotations

import pytest

from dp_core.errors import BadInput
from dp_core.training.config import TrainingConfig


def test_the_learning_rate_rises_to_its_peak_and_falls_towards_zero():
    rates = [TrainingConfig(1.0, warmup=0.3).learning_rate_at(t, 10) for t in range(10)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7])
    assert TrainingConfig(0.5).learning_rate_at(0, 1) == 0.5


def test_the_learning_rate_falls_by_its_power():
    flat, linear, square = (
        [
            TrainingConfig(1.0, warmup=0.2, decay_power=p).learning_rate_at(t, 10)
            for t in range(2, 10)
        ]
        for p in (0.0, 1.0, 2.0)
    )
    assert flat == [1.0] * 8
    assert linear == pytest.approx([(8 - i) / 8 for i in range(8)])
    assert square == pytest.approx([x * x for x in linear])


@pytest.mark.parametrize(
    "field,value",
    [
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("warmup", 1.1),
        ("micro_rows", 0),
        ("keep_checkpoints", 0),
        ("decay_power", -1.0),
        ("weight_decay", -0.1),
        ("weight_decay", 1.0),  # at a learning rate of 1 it takes all of a weight at once
        ("weight_decay", float("inf")),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("stop_after_seconds", 0.0),
    ],
)
def test_impossible_settings_are_refused(field, value):
    with pytest.raises(BadInput, match=field):
        TrainingConfig(**({"learning_rate": 1.0} | {field: value}))


def test_housekeeping_is_no_part_of_what_a_run_is():
    usual = TrainingConfig(1e-3)
    kept = TrainingConfig(1e-3, checkpoint_every=1, keep_checkpoints=9, stop_after_seconds=5.0)
    assert usual.identity() == kept.identity()
    for name, value in (
        ("weight_decay", 0.5),
        ("whole_words", True),
        ("micro_rows", 3),
        ("precision", "bfloat16"),
    ):
        assert TrainingConfig(1e-3, **{name: value}).identity() != usual.identity()
