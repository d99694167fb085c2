"""Options of the command line for a job's settings, and checks of its files and device."""

import difflib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import click
from pydantic import BaseModel, ValidationError

from dp_core.config.fields import named_paths, one_line
from dp_core.errors import BadInput
from tasks.commands.command_options import options, options_of
from tasks.protocol.job import budget_of_run, missing_file
from tasks.protocol.settings import JobSettings
from tasks.protocol.settings_file import PRESETS, read_object
from tasks.protocol.settings_file import preset as preset_settings
from tasks.protocol.sweep import SweepSettings
from tasks.runtime.deployment import Deployment, is_executable, write_private

JOBS: dict[str, type[JobSettings]] = {"dp_bert": JobSettings, "dp_sweep": SweepSettings}
job_argument = click.argument("job", type=click.Choice(list(JOBS)), default="dp_bert")
S = TypeVar("S", bound=JobSettings)
M = TypeVar("M", bound=BaseModel)


# Keyword arguments of `settings_of_options`.
settings_options = options(
    click.option(
        "--preset",
        type=click.Choice(list(PRESETS)),
        metavar="NAME",
        help=f"Settings by name: {', '.join(PRESETS)}.",
    ),
    options_of("settings"),
)


def settings_from(kind: type[S], **given: Any) -> S:
    """Return the settings of a run that starts on this machine, after checking files and device.

    If only a step noticed the error, the run's registration would remain in the ledger.
    `CONFIDE_LAUNCHER` is ignored here, because it only concerns Airflow.

    Raises:
        BadInput: as `settings_of_options`; or a path does not exist, a table lacks a column, a
            public file is not declared, or the steps' environment lacks the device.
    """
    return ready_settings(kind, values_of_options(kind, **given), Deployment.from_environment())


def ready_settings(
    kind: type[S], given: Mapping[str, Any], deployment: Deployment, to_declare: str | None = None
) -> S:
    """Return the settings with these values, for a run of a deployment that starts now.

    Args:
        kind, given, deployment: of the settings.
        to_declare: a public source that the caller will declare; the others must be declared.

    Raises:
        BadInput: as `settings_from`.
    """
    settings = validated(kind, with_absolute_paths(kind, given))
    if missing := missing_file(settings):
        name, reason = missing
        raise BadInput(reason, where=name)
    _refuse_missing_columns(settings)
    if settings.device in ("gpu", "tpu") and _processor_only(deployment):
        what = f"the TensorFlow of this environment (tensorflow-cpu) drives no {settings.device}"
        fix = "Choose cpu or mock-tpu:N; docs/cloud.md has images for others."
        raise BadInput(what, where="device", fix=fix)
    # The run's first step checks the declarations of files in buckets.
    declared = budget_of_run(settings).called_public
    local = [source for source in declared if "://" not in source.uri and source.uri != to_declare]
    if local:  # the ledger is imported only if it is needed
        from tasks.releases.declarations import refuse_undeclared

        deployment.prepare()
        refuse_undeclared(local, deployment)
    return settings


def _refuse_missing_columns(settings: JobSettings) -> None:
    """Refuse a table on this machine without the columns that its settings name.

    Only its header is read.

    Raises:
        BadInput: names the setting, and the columns that the table has.
    """
    for role in ("private", "public"):
        format, path, columns = (
            getattr(settings, f"{role}_{part}") for part in ("format", "path", "columns")
        )
        if format in ("synthetic", "text") or "://" in path:
            continue
        from dp_core.data.readers.note_tables import header_of, layout_of  # imports pyarrow

        layout = layout_of(format, columns)
        try:
            roles = layout.roles(header_of(Path(path), format, layout))
        except BadInput as error:
            raise BadInput(error.what, where=f"{role}_columns", fix=error.fix) from None
        if role == "private" and settings.unit == "patient" and "patient" not in roles:
            what = "the unit is the patient, and no column of patients is named or recognised"
            fix = "Name it (patient:COLUMN), or protect the unit `document`."
            raise BadInput(what, where="private_columns", fix=fix)


def settings_of_options(
    kind: type[S], preset: str | None = None, file: Path | None = None, words: Sequence[str] = ()
) -> S:
    """Return the settings of a preset, changed by a file, changed by `key=value` words.

    Raises:
        BadInput: unreadable, unknown, out of range or inconsistent.
    """
    return validated(kind, values_of_options(kind, preset, file, words))


def validated(kind: type[M], values: Mapping[str, Any], where: str = "settings") -> M:
    """Return the settings with these values.

    Raises:
        BadInput: out of range or inconsistent.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise BadInput(one_line(error), where=where) from None


def values_of_options(
    kind: type[JobSettings],
    preset: str | None = None,
    file: Path | None = None,
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the given values of a preset, changed by a file, changed by `key=value` words.

    Relative paths become absolute: steps run in other folders than people.

    Raises:
        BadInput: unreadable, or unknown.
    """
    values = preset_settings(preset) if preset else {}
    values |= read_object(file, str(file)) if file else {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise BadInput(f"{word!r} is not key=value", where="--set")
        values[key] = value
    return with_absolute_paths(kind, values)


def with_absolute_paths(kind: type[JobSettings], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by name with absolute paths.

    Raises:
        BadInput: a name is unknown, or a text cannot be a path.
    """
    _refuse_unknown(kind, given)
    values = dict(given)
    for key, named in named_paths(kind, values).items():
        values[key] = ",".join(p if "://" in p else absolute(key, p) for p in named)
    return values


def write_settings(settings: Mapping[str, Any], file: Path, option: str) -> None:
    """Write settings to the file of an option, whole or not at all, for `confide run --settings`.

    Raises:
        BadInput: the file cannot be written, or holds anything but settings.
    """
    where, fix = f"{option} {file}", "Name another file."
    try:
        if file.exists() and not _holds_settings(file):
            raise BadInput("it holds no settings, and would be lost", where=where, fix=fix)
        write_private(file.resolve(), json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        what = f"cannot be written ({os.strerror(error.errno or 0)})"
        raise BadInput(what, where=where, fix=fix) from None


def _holds_settings(file: Path) -> bool:
    try:
        return read_object(file, "").keys() <= SweepSettings.model_fields.keys()
    except BadInput:
        return file.is_file() and not file.stat().st_size


def absolute(name: str, path: str) -> str:
    """Return a local path for steps: absolute, with links resolved.

    Raises:
        BadInput: the text is not a valid path; the message has `name`, its setting or option.
    """
    try:
        return str(Path(path).expanduser().resolve())
    except (RuntimeError, ValueError):  # no such user; links in a circle; a zero byte
        raise BadInput(f"cannot be a path: {path!r}", where=name) from None


def _refuse_unknown(kind: type[JobSettings], keys: Iterable[str]) -> None:
    job = "dp_sweep " if issubclass(kind, SweepSettings) else ""
    for key in keys:
        if key in kind.model_fields:
            continue
        if key in SweepSettings.model_fields:
            raise BadInput("belongs to dp_sweep", where=f"settings: {key}")
        fix = f"Names: confide run {job}--show-settings"
        # A guess must be a slip of the keyboard.
        if near := difflib.get_close_matches(key, kind.model_fields, n=1, cutoff=0.8):
            fix = f"Did you mean {near[0]}? {fix}"
        elif "epsilon" in key or key == "eps":
            fix = f"target_epsilon is the ε of a run. {fix}"
        raise BadInput("unknown setting", where=f"settings: {key}", fix=fix)


def _processor_only(deployment: Deployment) -> bool:
    """Return whether the steps' environment is this one, and its TensorFlow the processor's.

    Only the installed packages are examined, because importing TensorFlow takes seconds.
    """
    python = Path(deployment.task_python)
    if is_executable(python) and python.parent.parent.resolve() != Path(sys.prefix).resolve():
        return False  # the packages of another environment are unknown
    installed = {d.name.replace("_", "-").lower() for d in metadata.distributions()}
    return installed & {"tensorflow", "tensorflow-cpu"} == {"tensorflow-cpu"}
