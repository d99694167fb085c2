"""How a setting is written down: the trigger form is made of its title, words and limits."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

DATA, PRIVACY, MODEL, TRAINING, AUDIT, RUN, ADVANCED = (
    "1. Data",
    "2. Privacy",
    "3. Model",
    "4. Training",
    "5. Audit",
    "6. Run",
    "7. Advanced",
)

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
NAME_OR_NONE = rf"^$|{NAME}"
DEVICE = r"^(cpu|gpu|tpu|mock-tpu:[1-9][0-9]?)$"
NUMBERS = r"^[0-9.eE+-]+(,[0-9.eE+-]+)*$"
WHOLE_NUMBERS = r"^[0-9]{1,12}(,[0-9]{1,12})*$"
THREE_FIELDS = r"^[^,]+,[^,]+,[^,]+$"
TYPES_OR_NONE = r"^$|^[^,\s]+(,[^,\s]+)*$"
CANARIES = r"^H*SH*(,H*SH*)*$"

_NAME = "letters, digits, dots, dashes and underscores, 64 at most, the first a letter or digit"
IN_WORDS = {  # what a pattern admits, for those who do not read patterns
    NAME: _NAME,
    NAME_OR_NONE: f"empty, or {_NAME}",
    DEVICE: "cpu, mock-tpu:N (N from 1 to 99), gpu or tpu",
    NUMBERS: "numbers with commas between them",
    WHOLE_NUMBERS: "whole numbers of 12 digits at most, commas between them",
    THREE_FIELDS: "three names with commas between them",
    TYPES_OR_NONE: "names without spaces, commas between them",
    CANARIES: "strings of H with one S each, commas between them",
}


def setting(default: Any, section: str, title: str, description: str, **limits: Any) -> Any:
    """Return a field of a settings model, in a section of the form."""
    return Field(
        default=default,
        title=title,
        description=description,
        json_schema_extra={"section": section},
        **limits,
    )


def numbers(text: str) -> list[float]:
    """Return the numbers of a comma-separated list.

    Raises:
        ValueError: a part that is none, which it names.
    """
    found = []
    for word in text.split(","):
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{word!r} is not a number")
        found.append(number)
    return found
