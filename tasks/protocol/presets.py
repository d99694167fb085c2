"""Presets: named settings files of the project, for the trigger form and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tasks.protocol.settings_file import read_object

_FOLDER = Path(__file__).parents[1] / "presets"
PRESETS = {file.stem: file for file in sorted(_FOLDER.glob("*.json"))}
NO_PRESET = "none"


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
