"""Configuration of the DAGs by environment variables: schedules, forms' defaults, corpora.

`CONFIDE_TRAIN_SCHEDULE`  the schedule of `dp_bert` (cron, or a preset such as @weekly)
`CONFIDE_TRAIN_SETTINGS`  a JSON file: the defaults of `dp_bert`'s form
`CONFIDE_SWEEP_SCHEDULE`  the schedule of `dp_sweep`
`CONFIDE_SWEEP_SETTINGS`  a JSON file: the defaults of `dp_sweep`'s form
`CONFIDE_CORPORA`         a JSON file: private data set -> the settings of the job that a new
                          version of it starts
`CONFIDE_PROMOTE`         which models get the alias `promotable` (tasks/protocol/promotion.py)

A variable may also hold the JSON object itself instead of a file's name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dp_core.errors import BadInput
from tasks.protocol import JobSettings, Promotion, SweepSettings, one_line
from tasks.protocol import promotion as rule_of
from tasks.protocol.settings import MADE_UP
from tasks.protocol.settings_file import parse_object, read_object


def schedule(name: str) -> str | None:
    """Return the schedule `TRAIN` or `SWEEP`, or None if the DAG is only started by hand."""
    return os.environ.get(f"CONFIDE_{name}_SCHEDULE") or None


def settings(name: str) -> dict[str, Any]:
    """Return the deployment's defaults of the form `TRAIN` or `SWEEP`.

    Raises:
        ValueError: the defaults are invalid; Airflow shows the line as an import error.
    """
    variable, model = f"CONFIDE_{name}_SETTINGS", SweepSettings if name == "SWEEP" else JobSettings
    given = _read(variable)
    try:
        model.model_validate(given)
    except ValidationError as error:
        raise ValueError(f"{variable}: {one_line(error)}") from None
    return given


def promotion() -> Promotion:
    """Return the deployment's rule for promotion.

    Raises:
        ValueError: the rule is unknown; Airflow shows the line as an import error.
    """
    try:
        return rule_of(os.environ)
    except BadInput as error:
        raise ValueError(str(error)) from None


def corpora() -> dict[str, dict[str, Any]]:
    """Return the settings of the job that a new version starts, by private data set.

    Raises:
        ValueError: the settings are invalid; Airflow shows the line as an import error.
    """
    # By default, the project's made-up notes show the effect of a new version.
    given = _read("CONFIDE_CORPORA") or {MADE_UP: {}}
    for name, settings in given.items():
        if not isinstance(settings, dict):
            raise ValueError(f"CONFIDE_CORPORA: {name}: not an object of settings")
        if fixed := {"private_dataset", "data_version"} & set(settings):
            raise ValueError(f"CONFIDE_CORPORA: {name}: {sorted(fixed)[0]} comes with the event")
        try:
            job_of(name, settings, "1")
        except ValidationError as error:
            raise ValueError(f"CONFIDE_CORPORA: {name}: {one_line(error)}") from None
    return given


def job_of(corpus: str, settings: dict[str, Any], version: str) -> JobSettings:
    """Return the job that a version of a corpus starts.

    Raises:
        ValidationError: the name, the settings or the version are invalid.
    """
    named = {"private_dataset": corpus, "data_version": version}
    return JobSettings.model_validate({**settings, **named})


def _read(variable: str) -> dict[str, Any]:
    """Return the JSON object in a variable or in the file that it names; {} if it is empty."""
    value = os.environ.get(variable, "").strip()
    if not value:
        return {}
    try:
        return (
            parse_object(value, variable)
            if value.startswith("{")
            else read_object(Path(value), variable)
        )
    except BadInput as error:
        raise ValueError(str(error)) from None
