from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dp_core.config.training import BatchConfig, TrainingConfig


def training(**settings: Any) -> TrainingConfig:
    return TrainingConfig.model_validate(settings)


def test_learning_rate_rises_to_its_peak_and_falls_towards_zero() -> None:
    config = training(learning_rate=1.0, warmup=0.3)
    rates = [config.learning_rate_at(step, 10) for step in range(10)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 6 / 7, 5 / 7, 4 / 7, 3 / 7, 2 / 7, 1 / 7])
    assert training(learning_rate=0.5).learning_rate_at(0, 1) == 0.5


def test_learning_rate_decays_by_its_power() -> None:
    flat, linear, square = (
        [
            training(learning_rate=1.0, warmup=0.2, decay_power=power).learning_rate_at(step, 10)
            for step in range(2, 10)
        ]
        for power in (0.0, 1.0, 2.0)
    )
    assert flat == [1.0] * 8
    assert linear == pytest.approx([(8 - i) / 8 for i in range(8)])
    assert square == pytest.approx([x * x for x in linear])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("warmup", 1.1),
        ("micro_rows", 0),
        ("noise_floor", -0.1),
        ("decay_power", -1.0),
        ("weight_decay", -0.1),
        ("weight_decay", 1.0),  # at a learning rate of 1 it would remove whole weights
        ("weight_decay", float("inf")),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("time_box_minutes", -1.0),
    ],
)
def test_impossible_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        training(**({"learning_rate": 1.0} | {field: value}))


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"batch_size": 4, "first_batch_size": 5}])
def test_impossible_batches_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="batch_size"):
        BatchConfig(**wrong)


def test_checkpoint_settings_are_not_part_of_a_runs_identity() -> None:
    usual = training()
    kept = training(checkpoint_every=1, time_box_minutes=5.0)
    assert usual.identity() == kept.identity()
    for name, value in {
        "weight_decay": 0.5,
        "whole_words": True,
        "micro_rows": 3,
        "precision": "bfloat16",
    }.items():
        assert training(**{name: value}).identity() != usual.identity()
