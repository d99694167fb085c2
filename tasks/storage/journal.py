"""Append-only files of lines that survive a full disk, a kill and a power failure.

A line is either complete or absent: a partial line on a full disk is removed, and a torn last line
is cut off before the next append. Lines are ordered by their position in the file, never by a
clock.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MODE = 0o600  # lines may have the label `operator`
_LONGEST = 1 << 16  # longest torn end that is searched, in bytes


def append(file: Path, *lines: str, head: str = "") -> None:
    """Append lines, excluding all other processes of this machine.

    Args:
        file: made if it is missing; its folder must exist.
        lines: without line ends.
        head: first line of an empty file, before the other lines.

    Raises:
        OSError: nothing was appended, for example because the disk is full.
    """
    with exclusive(file) as descriptor:
        end = _cut_torn_end(descriptor)
        first = [head] if head and not end else []
        content = "".join(f"{line}\n" for line in (*first, *lines)).encode()
        try:
            while content:
                content = content[os.write(descriptor, content) :]
        except OSError:
            with suppress(OSError):  # a device is no file
                os.ftruncate(descriptor, end)
            raise


def read(file: Path, start: int = 0) -> tuple[list[str], int]:
    """Return the complete lines of a file from an offset on, and the offset after them.

    There are no lines if the file is missing or shorter than the offset.
    """
    try:
        with file.open("rb") as stream:
            stream.seek(start)
            content = stream.read()
    except FileNotFoundError:
        return [], start
    whole = content[: content.rfind(b"\n") + 1]
    # A name may hold other line ends (U+2028, U+0085), which JSON does not escape.
    return whole.decode().split("\n")[:-1], start + len(whole)


@contextmanager
def exclusive(file: Path, *, wait: bool = True) -> Iterator[int]:
    """Lock a file, made if missing, against all processes; yields its descriptor.

    Args:
        file: the file; its folder must exist.
        wait: whether to wait for a process that has locked the file.

    Raises:
        BlockingIOError: another process has locked the file, and the call must not wait.
        OSError: for example because its folder does not exist.
    """
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, _MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous holder may have removed this file; lines appended to it would be lost.
            if is_still_there(file, descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def is_still_there(file: Path, descriptor: int) -> bool:
    """Return whether a path still names the opened file."""
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _cut_torn_end(descriptor: int) -> int:
    """Cut off a torn end; return the size of the rest."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - _LONGEST)
    tail = os.pread(descriptor, size - start, start)
    whole = start + tail.rfind(b"\n") + 1
    if whole < size:
        os.ftruncate(descriptor, whole)
    return whole
