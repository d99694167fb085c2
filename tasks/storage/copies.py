"""The cache: copies of a bucket's files, bounded in bytes; copies in use are never removed.

A copy is a folder with a lock file next to it. The lock's modification time is the time of the last
use, and its content is the copy's size. A process that uses a copy keeps its folder open with a
shared lock, which every process of this machine can see and the kernel releases when the process
ends.
"""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dp_core.errors import BadInput
from tasks.storage.journal import exclusive

BOUND = "CONFIDE_CACHE_BYTES"
UNUSED = 7 * 86_400.0  # seconds: longer than a weekend, after which a job may be retried
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def bytes_from(words: str) -> int | None:
    """Return the bytes that `CONFIDE_CACHE_BYTES` states, in bytes, KiB, MiB, GiB or TiB.

    Returns None if the variable is empty.

    Raises:
        BadInput: the value is not a number of bytes.
    """
    if not words:
        return None
    parts = re.fullmatch(r"(\d+)([kmgt]?)", words.strip().lower())
    if not parts:
        raise BadInput(
            f"{words!r} is no number of bytes", where=BOUND, fix="Write for example 50g."
        )
    return int(parts[1]) * _UNITS[parts[2]]


class Copies:
    """The copies below one folder, which any number of processes of this machine may share.

    Before a new copy is made, copies that were not used for a week are removed, and the least
    recently used copies if the new copy would exceed the bound. A copy that a live process has
    requested is kept, even if that exceeds the bound.

    Args:
        folder: made at the first use, for its owner alone.
        bound: bytes; None for half of the sum of the free disk and the cache's size.
    """

    def __init__(self, folder: Path, bound: int | None = None) -> None:
        self._folder = folder
        self._bound = bound
        self._used: dict[str, int] = {}  # descriptors that keep these copies

    def copy(self, mark: str, size: int, fill: Callable[[Path], None]) -> Path:
        """Return the copy with this mark, which is kept for the life of this process.

        Args:
            mark: a name that identifies the content.
            size: size of the content in bytes.
            fill: writes the content into a folder, if there is no copy yet. The folder may hold
                files that an earlier, killed call has written.
        """
        if mark not in self._used:
            self._used[mark] = self._hold(mark, size, fill)
        return self._folder / mark

    @contextmanager
    def held(self, mark: str, size: int, fill: Callable[[Path], None]) -> Iterator[Path]:
        """Yield the copy with this mark, which is kept within the context. Arguments: as `copy`."""
        descriptor = self._hold(mark, size, fill)
        try:
            yield self._folder / mark
        finally:
            os.close(descriptor)

    def _hold(self, mark: str, size: int, fill: Callable[[Path], None]) -> int:
        """Return the descriptor that holds a copy, making the copy first if there is none."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        copy = self._folder / mark
        with exclusive(copy.with_suffix(".lock")) as lock:
            os.utime(lock)
            if not copy.is_dir():
                self._make_room(copy.with_suffix(".lock"), size)
                partial = copy.with_suffix(".partial")
                partial.mkdir(exist_ok=True)
                fill(partial)
                partial.rename(copy)
            descriptor = os.open(copy, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        return descriptor

    def _make_room(self, lock: Path, size: int) -> None:
        """Remove old copies, and others until `size` bytes fit; claim them for this lock."""
        with exclusive(self._folder / ".room"):  # two processes must not claim the same space
            others = {file: _size(file) for file in self._folder.glob("*.lock") if file != lock}
            taken = sum(others.values())
            bound = self._bound
            if bound is None:
                bound = (shutil.disk_usage(self._folder).free + taken) // 2
            for file in sorted(others, key=_last_use):
                if taken + size <= bound and time.time() - _last_use(file) <= UNUSED:
                    break
                if _remove_if_free(file):
                    taken -= others[file]
            lock.write_text(str(size))


def _last_use(lock: Path) -> float:
    try:
        return lock.stat().st_mtime
    except FileNotFoundError:  # another process has removed it
        return time.time()


def _size(lock: Path) -> int:
    """Return the size in bytes of a copy, even of one that is being made."""
    try:
        return int(lock.read_text() or 0)
    except FileNotFoundError:
        return 0


def _remove_if_free(lock: Path) -> bool:
    """Remove a complete or partial copy, unless a process uses it or is making it.

    The call does not wait, because the process that makes another copy may wait for a copy that
    this process holds.
    """
    copy = lock.with_suffix("")
    try:
        with exclusive(lock, wait=False):
            if _is_used(copy):
                return False
            partial = copy.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            if copy.is_dir():
                copy.rename(partial)  # a kill after this line leaves no partial copy under its name
                shutil.rmtree(partial)
            lock.unlink()
    except BlockingIOError:
        return False
    return True


def _is_used(copy: Path) -> bool:
    """Return whether a live process has requested the copy, however long ago."""
    try:
        descriptor = os.open(copy, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
