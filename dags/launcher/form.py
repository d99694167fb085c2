"""Between settings and Airflow's trigger form, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from airflow.sdk import DAG, Param
from airflow.sdk.definitions.param import ParamsDict
from airflow.sdk.exceptions import AirflowFailException
from pydantic import BaseModel, ValidationError

from dags.launcher.step_operator import launcher
from tasks.protocol import JobSettings, missing_file, one_line
from tasks.protocol.presets import NO_PRESET, presets_of, with_preset

Settings = TypeVar("Settings", bound=BaseModel)
Job = TypeVar("Job", bound=JobSettings)

PRESET = "preset"  # the one field of the form that is no setting
_PASSED_ON = ("type", "title", "section", "enum", "pattern", "multipleOf")
# Airflow has each field's schema checked for each task. Of what fields use, the draft means the
# same as the latest, whose own schema takes three times as long to check against.
_DRAFT = "http://json-schema.org/draft-07/schema#"
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}


def form(model: type[BaseModel], overrides: Mapping[str, Any] | None = None) -> dict[str, Param]:
    """Return the trigger form of a settings model, section by section.

    Args:
        model: its fields' titles, descriptions, ranges, choices and patterns become the form.
        overrides: defaults that a deployment's configuration replaces.
    """
    properties = model.model_json_schema()["properties"]
    defaults = {name: field.get("default") for name, field in properties.items()}
    defaults |= dict(overrides or {})
    in_order = sorted(properties, key=lambda name: str(properties[name].get("section", "")))
    settings = {name: _param(properties[name], defaults[name]) for name in in_order}
    if not (presets := presets_of(model)):
        return settings
    first = properties[in_order[0]]["section"]
    chosen = Param(
        NO_PRESET,
        type="string",
        enum=[NO_PRESET, *presets],
        title="Preset",
        section=first,
        description="Settings of the project's own, by name (tasks/presets). They take the place "
        "of whatever below is left as the project has it; what you change stays.",
    )
    return {PRESET: chosen, **settings}


def with_form(dag: DAG, fields: Mapping[str, Param]) -> DAG:
    """Return a DAG with its trigger form, which its tasks read at the run.

    Given before its tasks are made, the form would be copied into each of them: a third of the time
    that a task takes to start, and most of what Airflow keeps of the DAG.
    """
    dag.params = ParamsDict(dict(fields))
    return dag


def _param(field: Mapping[str, Any], default: Any) -> Param:
    schema = {key: field[key] for key in _PASSED_ON if key in field} | {"$schema": _DRAFT}
    bounds = {key: field[key] for key in _BOUNDS if key in field}
    if bounds:
        # Inside `allOf` the server checks them and answers with the reason. Beside `type` the
        # browser would also clamp the value without a word, and another job would run.
        schema["allOf"] = [bounds]
    if schema.get("type") == "string" and default == "":
        schema["type"] = ["null", "string"]  # the form sends null for a field left empty
    limits = ", ".join(_BOUNDS[key].format(_number(value)) for key, value in bounds.items())
    words = [field.get("description", ""), f"({limits})" if limits else ""]
    return Param(default, description=" ".join(filter(None, words)) or field["title"], **schema)


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def settings_from(model: type[Settings], params: Mapping[str, Any]) -> Settings:
    """Return the settings that a run was triggered with, checked once more.

    Airflow lets unknown keys of a run's conf through; here they are refused.

    Raises:
        AirflowFailException: what is wrong, in one line; trying again cannot help.
    """
    given = {name: value for name, value in params.items() if value is not None}
    try:
        return model.model_validate(with_preset(model, given, given.pop(PRESET, NO_PRESET)))
    except ValidationError as error:
        raise AirflowFailException(f"settings refused: {one_line(error)}") from None
    except ValueError as error:
        raise AirflowFailException(f"settings refused: {error}") from None


def settings_to_start(model: type[Job], params: Mapping[str, Any]) -> Job:
    """Return the settings of a run that registers nothing before its files are found.

    Found out by a step, a wrong path would leave the run's registration in the ledger.

    Raises:
        AirflowFailException: as `settings_from`; or a path that steps on this machine cannot read.
    """
    settings = settings_from(model, params)
    # What containers and pods see, this machine cannot know.
    if launcher() == "process" and (missing := missing_file(settings)):
        name, reason = missing
        raise AirflowFailException(f"settings refused: {name}: {reason}")
    return settings
