"""Declaration of settings: default, section of the form, title, description and range."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

# The sections of the form and of the command line: the settings that most users need, then others.
ESSENTIALS, GRID = "Essentials", "Grid of the sweep"
MORE_DATA, MORE_PRIVACY = "Expert: data", "Expert: privacy"
MORE_TRAINING = "Expert: model and training"
PRIVATE_LABELS, AUDIT_AND_RUN = "Expert: private labels", "Expert: audit and run"
_SECTIONS = (
    *(ESSENTIALS, GRID, MORE_DATA, MORE_PRIVACY, MORE_TRAINING),
    *(PRIVATE_LABELS, AUDIT_AND_RUN),
)

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
NAME_OR_NONE = rf"^$|{NAME}"
DEVICE = r"^(cpu|gpu|tpu|mock-tpu:[1-9][0-9]?)$"
NUMBERS = r"^[0-9.eE+-]+(,[0-9.eE+-]+)*$"
WHOLE_NUMBERS = r"^[0-9]{1,12}(,[0-9]{1,12})*$"
LAYER_SIZES = r"^[1-9][0-9]{0,4}(,[1-9][0-9]{0,4}){0,47}$"
NUMBERS_OR_NONE = rf"^$|{NUMBERS}"
WHOLE_NUMBERS_OR_NONE = rf"^$|{WHOLE_NUMBERS}"
WORDS_OR_NONE = r"^$|^[a-z-]+(,[a-z-]+)*$"
POINTS_OR_NONE = r"^$|^\s*[a-z_]+=[^=;,]+([;,]\s*[a-z_]+=[^=;,]+)*$"
_COLUMN = (
    r"((text|patient|document|admission|date|error):[^,]+"
    r"|delimiter:(comma|semicolon|tab|pipe)|encoding:(utf-8|windows-1252))"
)
COLUMNS_OR_NONE = rf"^$|^{_COLUMN}(,{_COLUMN})*$"
TYPES_OR_NONE = r"^$|^[^,\s]+(,[^,\s]+)*$"
CLASSES_OR_NONE = r"^$|^[^,]+(,[^,]+)+$"
PLACEHOLDERS = r"^$|^[!-~]{2,64}( [!-~]{2,64})*$"
CANARIES = r"^H*SH*(,H*SH*)*$"

_NAME = "letters, digits, dots, dashes and underscores, 64 at most, the first a letter or digit"
IN_WORDS = {  # descriptions of the patterns for error messages
    NAME: _NAME,
    NAME_OR_NONE: f"empty, or {_NAME}",
    DEVICE: "cpu, mock-tpu:N (N from 1 to 99), gpu or tpu",
    NUMBERS: "numbers with commas between them",
    WHOLE_NUMBERS: "whole numbers of 12 digits at most, commas between them",
    LAYER_SIZES: "1 to 48 whole numbers from 1 to 99999, commas between them",
    NUMBERS_OR_NONE: "empty, or numbers with commas between them",
    WHOLE_NUMBERS_OR_NONE: "empty, or whole numbers of 12 digits at most, commas between them",
    WORDS_OR_NONE: "empty, or words with commas between them",
    POINTS_OR_NONE: "empty, or points name=value,name=value with semicolons between them",
    COLUMNS_OR_NONE: (
        "empty, or ROLE:COLUMN with commas between them (text, patient, document, admission, date, "
        "error), also delimiter:comma, semicolon, tab or pipe, and encoding:utf-8 or windows-1252"
    ),
    TYPES_OR_NONE: "names without spaces, commas between them",
    CLASSES_OR_NONE: "empty, or two or more names with commas between them",
    PLACEHOLDERS: "empty, or strings of 2 to 64 ASCII characters with spaces between them",
    CANARIES: "strings of H with one S each, commas between them",
}


class _FormSchema(GenerateJsonSchema):
    """A JSON schema in which a setting that may be empty has the type and limits of its values."""

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        """Return the schema of the values; the default null says that the setting may be empty."""
        return self.generate_inner(schema["schema"])


class Config(BaseModel):
    """An immutable value object that refuses unknown fields, NaN and infinity."""

    # Validators are built at their first use: each Airflow task imports all models and uses few.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    def __init_subclass__(cls, section: str = "", empty: Sequence[str] = (), **more: Any) -> None:
        """Accept the keywords `section` and `empty`, which Python passes here, too."""
        super().__init_subclass__(**more)

    @classmethod
    def __pydantic_init_subclass__(
        cls, section: str = "", empty: Sequence[str] = (), **more: Any
    ) -> None:
        """Give each new setting the section of its class, and its text from the class's docstring.

        Args:
            section: section of the form.
            empty: inherited settings that are empty (None) by default in this class, which fills
                them in from others.
            more: keywords of pydantic.

        Raises:
            TypeError: the docstring does not describe the setting.
        """
        super().__pydantic_init_subclass__(**more)
        for name in empty:
            cls.model_fields[name].default = None
        described = _attributes(cls.__doc__ or "")
        for name in vars(cls).get("__annotations__", ()):
            field = cls.model_fields.get(name)
            if field is None or not isinstance(field.json_schema_extra, dict):
                continue
            if name not in described:
                raise TypeError(f"{cls.__name__}: the docstring does not describe {name}")
            field.description = described[name]
            field.json_schema_extra["section"] = field.json_schema_extra["section"] or section

    @model_validator(mode="before")
    @classmethod
    def _refuse_truth_values_as_numbers(cls, values: Any) -> Any:
        """Refuse `true` and `false` as numbers: pydantic would read them as 1 and 0."""
        for name, value in values.items() if isinstance(values, Mapping) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field and not _admits_truth_values(field.annotation):
                raise ValueError(f"{name}: {str(value).lower()} is not a number or text")
        return values

    @classmethod
    def form_schema(cls) -> dict[str, Any]:
        """Return the JSON schema of each setting, section by section.

        Settings that may be empty have one type.
        """
        fields = cls.model_json_schema(schema_generator=_FormSchema)["properties"]
        ordered = sorted(fields, key=lambda name: _SECTIONS.index(fields[name]["section"]))
        return {name: fields[name] for name in ordered}

    def part(self, concern: type[AnyConfig], **changes: Any) -> AnyConfig:
        """Return this configuration's values of one concern, with changes.

        Raises:
            pydantic.ValidationError: the values do not fit together.
        """
        shared = concern.model_fields.keys() & type(self).model_fields.keys()
        return concern.model_validate({name: getattr(self, name) for name in shared} | changes)


AnyConfig = TypeVar("AnyConfig", bound=Config)


def _attributes(docstring: str) -> dict[str, str]:
    """Return the texts of the attributes that a docstring describes, in one line each."""
    _, _, section = inspect.cleandoc(docstring).partition("\nAttributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _admits_truth_values(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(map(_admits_truth_values, get_args(annotation)))


def setting(
    default: Any,
    title: str,
    *,
    section: str = "",
    path: bool = False,
    several: bool = False,
    **limits: Any,
) -> Any:
    """Return a field of a configuration model that users can set.

    The `Attributes:` of the class's docstring hold its meaning and unit. This text is the help of
    the form and of the command line, so it must be readable without title and section.

    Args:
        default: value if the user does not set it.
        title: title in the form.
        section: section of the form, if it is not the section of the class.
        path: whether it names a file or folder.
        several: whether it may name more than one of them, separated by commas.
        limits: limits of `pydantic.Field`: ge, gt, le, lt, multiple_of, pattern.
    """
    return Field(
        default=default,
        title=title,
        json_schema_extra={"section": section, "path": path, "several": several},
        **limits,
    )


def later(default: Any, title: str, **limits: Any) -> Any:
    """Return a setting that is younger than stored outputs: hashed only if it is not the default.

    Args:
        default: value if the user does not set it, which older outputs have.
        title: title in the form.
        limits: as for `setting`.
    """
    return setting(default, title, exclude_if=lambda value: value == default, **limits)


def paths(settings: type[Config]) -> list[str]:
    """Return the names of the settings whose values are files or folders."""
    return [name for name in settings.model_fields if _about(settings, name).get("path")]


def _about(settings: type[Config], name: str) -> dict[str, Any]:
    extra = settings.model_fields[name].json_schema_extra
    return extra if isinstance(extra, dict) else {}


def split_list(text: str) -> list[str]:
    """Return the distinct words of a comma-separated list, in order."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def named_paths(settings: type[Config], values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the files and folders that values name, by setting; most settings name one."""
    named = {}
    for name in paths(settings):
        value = values.get(name)
        if isinstance(value, str) and value:
            named[name] = split_list(value) if _about(settings, name)["several"] else [value]
    return named


def numbers(text: str) -> list[float]:
    """Return the numbers of a comma-separated list.

    Raises:
        ValueError: a part is not a number; the message names it.
    """
    parsed = []
    for word in text.split(","):
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{word!r} is not a number")
        parsed.append(number)
    return parsed


def listed_points(text: str, names: Iterable[str], field: str) -> list[dict[str, str]]:
    """Return the settings of each point of a list: name=value,name=value; name=value.

    Args:
        text: the list; empty for no points.
        names: names that a point may set.
        field: the setting, for messages.

    Raises:
        ValueError: a point has an unknown name, or a name twice.
    """
    allowed, points = tuple(names), text.split(";") if text else []
    for point in points:
        point_names = [word.partition("=")[0].strip() for word in point.split(",")]
        for name, times in Counter(point_names).items():
            if name not in allowed:
                raise ValueError(f"{field}: {name} is none of {', '.join(allowed)}")
            if times > 1:
                raise ValueError(f"{field}: {name} occurs twice in the point {point.strip()}")
    return [dict(word.strip().partition("=")[::2] for word in p.split(",")) for p in points]


def one_line(error: ValidationError) -> str:
    """Return a validation error as one line with field and reason of each wrong field.

    Messages of rules over several fields already contain the field names.
    """
    parts = []
    for item in error.errors(include_url=False, include_input=False):
        field = ".".join(str(x) for x in item["loc"])
        match item["type"]:
            case "extra_forbidden":
                reason = "unknown setting"
            case "string_pattern_mismatch" if item["ctx"]["pattern"] in IN_WORDS:
                reason = f"must be {IN_WORDS[item['ctx']['pattern']]}"
            case _:
                reason = item["msg"].removeprefix("Value error, ")
        parts.append(f"{field}: {reason}" if field else reason)
    return "; ".join(parts)
