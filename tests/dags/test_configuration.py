"""Schedules and settings of sweeps and trainings in the deployment's configuration."""

import json

import pytest

from dags import configuration


def test_without_configuration_sweeps_run_by_hand_only(monkeypatch):
    monkeypatch.delenv("CONFIDE_SWEEP_SETTINGS", raising=False)
    assert configuration.schedule("SWEEP") is None
    assert configuration.schedule("TRAIN") is None
    assert configuration.settings("SWEEP") == {}


def test_schedule_and_settings_are_read(monkeypatch, tmp_path):
    file = tmp_path / "sweep.json"
    file.write_text(json.dumps({"sweep_noise_multipliers": "1,2", "layers": 3}))
    monkeypatch.setenv("CONFIDE_SWEEP_SETTINGS", str(file))
    monkeypatch.setenv("CONFIDE_SWEEP_SCHEDULE", "0 3 * * 6")
    assert configuration.schedule("SWEEP") == "0 3 * * 6"
    assert configuration.settings("SWEEP") == {"sweep_noise_multipliers": "1,2", "layers": 3}


def test_variable_may_hold_the_json_object_instead_of_a_file_name(monkeypatch):
    monkeypatch.setenv("CONFIDE_TRAIN_SETTINGS", ' {"layers": 3} ')
    assert configuration.settings("TRAIN") == {"layers": 3}
    monkeypatch.setenv("CONFIDE_TRAIN_SETTINGS", '{"layers": "many"}')
    with pytest.raises(ValueError, match="CONFIDE_TRAIN_SETTINGS: layers"):
        configuration.settings("TRAIN")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"layer": 3}', "layer: unknown setting"),
        ('{"sweep_epochs": "0"}', "epochs"),
        ("{", "not JSON"),
    ],
)
def test_invalid_settings_file_is_one_line_of_import_error(monkeypatch, tmp_path, content, words):
    file = tmp_path / "sweep.json"
    file.write_text(content)
    monkeypatch.setenv("CONFIDE_SWEEP_SETTINGS", str(file))
    with pytest.raises(ValueError, match="CONFIDE_SWEEP_SETTINGS") as refused:
        configuration.settings("SWEEP")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
