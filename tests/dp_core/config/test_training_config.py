import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dp_core.config.training import BatchConfig, TrainingConfig


def training(**settings: Any) -> TrainingConfig:
    return TrainingConfig.model_validate(settings)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_learning_rate_rises_to_its_peak_and_decays_by_its_power(power):
    config = training(learning_rate=0.5, warmup=0.3, decay_power=power)
    rates = [config.learning_rate_at(step, 10) for step in range(10)]
    falling = [0.5 * (left / 7) ** power for left in range(7, 0, -1)]
    assert rates == pytest.approx([0.5 / 3, 1 / 3, 0.5, *falling])
    assert config.learning_rate_at(0, 1) == 0.5


IMPOSSIBLE = tomllib.loads((Path(__file__).parent / "impossible_training.toml").read_text())


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in IMPOSSIBLE.items() for value in values]
)
def test_impossible_settings_are_refused(field, value):
    with pytest.raises(ValidationError, match=field):
        training(**({"learning_rate": 1.0} | {field: value}))


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"batch_size": 4, "first_batch_size": 5}])
def test_impossible_batches_are_refused(wrong):
    with pytest.raises(ValidationError, match="batch_size"):
        BatchConfig(**wrong)


def test_checkpoint_settings_are_not_part_of_a_runs_identity():
    kept = training(checkpoint_every=1, time_box_minutes=5.0)
    assert training().identity() == kept.identity()


@pytest.mark.cases
def test_other_settings_are_part_of_a_runs_identity(name, value):
    assert training(**{name: value}).identity() != training().identity()


def test_younger_settings_at_their_default_change_no_hash():
    assert not {"dropout", "adam_epsilon", "device_memory"} & training().model_dump().keys()
    assert training(dropout=0.1).model_dump()["dropout"] == 0.1
    assert training(**training().model_dump()) == training()


@pytest.mark.cases
def test_rows_at_a_time_follow_from_shape_and_memory(
    kind, layers, hidden, length, words, memory, rows
):
    shape = {"kind": kind, "layers": layers, "hidden": hidden}
    sizes = shape | {"sequence_length": length, "vocabulary_size": words}
    assert training(device_memory=memory).rows_at_once(**sizes) == rows
    assert training(device_memory=memory, micro_rows=70).rows_at_once(**sizes) == 70
    numbers = rows * layers * hidden * length * 44 + 5 * hidden * (words + 12 * layers * hidden)
    assert rows == 1 or 4 * numbers <= memory * 1e9
