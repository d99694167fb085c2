"""Local copies of folders of a bucket: each is made once, shared, and goes when nobody uses it.

The text in them is as private as in the bucket: what was deleted there must not stay here for ever.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tasks.runtime.messages import alone

UNUSED = 7 * 86_400.0  # seconds: longer than a weekend, after which a job is tried again


class Copies:
    """The copies below one folder; any number of processes of this machine may share it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used: dict[str, int] = {}  # held, as long as this process lives, by these descriptors

    def copy(self, mark: str, fill: Callable[[Path], None]) -> Path:
        """Return the copy of that mark, which stays while this process lives.

        Args:
            mark: a name that stands for the content.
            fill: writes the content into a folder, where there is no copy yet.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._remove_unused()
        copy = self._folder / mark
        with alone(copy.with_suffix(".lock")) as lock:
            os.utime(lock)  # its time is that of the last use
            if not copy.is_dir():
                partial = _emptied(copy.with_suffix(".partial"))
                fill(partial)
                partial.rename(copy)
            if mark not in self._used:
                self._used[mark] = os.open(copy, os.O_RDONLY)
                fcntl.flock(self._used[mark], fcntl.LOCK_SH)
        return copy

    def _remove_unused(self) -> None:
        for lock in self._folder.glob("*.lock"):
            if _is_old(lock):
                with alone(lock):
                    if _is_old(lock) and not _is_used(lock.with_suffix("")):
                        _remove(lock.with_suffix(""))
                        lock.unlink()


def _is_old(lock: Path) -> bool:
    try:
        return time.time() - lock.stat().st_mtime > UNUSED
    except FileNotFoundError:  # another process has removed it
        return False


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
    partial = _emptied(copy.with_suffix(".partial"))
    if copy.is_dir():
        partial.rmdir()
        copy.rename(partial)  # a kill from here on leaves no half of a copy under its name
    shutil.rmtree(partial)


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
