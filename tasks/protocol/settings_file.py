"""Settings from a file, an environment variable, or a preset, and the rule for promotion."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel

from dp_core.errors import BadInput

MOST_BYTES = 1 << 20  # size limit of a settings file; the largest sweeps take a few kilobytes
_FOLDER = Path(__file__).parents[1] / "presets"
PRESETS = {file.stem: file for file in sorted(_FOLDER.glob("*.json"))}
NO_PRESET = "none"
PROMOTE = "CONFIDE_PROMOTE"

# The deployment's rule that decides which registered models get the alias `promotable`.
# audited: models with an audit that could have contradicted the claim and did not.
# unaudited: also models without such an audit.
# approved: either kind, but only after a person has read the verdict and approved the model.
Promotion = Literal["audited", "unaudited", "approved"]


def promotion() -> Promotion:
    """Return the rule that the environment names, by default `audited`.

    Raises:
        BadInput: the environment names an unknown rule.
    """
    word = os.environ.get(PROMOTE) or "audited"
    if word not in get_args(Promotion):
        raise BadInput(
            f"unknown rule {word!r}", where=PROMOTE, fix=f"Use {', '.join(get_args(Promotion))}."
        )
    return word  # type: ignore[return-value]  # checked above


def read_object(file: Path, where: str) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        file: a regular UTF-8 file of at most `MOST_BYTES`.
        where: the place that an error names.

    Raises:
        BadInput: the file cannot be read, is too large, or holds no JSON object.
    """
    try:
        return parse_object(_content(file).decode("utf-8-sig"), where)
    except UnicodeError:
        reason = "not UTF-8"
    except OSError as error:
        reason = error.strerror or "no file"
    raise BadInput(f"cannot be read ({reason})", where=where)


def _content(file: Path) -> bytes:
    """Return the bytes of a regular file.

    Other files are refused: reading a device may never end, and opening a pipe waits for a writer.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or is too large.
    """
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"more than {MOST_BYTES >> 20} MiB")
    return content


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object in a text.

    Raises:
        BadInput: the text holds no JSON object, or a key occurs twice in an object.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in values if keys.count(key) > 1)
            raise BadInput(
                "the key occurs twice", where=f"{where}: {twice}", fix="Write each setting once."
            )
        return values

    try:
        values = json.loads(text, object_pairs_hook=without_duplicates)
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno}"
        fix = "JSON has double quotes, and no comma after the last value."
        raise BadInput(f"not JSON ({error.msg}: {position})", where=where, fix=fix) from None
    except (ValueError, RecursionError):
        reason = "numbers too long or lists too deep"
        raise BadInput(f"cannot be read ({reason})", where=where) from None
    if not isinstance(values, dict):
        raise BadInput(
            "not a JSON object", where=where, fix='Write the settings as {"epochs": 2, …}.'
        )
    return values


def preset(name: str) -> dict[str, Any]:
    """Return the settings of a preset.

    Raises:
        KeyError: no preset has that name.
    """
    return read_object(PRESETS[name], name)


def presets_of(model: type[BaseModel]) -> list[str]:
    """Return the names of the presets whose settings are all fields of a model."""
    return [name for name in PRESETS if preset(name).keys() <= model.model_fields.keys()]


def with_preset(model: type[BaseModel], given: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a preset's settings, overridden by the form's values that differ from the defaults.

    Args:
        model: model of the settings.
        given: all values of the form.
        name: name of the preset, or `NO_PRESET` for the form's values alone.

    Raises:
        ValueError: no preset of these settings has that name.
    """
    if name == NO_PRESET:
        return given
    if name not in presets_of(model):
        raise ValueError(f"preset: no {name!r} here; there are {', '.join(presets_of(model))}")
    defaults = {field: info.default for field, info in model.model_fields.items()}
    changed = {key: v for key, v in given.items() if key not in defaults or v != defaults[key]}
    return preset(name) | changed
