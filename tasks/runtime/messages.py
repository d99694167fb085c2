"""Files of JSON lines that only grow, and survive a full disk, a kill and a power cut.

A line is there whole or not at all: what a full disk took of it is taken back, and a torn end is
cut off before the next line. Order is the order of the file, never that of a clock.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from dp_core.errors import BadInput
from tasks.protocol import RunContext

_MODE = 0o600  # what is written here may be the operator's alone
_LONGEST = 1 << 16  # bytes of a torn end that are looked through


def append(file: Path, line: Mapping[str, Any] | str) -> None:
    """Append one line, alone among all processes of this machine.

    Args:
        file: made where it is missing; its folder must be there.
        line: an object, or the JSON of one.

    Raises:
        OSError: nothing was appended, for example because the disk is full.
    """
    text = line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)
    content = text.encode() + b"\n"
    with alone(file) as descriptor:
        end = _whole(descriptor)
        try:
            while content:
                content = content[os.write(descriptor, content) :]
        except OSError:
            with suppress(OSError):  # a device is no file
                os.ftruncate(descriptor, end)
            raise


@contextmanager
def alone(file: Path) -> Iterator[int]:
    """Hold a file, made where it is missing, alone among all processes; yields its descriptor.

    Raises:
        OSError: for example because its folder is not there, or no longer.
    """
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, _MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Who held it before may have taken it away: a line in that file nobody would read.
            if still_there(file, descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def read(file: Path) -> list[str]:
    """Return the whole lines of a file; none of one that is not there."""
    try:
        content = file.read_text()
    except FileNotFoundError:
        return []
    # A name may hold other ends of lines (U+2028, U+0085), and JSON leaves them as they are.
    return content.split("\n")[:-1]


def still_there(file: Path, descriptor: int) -> bool:
    """Return whether a file is what was opened there, and nobody has taken that away since."""
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _whole(descriptor: int) -> int:
    """Cut off a torn end; return the size of what is left."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - _LONGEST)
    tail = os.pread(descriptor, size - start, start)
    whole = start + tail.rfind(b"\n") + 1
    if whole < size:
        os.ftruncate(descriptor, whole)
    return whole


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


_PATIENCE = 10.0  # seconds between lines for people


class Progress:
    """Reports progress; notes must be fit for publication.

    Args:
        label: the step's name in lines for people.
        file: where programs read JSON lines `{"done", "total", "note"}`; none if None.
    """

    def __init__(self, label: str, file: Path | None) -> None:
        self._label, self._file = label, file
        self._next = 0.0

    def __call__(self, done: int, total: int, note: str = "") -> None:
        """Report that `done` of `total` pieces of work are behind us."""
        if self._file is not None:
            try:
                append(self._file, {"done": done, "total": total, "note": note})
            except OSError as error:  # no reason to end a training
                self._file = None
                say(f"progress is not kept ({os.strerror(error.errno or 0)})", "warning")
        now = time.monotonic()
        if now >= self._next or done >= total:
            self._next = now + _PATIENCE
            say(f"{self._label}: {done}/{total} {note}".rstrip())
