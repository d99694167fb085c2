"""Where checkpoints are kept: a small door, and a folder of this machine behind it.

Other places (a bucket) are other classes with the same four methods; a contract test runs over
all of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

_PARTIAL = ".partial"


class CheckpointPlace(Protocol):
    """Files under names, each there whole or not at all. Errors are `OSError`s."""

    @property
    def where(self) -> str:
        """What people call the place."""

    def write(self, name: str, make: Callable[[Path], None]) -> None:
        """Keep the file that `make` writes to the path it is given, in place of an older one."""

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""

    def read(self, name: str) -> AbstractContextManager[Path]:
        """Give a local path of the file for as long as the context lasts; `OSError` if none."""

    def delete(self, name: str) -> None:
        """Remove a file if it is there."""


class LocalFolder:
    """Checkpoints in a folder that only its owner can read.

    A file is written in a folder of its own, flushed to disk, then renamed into place, so that a
    kill at any instant leaves the old file or the new one.

    Args:
        folder: made when the first file is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def where(self) -> str:
        """The folder."""
        return str(self._folder)

    def write(self, name: str, make: Callable[[Path], None]) -> None:
        """Keep the file that `make` writes."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = self._folder / _PARTIAL
        shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
        partial.mkdir(mode=0o700)
        try:
            make(partial / name)
            (partial / name).chmod(0o600)
            _sync(partial / name)
            (partial / name).replace(self._folder / name)
            _sync(self._folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def names(self) -> list[str]:
        """Return the files' names, sorted."""
        try:
            return sorted(f.name for f in self._folder.iterdir() if f.name != _PARTIAL)
        except FileNotFoundError:
            return []

    def read(self, name: str) -> AbstractContextManager[Path]:
        """Give the file itself."""
        (self._folder / name).stat()
        return nullcontext(self._folder / name)

    def delete(self, name: str) -> None:
        """Remove the file."""
        (self._folder / name).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
