"""What `confide doctor` finds, and how a question that may fail becomes a finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dp_core.errors import ConfideError


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    needed: bool  # False: good to have
    found: str
    fix: str = ""


def answers(
    name: str, place: str, ask: Callable[[], str], fix: str, *, needed: bool = True
) -> Finding:
    """Return what a question found: `ask` returns words, or raises what is wrong."""
    try:
        words = ask()
    except Exception as error:  # noqa: BLE001 - what is broken is what one asks about
        said = str(error) if isinstance(error, ConfideError) else type(error).__name__
        return Finding(name, False, needed, f"{place}: {said}", fix)
    return Finding(name, True, needed, f"{place}{': ' if words else ''}{words}")
