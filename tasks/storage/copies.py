"""The cache: copies of what lies in a bucket, bounded in bytes; none is taken from who uses it.

A copy is a folder with a lock beside it. The lock's time is that of the last use, its content the
copy's size. Whoever uses a copy holds its folder open with a shared lock, so that every process of
this machine can see it, and the kernel lets go when the process ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dp_core.errors import BadInput
from tasks.storage.journal import exclusive, is_still_there

BOUND = "CONFIDE_CACHE_BYTES"
UNUSED = 7 * 86_400.0  # seconds: longer than a weekend, after which a job is tried again
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def bytes_from(words: str) -> int | None:
    """Return what `CONFIDE_CACHE_BYTES` says: bytes, or KiB, MiB, GiB, TiB; None for nothing.

    Raises:
        BadInput: it says something else.
    """
    if not words:
        return None
    found = re.fullmatch(r"(\d+)([kmgt]?)", words.strip().lower())
    if not found:
        raise BadInput(
            f"{words!r} is no number of bytes", where=BOUND, fix="Write for example 50g."
        )
    return int(found[1]) * _UNITS[found[2]]


class Copies:
    """The copies below one folder; any number of processes of this machine may share it.

    What was not used for a week goes at the next use of the cache; what was used longest ago goes
    before, where a new copy would pass the bound. What a process that lives has asked for stays,
    even where that passes the bound.

    Args:
        folder: made at the first use, for its owner alone.
        bound: bytes; None for half of what the disk has free or the cache takes already.
    """

    def __init__(self, folder: Path, bound: int | None = None) -> None:
        self._folder = folder
        self._bound = bound
        self._used: dict[str, int] = {}  # held, as long as this process lives, by these descriptors

    def copy(self, mark: str, size: int, fill: Callable[[Path], None]) -> Path:
        """Return the copy of that mark, which stays while this process lives.

        Args:
            mark: a name that stands for the content.
            size: of the content, in bytes.
            fill: writes the content into a folder, where there is no copy yet. The folder may
                hold what an earlier call, which was killed, has written.
        """
        descriptor = self._hold(mark, size, fill)
        if mark in self._used:
            os.close(descriptor)
        else:
            self._used[mark] = descriptor
        return self._folder / mark

    @contextmanager
    def held(self, mark: str, size: int, fill: Callable[[Path], None]) -> Iterator[Path]:
        """Give the copy of that mark, which stays while the context lasts. Arguments as `copy`."""
        descriptor = self._hold(mark, size, fill)
        try:
            yield self._folder / mark
        finally:
            os.close(descriptor)

    def _hold(self, mark: str, size: int, fill: Callable[[Path], None]) -> int:
        """Return the descriptor by which a copy is held, made before where it is not there."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._remove_unused()
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

    def _remove_unused(self) -> None:
        for lock in self._folder.glob("*.lock"):
            if _is_old(lock):
                _remove_if_free(lock, _is_old)

    def _make_room(self, lock: Path, size: int) -> None:
        """Remove what was used longest ago until `size` bytes fit, and claim them for this lock."""
        with exclusive(self._folder / ".room"):  # two processes must not fill the same room
            others = {one: _size(one) for one in self._folder.glob("*.lock") if one != lock}
            taken = sum(others.values())
            bound = self._bound
            if bound is None:
                bound = (shutil.disk_usage(self._folder).free + taken) // 2
            for one in sorted(others, key=_last_use):
                if taken + size <= bound:
                    break
                if _remove_if_free(one):
                    taken -= others[one]
            lock.write_text(str(size))


def _last_use(lock: Path) -> float:
    try:
        return lock.stat().st_mtime
    except FileNotFoundError:  # another process has removed it
        return time.time()


def _is_old(lock: Path) -> bool:
    return time.time() - _last_use(lock) > UNUSED


def _size(lock: Path) -> int:
    """Return the size of a copy in bytes, of one that is being made too."""
    try:
        return int(lock.read_text())
    except FileNotFoundError:
        return 0
    except ValueError:  # made by an earlier version, which did not write it down
        return sum(f.stat().st_size for f in lock.with_suffix("").rglob("*") if f.is_file())


def _remove_if_free(lock: Path, condition: Callable[[Path], bool] = lambda _: True) -> bool:
    """Remove a copy, or what was to become one, unless somebody uses it or is making it.

    It does not wait: who makes another copy meanwhile may wait for what this process holds.

    Args:
        condition: what must still hold of the lock once it is ours.
    """
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        copy = lock.with_suffix("")
        if not is_still_there(lock, descriptor) or not condition(lock) or _is_used(copy):
            return False
        _remove(copy)
        lock.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _is_used(copy: Path) -> bool:
    """Return whether a process that lives has asked for the copy, however long ago."""
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


def _remove(copy: Path) -> None:
    partial = copy.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    if copy.is_dir():
        copy.rename(partial)  # a kill from here on leaves no half of a copy under its name
        shutil.rmtree(partial)
