"""The trigger form contains exactly the settings of a run, and invalid values are refused."""

import json
from pathlib import Path

import jsonschema
import pytest
from airflow.sdk.exceptions import AirflowFailException, ParamValidationError

from dags.launcher import form, settings_from, settings_to_start
from tasks.protocol import JobSettings, SweepSettings

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("model", [JobSettings, SweepSettings])
def test_the_form_has_every_setting_with_words_and_a_section(model):
    params = form(model)
    assert set(params) == {"preset", *model.model_fields}
    for name, param in params.items():
        assert param.description, name
        assert param.schema["title"], name
        assert param.schema["section"], name


@pytest.mark.parametrize("model", [JobSettings, SweepSettings])
def test_the_untouched_form_is_the_default_job(model):
    values = {name: param.resolve() for name, param in form(model).items()}
    assert settings_from(model, values) == model()


def test_sections_of_the_form_are_ordered_with_the_grid_first():
    sections = [param.schema["section"] for param in form(SweepSettings).values()]
    assert sections == sorted(sections)
    assert sections[0].startswith("0.")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise_multiplier", 0),
        ("noise_multiplier", 1001),
        ("hidden", 100),
        ("unit", "hospital"),
        ("device", "mock-tpu:0"),
        ("batch_size", "many"),
        ("canary_patterns", "HH"),
    ],
)
def test_server_refuses_values_out_of_range(name, value):
    param = form(JobSettings)[name]
    with pytest.raises(ParamValidationError):
        param.resolve(value)


@pytest.mark.parametrize("model", [JobSettings, SweepSettings])
def test_the_draft_that_fields_name_knows_every_word_that_they_use(model):
    draft = jsonschema.Draft7Validator
    told = {"title", "section"}
    for name, param in form(model).items():
        if name == "preset":  # only the form has this field; all others come from the settings
            continue
        assert jsonschema.validators.validator_for(param.schema) is draft, name
        words = {*param.schema, *(word for one in param.schema.get("allOf", ()) for word in one)}
        assert words - told - {"$schema", "$defs"} <= set(draft.VALIDATORS), name


def test_the_browser_is_given_no_bound_to_clamp_to():
    """Airflow's form would silently replace 99 by a maximum of 10, and run a different job."""
    for name, param in form(JobSettings).items():
        assert not {"minimum", "maximum"} & set(param.schema), name
    bounds = form(JobSettings)["sequence_length"].schema["allOf"]
    assert bounds == [{"minimum": 16, "maximum": 512}]


def test_a_path_may_be_left_empty():
    schema = form(JobSettings)["private_path"].schema
    jsonschema.validate(None, {key: schema[key] for key in ("type",)})
    assert settings_from(JobSettings, {"private_path": None}).private_path == ""


def test_a_deployment_replaces_defaults():
    params = form(SweepSettings, {"sweep_noise_multipliers": "4"})
    assert params["sweep_noise_multipliers"].resolve() == "4"
    assert params["sweep_epochs"].resolve() == SweepSettings().sweep_epochs


def test_unknown_keys_are_refused_in_one_line():
    with pytest.raises(AirflowFailException) as refused:
        settings_from(JobSettings, {"noise_multiplyer": 2.0, "layers": 0})
    message = str(refused.value)
    assert "\n" not in message
    assert "noise_multiplyer: unknown setting" in message
    assert "layers: " in message


def test_inconsistent_settings_are_refused():
    with pytest.raises(AirflowFailException, match="batch_size is above declared_units"):
        settings_from(JobSettings, {"batch_size": 500, "declared_units": 400})


@pytest.mark.parametrize("model", [JobSettings, SweepSettings])
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/nonexist/a", "no such file or folder: /nonexist/a"),
        ("notes", "a path must be absolute: notes"),
        ("~nosuch/x", "a path must be absolute: ~nosuch/x"),
    ],
)
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
        found = settings_to_start(JobSettings, {"public_model": path})
        assert found.public_model == (path or "")


@pytest.mark.parametrize(
    ("model", "name", "foreign"),
    [
        (JobSettings, "large-batches", "hoory2021-fig1"),
        (JobSettings, "jagannatha2021-gpt2-tiny", "jagannatha2021-mednli"),
        (JobSettings, "kerrigan2020-tiny", "hoory2021-fig2-tiny"),
        (SweepSettings, "hoory2021-fig1-tiny", "no-such"),
    ],
)
def test_preset_replaces_fields_with_their_default_value(model, name, foreign):
    params = form(model)
    assert next(iter(params)) == "preset"
    assert params["preset"].resolve() == "none"
    chosen = {name: param.resolve() for name, param in params.items()} | {"preset": name}
    told = json.loads((CHECKOUT / f"tasks/presets/{name}.json").read_text())
    assert settings_from(model, chosen) == model(**told)
    changed = settings_from(model, chosen | {"layers": 3})
    assert changed == model(**told | {"layers": 3})
    assert foreign not in params["preset"].schema["enum"]
    with pytest.raises(AirflowFailException, match=f"preset: no '{foreign}' here"):
        settings_from(model, chosen | {"preset": foreign})
