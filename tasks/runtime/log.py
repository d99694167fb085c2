"""The log of a step for people, and its messages to the launching program."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from dp_core.errors import BadInput
from tasks.protocol.messages import CHANNEL, STDOUT, Message, StepProgress
from tasks.protocol.specs import RunContext
from tasks.storage import journal

Level = Literal["info", "warning", "error"]
_FORM = "CONFIDE_LOG"
_PATIENCE = 10.0  # seconds between lines of progress
_who: dict[str, str] = {}


def configure(step: str, run: RunContext | None = None) -> None:
    """Set the step for all following lines; for messages of libraries, only the place is logged.

    Raises:
        BadInput: `CONFIDE_LOG` holds another word than `json` or `text`.
    """
    _who.clear()
    _who["step"] = step
    if run is not None:
        _who.update(run=run.run_key, task=run.task, point=run.point)
    if os.environ.get(_FORM, "") not in ("", "text", "json"):
        raise BadInput("an unknown form of log", where=_FORM, fix="Use text or json.")
    debugging = os.environ.get("CONFIDE_DEBUG") and not _in_json()
    if not debugging and not any(isinstance(h, _Libraries) for h in logging.root.handlers):
        logging.root.addHandler(_Libraries(logging.WARNING))
        logging.captureWarnings(True)


def log(message: str, level: Level = "info") -> None:
    """Log one line, which must be fit for publication."""
    line = message
    if _in_json():
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        body = {"time": now, "level": level, **_who, "message": " ".join(message.split())}
        line = json.dumps(body, ensure_ascii=False)
    # One write for the whole line: an unbuffered print() writes the line end separately, and the
    # output of another thread or of the other stream could come between.
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def send(message: Message) -> None:
    """Send a message to the launching program; a full disk must not end a training."""
    channel = os.environ.get(CHANNEL, "")
    line = message.model_dump_json()
    try:
        if channel == STDOUT:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
        elif channel:
            journal.append(Path(channel), line)
    except OSError as error:
        os.environ.pop(CHANNEL)
        log(f"messages are not kept ({os.strerror(error.errno or 0)})", "warning")


class StepProgressReporter:
    """Reports progress as messages and, every few seconds, in the log; notes are public.

    Args:
        label: the step's name in the log.
    """

    def __init__(self, label: str) -> None:
        self._label, self._next = label, 0.0

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Report that `done` of `total` pieces of work are finished."""
        send(StepProgress(done=done, total=total, note=note))
        now = time.monotonic()
        if now >= self._next or done >= total:
            self._next = now + _PATIENCE
            log(f"{self._label}: {done}/{total} {note}".rstrip())


@contextmanager
def silence() -> Iterator[None]:
    """Suppress all library logging, even its line count, which may reveal private facts."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Libraries(logging.Handler):
    """Logs the name and place of library messages, but not their text, which may quote the data."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log that a library logged a message, with its position in the source."""
        source = f"{record.name} ({record.filename}:{record.lineno})"
        level: Level = "error" if record.levelno >= logging.ERROR else "warning"
        log(f"{source} logged a message", level)


def _in_json() -> bool:
    return os.environ.get(_FORM) == "json"
