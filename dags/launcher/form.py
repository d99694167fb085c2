"""The settings of a DAG: its schedule, its trigger form, and the settings of a submitted form.

The deployment configures them by environment variables:

`CONFIDE_TRAIN_SCHEDULE`  the schedule of `dp_bert` (cron, or a preset such as @weekly)
`CONFIDE_TRAIN_SETTINGS`  the defaults of `dp_bert`'s form: a JSON object, or the name of its file
`CONFIDE_SWEEP_SCHEDULE`  the schedule of `dp_sweep`
`CONFIDE_SWEEP_SETTINGS`  the defaults of `dp_sweep`'s form, likewise
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from airflow.sdk import DAG, Param
from airflow.sdk.definitions.param import ParamsDict
from airflow.sdk.exceptions import AirflowFailException
from pydantic import BaseModel, ValidationError

from dags.launcher.step_operator import launcher
from dp_core.config.fields import ESSENTIALS, Config, one_line
from tasks.protocol.job import missing_file
from tasks.protocol.settings import JobSettings
from tasks.protocol.settings_file import (
    NO_PRESET,
    parse_object,
    presets_of,
    read_object,
    with_preset,
)
from tasks.protocol.sweep import SweepSettings

Settings = TypeVar("Settings", bound=BaseModel)
Job = TypeVar("Job", bound=JobSettings)

# Fields of the form that are no settings.
PRESET, PLAN_ONLY, THIS_PAGE = "preset", "plan_only", "page"
_PASSED_ON = ("type", "title", "section", "enum", "pattern", "multipleOf")
# Airflow checks each field's schema for each task. For the keywords used here, this draft has the
# same meaning as the latest one, which takes three times as long to check.
_DRAFT = "http://json-schema.org/draft-07/schema#"
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}


def schedule(name: str) -> str | None:
    """Return the schedule `TRAIN` or `SWEEP`, or None if the DAG is only started by hand."""
    return os.environ.get(f"CONFIDE_{name}_SCHEDULE") or None


def form_defaults(name: str) -> dict[str, Any]:
    """Return the deployment's defaults of the form `TRAIN` or `SWEEP`.

    Raises:
        ValueError: the defaults are invalid; Airflow shows the line as an import error.
    """
    variable, model = f"CONFIDE_{name}_SETTINGS", SweepSettings if name == "SWEEP" else JobSettings
    given = configured_object(variable)
    try:
        model.model_validate(given)
    except ValidationError as error:
        raise ValueError(f"{variable}: {one_line(error)}") from None
    return given


def configured_object(variable: str) -> dict[str, Any]:
    """Return the JSON object in a variable or in the file that it names; {} if it is empty.

    Raises:
        BadInput: there is no such object; Airflow shows the line as an import error.
    """
    value = os.environ.get(variable, "").strip()
    if value and not value.startswith("{"):
        return read_object(Path(value), variable)
    return parse_object(value or "{}", variable)


def form(model: type[Config], overrides: Mapping[str, Any] | None = None) -> dict[str, Param]:
    """Return the trigger form of a settings model, section by section.

    Args:
        model: the settings model; the form has its titles, descriptions, ranges, choices and
            patterns.
        overrides: defaults from the deployment's configuration.
    """
    properties = model.form_schema()
    defaults = {name: field.get("default") for name, field in properties.items()}
    defaults |= dict(overrides or {})
    settings = {name: _param(properties[name], defaults[name]) for name in properties}
    if not (presets := presets_of(model)):
        return settings
    preset = Param(
        NO_PRESET,
        type=["null", "string"],
        enum=[NO_PRESET, *presets],
        title="Preset",
        section=ESSENTIALS,
        description="A named set of settings (tasks/presets). It replaces the fields below that "
        "have their default value; fields that you change keep your value.",
    )
    plan_only = Param(
        False,
        type=["null", "boolean"],
        title="Only plan",
        section=ESSENTIALS,
        description="The run ends after the task Budget. Its log has the ε of each data set, "
        "whether the run fits the budget, and advice. No text is read and nothing is charged.",
    )
    return {PRESET: preset, PLAN_ONLY: plan_only, **settings}


def with_form(dag: DAG, fields: Mapping[str, Param]) -> DAG:
    """Return a DAG with its trigger form, which its tasks read during the run.

    If the form were set before the tasks are made, Airflow would copy it into each of them: a third
    of a task's starting time, and most of the stored DAG.
    """
    dag.params = ParamsDict(dict(fields))
    return dag


def _param(field: Mapping[str, Any], default: Any) -> Param:
    schema = {key: field[key] for key in _PASSED_ON if key in field} | {"$schema": _DRAFT}
    bounds = {key: field[key] for key in _BOUNDS if key in field}
    if bounds:
        # Inside `allOf`, the server checks the bounds and returns the reason. Next to `type`, the
        # browser would also clamp the value silently, and another job would run.
        schema["allOf"] = [bounds]
    # The form sends null for a field left empty, which then has its default value. It marks fields
    # of other types by a star.
    schema["type"] = ["null", schema["type"]]
    if default is None and "enum" in schema:
        schema |= {"enum": [*schema["enum"], None], "values_display": {"null": "automatic"}}
    limits = ", ".join(_BOUNDS[key].format(_number(value)) for key, value in bounds.items())
    parts = [field.get("description", ""), f"({limits})" if limits else ""]
    return Param(default, description=" ".join(filter(None, parts)) or field["title"], **schema)


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


def settings_from(model: type[Settings], params: Mapping[str, Any]) -> Settings:
    """Return the settings of a triggered run, checked again.

    Airflow accepts unknown keys in a run's conf; this function refuses them.

    Raises:
        AirflowFailException: the settings are invalid; another try cannot help.
    """
    no_settings = (PLAN_ONLY, THIS_PAGE)
    given = {k: value for k, value in params.items() if value is not None and k not in no_settings}
    try:
        return model.model_validate(with_preset(model, given, given.pop(PRESET, NO_PRESET)))
    except ValueError as error:
        reason = one_line(error) if isinstance(error, ValidationError) else error
        raise AirflowFailException(f"settings refused: {reason}") from None


def settings_to_start(model: type[Job], params: Mapping[str, Any]) -> Job:
    """Return the settings of a run after checking that its files exist.

    If only a step noticed a wrong path, the run's registration would remain in the ledger.

    Raises:
        AirflowFailException: as `settings_from`; or steps on this machine cannot read a path.
    """
    settings = settings_from(model, params)
    # The files of containers and pods cannot be checked from this machine.
    if launcher() == "process" and (missing := missing_file(settings)):
        name, reason = missing
        raise AirflowFailException(f"settings refused: {name}: {reason}")
    return settings
