import json
from itertools import groupby
from pathlib import Path

import jsonschema
import pytest
from airflow.sdk.exceptions import AirflowFailException, ParamValidationError

from dags.launcher.form import form, form_defaults, schedule, settings_from, settings_to_start
from dp_core.errors import BadInput
from tasks.protocol.settings import JobSettings
from tasks.protocol.sweep import SweepSettings

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("model", [JobSettings, SweepSettings])
def test_form_describes_every_setting_and_is_the_default_job_if_untouched(model):
    params = form(model)
    assert set(params) == {"preset", "plan_only", *model.model_fields}
    for name, param in params.items():
        assert param.description and param.schema["title"] and param.schema["section"], name
        # Airflow's form would silently replace 99 by a maximum of 10, and run a different job.
        assert not {"minimum", "maximum"} & set(param.schema), name
        if name in ("preset", "plan_only"):  # all other fields come from the settings
            continue
        draft = jsonschema.Draft7Validator
        assert jsonschema.validators.validator_for(param.schema) is draft, name
        words = {*param.schema, *(word for part in param.schema.get("allOf", ()) for word in part)}
        words -= {"title", "section", "$schema", "values_display"}
        assert words <= set(draft.VALIDATORS), name
    values = {name: param.resolve() for name, param in params.items()}
    assert settings_from(model, values) == model()
    assert params["sequence_length"].schema["allOf"] == [{"minimum": 16, "maximum": 512}]
    essentials, *sections = (list(fields) for _, fields in groupby(params, section_of(params)))
    assert len(essentials) <= 20
    assert essentials[:4] == ["preset", "plan_only", "private_format", "private_path"]
    names = [section_of(params)(fields[0]) for fields in sections]
    assert len(set(names)) == len(names)
    grid = ["Grid of the sweep"] if model is SweepSettings else []
    assert names[: -5 or None] == grid and all(name.startswith("Expert: ") for name in names[-5:])


def section_of(params):
    return lambda name: params[name].schema["section"]


@pytest.mark.cases
def test_server_refuses_values_out_of_range(name, value):
    param = form(JobSettings)[name]
    with pytest.raises(ParamValidationError):
        param.resolve(value)


def test_form_requires_no_field_and_a_field_left_empty_has_its_default_value():
    for name, param in form(JobSettings).items():
        if "enum" not in param.schema:
            assert param.resolve(None) is None, name
    empty = {"private_path": None, "layers": None}
    assert settings_from(JobSettings, empty) == JobSettings()


def test_a_deployment_replaces_defaults():
    params = form(SweepSettings, {"sweep_noise_multipliers": "4"})
    assert params["sweep_noise_multipliers"].resolve() == "4"
    assert params["sweep_epochs"].resolve() == SweepSettings().sweep_epochs


@pytest.mark.cases
def test_unknown_and_inconsistent_settings_are_refused_in_one_line(given, reasons):
    with pytest.raises(AirflowFailException) as refused:
        settings_from(JobSettings, given)
    assert "\n" not in str(refused.value)
    assert all(reason in str(refused.value) for reason in reasons)


@pytest.mark.parametrize("model", [JobSettings, SweepSettings])
@pytest.mark.cases
def test_a_file_that_is_not_there_is_refused_before_anything_is_registered(
    monkeypatch, model, path, words
):
    monkeypatch.delenv("CONFIDE_LAUNCHER", raising=False)
    with pytest.raises(AirflowFailException, match=f"settings refused: public_model: {words}"):
        settings_to_start(model, {"public_model": path})
    for launcher in ("docker", "kubernetes"):  # this machine cannot see the files of their steps
        monkeypatch.setenv("CONFIDE_LAUNCHER", launcher)
        assert settings_to_start(model, {"public_model": path}).public_model == path


def test_a_file_that_is_there_is_taken(monkeypatch, tmp_path):
    monkeypatch.delenv("CONFIDE_LAUNCHER", raising=False)
    for path in (str(tmp_path), "gs://bucket/a", None):
        settings = settings_to_start(JobSettings, {"public_model": path})
        assert settings.public_model == (path or "")


@pytest.mark.cases
def test_preset_replaces_fields_with_their_default_value(dag, name, foreign):
    model = SweepSettings if dag == "dp_sweep" else JobSettings
    params = form(model)
    assert next(iter(params)) == "preset"
    assert params["preset"].resolve() == "none"
    chosen = {name: param.resolve() for name, param in params.items()} | {"preset": name}
    preset = json.loads((CHECKOUT / f"tasks/presets/{name}.json").read_text())
    assert settings_from(model, chosen) == model(**preset)
    changed = settings_from(model, chosen | {"layers": 3})
    assert changed == model(**preset | {"layers": 3})
    assert foreign not in params["preset"].schema["enum"]
    with pytest.raises(AirflowFailException, match=f"preset: no '{foreign}' here"):
        settings_from(model, chosen | {"preset": foreign})


# --- the deployment's schedules and defaults


def test_schedule_and_defaults_come_from_variables(monkeypatch, tmp_path):
    assert (schedule("SWEEP"), form_defaults("SWEEP")) == (None, {})
    file = tmp_path / "sweep.json"
    file.write_text('{"sweep_noise_multipliers": "1,2", "layers": 3}')
    monkeypatch.setenv("CONFIDE_SWEEP_SETTINGS", str(file))
    monkeypatch.setenv("CONFIDE_SWEEP_SCHEDULE", "0 3 * * 6")
    monkeypatch.setenv("CONFIDE_TRAIN_SETTINGS", ' {"layers": 3} ')  # instead of a file's name
    assert schedule("SWEEP") == "0 3 * * 6"
    assert form_defaults("SWEEP") == {"sweep_noise_multipliers": "1,2", "layers": 3}
    assert form_defaults("TRAIN") == {"layers": 3}


@pytest.mark.cases
def test_invalid_defaults_are_one_line_of_import_error(monkeypatch, tmp_path, content, words):
    file = tmp_path / "sweep.json"
    file.write_text(content)
    monkeypatch.setenv("CONFIDE_SWEEP_SETTINGS", str(file))
    with pytest.raises((ValueError, BadInput), match="CONFIDE_SWEEP_SETTINGS") as refused:
        form_defaults("SWEEP")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
