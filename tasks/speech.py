"""What a step says while it works: lines for people, or JSON lines for whoever collects logs.

`CONFIDE_LOG=json` makes every line on standard error one object: `time` (UTC), `level`, `run`,
`task`, `point`, `step`, `message`. The messages are the same either way, and fit for
publication: numbers with their labels, names, places; never text that was read.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal

from dp_core.errors import BadInput
from tasks.specs import RunContext

Level = Literal["info", "warning", "error"]
_VARIABLE = "CONFIDE_LOG"
_who: dict[str, str] = {}


def introduce(step: str, context: RunContext | None = None) -> None:
    """Set who speaks from now on. Of what libraries log, only the place is told.

    Raises:
        BadInput: `CONFIDE_LOG` holds another word than `json` or `text`.
    """
    _who.clear()
    _who["step"] = step
    if context is not None:
        _who.update(run=context.run_key, task=context.task, point=context.point)
    if os.environ.get(_VARIABLE, "") not in ("", "text", "json"):
        raise BadInput("an unknown form of log", where=_VARIABLE, fix="Use text or json.")
    debugging = os.environ.get("CONFIDE_DEBUG") and not _in_json()
    if not debugging and not any(isinstance(h, _Others) for h in logging.root.handlers):
        logging.root.addHandler(_Others(logging.WARNING))
        logging.captureWarnings(True)


def say(message: str, level: Level = "info") -> None:
    """Say one line; it must be fit for publication."""
    _write(_object(message, level) if _in_json() else message)


def message_of(line: str) -> str:
    """Return the message of a line that was said, in whichever form."""
    if line.startswith("{"):
        try:
            return str(json.loads(line)["message"])
        except (ValueError, KeyError, TypeError):
            return line
    return line


def _write(line: str) -> None:
    # At once: print() without a buffer writes the line's end by itself, and another thread's or
    # the other stream's words may come between.
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _in_json() -> bool:
    return os.environ.get(_VARIABLE) == "json"


def _object(message: str, level: str) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    body = {"time": now, "level": level, **_who, "message": " ".join(message.split())}
    return json.dumps(body, ensure_ascii=False)


@contextmanager
def silence() -> Iterator[None]:
    """Let libraries say nothing within, not even that they said something: the count may tell."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Others(logging.Handler):
    """What libraries log: their name and place only, since their words may quote what they read."""

    def emit(self, record: logging.LogRecord) -> None:
        """Say that a library logged something, and where in its source that stands."""
        place = f"{record.name} ({record.filename}:{record.lineno})"
        level: Level = "error" if record.levelno >= logging.ERROR else "warning"
        say(f"{place} logged a message", level)
