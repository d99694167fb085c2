"""A JSON object of settings, in a file or in a word: of the command line and of the DAGs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dp_core.errors import BadInput


def read_object(file: Path, where: str) -> dict[str, Any]:
    """Return the JSON object of a file.

    Args:
        file: UTF-8.
        where: what an error says of its place.

    Raises:
        BadInput: it cannot be read, or is no JSON object.
    """
    try:
        return parse_object(file.read_text(encoding="utf-8"), where)
    except UnicodeError:
        reason = "not UTF-8"
    except OSError as error:
        reason = error.strerror or "no file"
    raise BadInput(f"cannot be read ({reason})", where=where)


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object of a text.

    Raises:
        BadInput: it is none.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno}"
        raise BadInput(f"not JSON ({error.msg}: {position})", where=where) from None
    except (ValueError, RecursionError):
        reason = "numbers too long or lists too deep"
        raise BadInput(f"cannot be read ({reason})", where=where) from None
    if not isinstance(values, dict):
        raise BadInput(
            "not a JSON object", where=where, fix='Write the settings as {"epochs": 2, …}.'
        )
    return values
