"""Files of JSON lines that only grow, and survive a full disk, a kill and a power cut.

A line is there whole or not at all: what a full disk took of it is taken back, and a torn end is
cut off before the next line. Order is the order of the file, never that of a clock.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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
