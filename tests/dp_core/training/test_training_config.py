"""The learning rate's course, and settings that are refused."""

from __future__ import annotations

import pytest

from dp_core.errors import BadInput
from dp_core.privacy.execution_plan import BatchPhase
from dp_core.training.config import TrainingConfig, anil, growing


def test_the_rate_rises_to_its_peak_and_falls_towards_zero():
    rates = [TrainingConfig(1, 10, 1.0, warmup=0.3).rate(t) for t in range(10)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7])


def test_one_update_has_the_peak_rate():
    assert TrainingConfig(1, 1, 0.5).rate(0) == 0.5


@pytest.mark.parametrize(
    "field,value",
    [
        ("batch_size", 0),
        ("updates", 0),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("warmup", 1.1),
        ("micro_rows", 0),
        ("keep_checkpoints", 0),
        ("decay_power", -1.0),
        ("weight_decay", -0.1),
        ("weight_decay", 1.0),  # at a rate of 1 it takes all of a weight at once
        ("weight_decay", float("inf")),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("stop_after_seconds", 0.0),
        ("schedule", (BatchPhase(2, 1),)),  # of one update
        ("schedule", (BatchPhase(1, 2),)),  # ends with another batch
        ("schedule", (BatchPhase(0, 1), BatchPhase(1, 1))),
    ],
)
def test_impossible_settings_are_refused(field, value):
    settings = {"batch_size": 1, "updates": 1, "learning_rate": 1.0}
    with pytest.raises(BadInput, match=field):
        TrainingConfig(**(settings | {field: value}))


def test_the_rate_falls_by_its_power():
    flat, linear, square = (
        [TrainingConfig(1, 10, 1.0, warmup=0.2, decay_power=p).rate(t) for t in range(2, 10)]
        for p in (0.0, 1.0, 2.0)
    )
    assert flat == [1.0] * 8
    assert linear == pytest.approx([(8 - i) / 8 for i in range(8)])
    assert square == pytest.approx([x * x for x in linear])


def test_batches_follow_their_schedule():
    training_config = TrainingConfig(9, 5, 1e-3, schedule=(BatchPhase(2, 3), BatchPhase(3, 9)))
    assert [training_config.batch_at(t) for t in range(5)] == [3, 3, 9, 9, 9]
    assert training_config.phases() == training_config.schedule
    assert TrainingConfig(9, 5, 1e-3).phases() == (BatchPhase(5, 9),)
    with pytest.raises(IndexError):
        training_config.batch_at(5)


def test_growing_goes_by_equal_factors_and_then_stays():
    phases = growing(128, 1024, updates=20, over=9, phases=3)
    assert phases == (
        BatchPhase(3, 128),
        BatchPhase(3, 256),
        BatchPhase(3, 512),
        BatchPhase(11, 1024),
    )
    with pytest.raises(BadInput, match="schedule"):
        growing(1, 2, updates=3, over=3, phases=1)
    with pytest.raises(BadInput, match="schedule"):
        growing(1, 2, updates=9, over=2, phases=3)


def test_the_settings_after_anil():
    training_config = anil(4096, 80, 6e-4)
    assert training_config.weight_decay == 1.0
    assert training_config.schedule[0] == BatchPhase(10, 1024)
    assert training_config.schedule[-1] == BatchPhase(50, 4096)
    assert sum(p.steps for p in training_config.schedule) == 80
    assert anil(4096, 80, 6e-4, weight_decay=0.5).weight_decay == 0.5


def test_housekeeping_is_no_part_of_what_a_run_is():
    usual = TrainingConfig(4, 10, 1e-3)
    kept = TrainingConfig(
        4, 10, 1e-3, checkpoint_every=1, keep_checkpoints=9, stop_after_seconds=5.0
    )
    assert usual.identity() == kept.identity()
    for name, value in (
        ("weight_decay", 0.5),
        ("whole_words", True),
        ("micro_rows", 3),
        ("clipping", "automatic"),
        ("precision", "bfloat16"),
        ("schedule", (BatchPhase(10, 4),)),
    ):
        assert TrainingConfig(4, 10, 1e-3, **{name: value}).identity() != usual.identity()
