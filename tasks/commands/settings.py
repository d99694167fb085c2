"""From the words of a command line to a job's validated settings."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from dp_core.errors import BadInput
from tasks.commands.readiness import refuse_what_is_missing
from tasks.protocol import JobSettings, SweepSettings, one_line
from tasks.runtime.deployment import Deployment

S = TypeVar("S", bound=JobSettings)
_PATHS = (
    "private_path",
    "public_path",
    "entities_train",
    "entities_test",
    "entities_patients",
    "public_model",
)


def settings_from(kind: type[S], file: Path | None, words: Sequence[str]) -> S:
    """Return the settings of a run that is about to start here: as told, and its files are there.

    `CONFIDE_LAUNCHER` is Airflow's: it says nothing of steps that this machine starts itself.

    Raises:
        BadInput: as `settings_told`; or a path that does not exist, or a device that the
            environment of this machine's steps cannot give. Found out by a step, it would leave
            the run's registration in the ledger.
    """
    settings = settings_told(kind, file, words)
    refuse_what_is_missing(settings, Deployment.from_environment())
    return settings


def settings_told(kind: type[S], file: Path | None, words: Sequence[str]) -> S:
    """Return the settings of a file, changed by `key=value` words.

    Relative paths become absolute: steps run in other folders than people.

    Raises:
        BadInput: unreadable, unknown, out of range or inconsistent.
    """
    values = {} if file is None else _object(file)
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise BadInput(f"{word!r} is not key=value", where="--set")
        values[key] = value
    _refuse_unknown(kind, values)
    for key in _PATHS:
        path = values.get(key)
        if isinstance(path, str) and path and "://" not in path:
            values[key] = absolute(key, path)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise BadInput(one_line(error), where="settings") from None


def absolute(name: str, path: str) -> str:
    """Return a local path as steps are told it: absolute, its links followed.

    Raises:
        BadInput: it cannot be a path; `name` says what named it.
    """
    try:
        return str(Path(path).expanduser().resolve())
    except (RuntimeError, ValueError):  # no such user; links in a circle; a zero byte
        raise BadInput(f"cannot be a path: {path!r}", where=name) from None


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise BadInput(f"not JSON ({error.msg}: {place})", where=str(file)) from None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None)
        if reason is None:
            encoding = isinstance(error, UnicodeError)
            reason = "not UTF-8" if encoding else "numbers too long or lists too deep"
        raise BadInput(f"cannot be read ({reason})", where=str(file)) from None
    if not isinstance(found, dict):
        raise BadInput(
            "not a JSON object",
            where=str(file),
            fix='Write the settings as {"epochs": 2, …}.',
        )
    return found


def _refuse_unknown(kind: type[JobSettings], keys: Iterable[str]) -> None:
    job = "dp_sweep " if issubclass(kind, SweepSettings) else ""
    for key in keys:
        if key in kind.model_fields:
            continue
        if key in SweepSettings.model_fields:
            raise BadInput("belongs to dp_sweep", where=f"settings: {key}")
        near = difflib.get_close_matches(key, kind.model_fields, n=1)
        guess = f"Did you mean {near[0]}? " if near else ""
        raise BadInput(
            "unknown setting",
            where=f"settings: {key}",
            fix=f"{guess}Names: confide run {job}--show-settings",
        )
