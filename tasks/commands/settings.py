"""From the words of a command line to a job's validated settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from dp_core.errors import BadInput
from tasks.specs import JobSettings, one_line

S = TypeVar("S", bound=JobSettings)
_PATHS = ("private_path", "public_path", "entities_train", "entities_test", "public_model")


def settings_from(kind: type[S], file: Path | None, words: Sequence[str]) -> S:
    """Return the settings of a file, changed by `key=value` words.

    Relative paths become absolute: steps run in other folders than people.

    Raises:
        BadInput: unreadable, unknown, out of range or inconsistent.
    """
    values: dict[str, object] = {}
    if file is not None:
        try:
            values |= json.loads(file.read_text())
        except (OSError, ValueError, TypeError) as error:
            raise BadInput("not a JSON object of settings", where=str(file)) from error
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise BadInput(f"{word!r} is not key=value", where="--set")
        values[key] = value
    for key in _PATHS:
        path = values.get(key)
        if isinstance(path, str) and path and "://" not in path:
            values[key] = str(Path(path).expanduser().resolve())
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise BadInput(one_line(error), where="settings") from None
