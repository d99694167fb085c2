"""How a setting is written down: the trigger form is made of its title, words and limits."""

from __future__ import annotations

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


def setting(default: Any, section: str, title: str, description: str, **limits: Any) -> Any:
    """Return a field of a settings model, in a section of the form."""
    return Field(
        default=default,
        title=title,
        description=description,
        json_schema_extra={"section": section},
        **limits,
    )
