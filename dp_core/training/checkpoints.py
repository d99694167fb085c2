"""Storage of checkpoints: an interface, and a folder on this machine.

Other places (a bucket) implement the same four methods. One contract test runs over all of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from dp_core.errors import BadInput, ConfideError
from dp_core.models.parameters import Arrays

_PARTIAL = ".partial"


class CheckpointPlace(Protocol):
    """Named files, each of which is complete or absent. Errors are `OSError`s."""

    @property
    def where(self) -> str:
        """Name of the place in messages."""

    def write(self, name: str, make: Callable[[Path], None]) -> None:
        """Store the file that `make` writes to the path it receives, replacing an older one."""

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""

    def read(self, name: str) -> AbstractContextManager[Path]:
        """Provide a local path of the file within the context; `OSError` if there is none."""

    def delete(self, name: str) -> None:
        """Remove a file if it is there."""


class LocalFolder:
    """Checkpoints in a folder that only its owner can read.

    A file is written to a temporary folder, flushed to disk, and then renamed, so a kill at any
    time leaves the old file or the new one.

    Args:
        folder: created with the first file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def where(self) -> str:
        """Path of the folder."""
        return str(self._folder)

    def write(self, name: str, make: Callable[[Path], None]) -> None:
        """Store the file that `make` writes."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = self._folder / _PARTIAL
        shutil.rmtree(partial, ignore_errors=True)  # remains of a killed run
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
        """Provide the file itself."""
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


_NAME = re.compile(r"update-(\d{10})\.safetensors")
_LOG = logging.getLogger("confide.training")


class Checkpoints:
    """The checkpoints of one run: arrays from which it continues after a number of updates.

    Args:
        place: storage of the checkpoints.
        run: digest of the run's identity; checkpoints of another run are refused.
        keep: number of checkpoints that are kept.
    """

    def __init__(self, place: CheckpointPlace, run: str, keep: int = 2) -> None:
        self._place, self._run, self._keep = place, run, keep

    def save(self, update: int, arrays: Arrays) -> None:
        """Write a checkpoint and drop the oldest beyond `keep`.

        Raises:
            ConfideError: the disk is full or the place not writable; older checkpoints stay.
        """
        about = {"update": str(update), "run": self._run}
        about["digest"] = arrays_digest(arrays, f"{update} {self._run}")
        try:
            self._place.write(_name(update), lambda path: save_file(arrays, path, metadata=about))
            self._drop(update)
        except (OSError, SafetensorError) as error:
            raise ConfideError(
                f"checkpoint not written: {_reason(error)}",
                where=self._place.where,
                fix="Make room there and start again: the last good checkpoint is kept.",
            ) from error

    def latest(self) -> tuple[int, Arrays] | None:
        """Return update and arrays of the newest intact checkpoint; the log names damaged ones.

        Raises:
            BadInput: it belongs to another run (its data, plan or code differ). Resuming would
                draw the same noise for other gradients.
            ConfideError: the place cannot be read. The run must not start anew in this case.
        """
        for update in reversed(self._updates()):
            arrays = self.at(update)
            if arrays is not None:
                return update, arrays
            _LOG.warning(
                "%s: the checkpoint of update %d is damaged; continuing from the one before it",
                self._place.where,
                update,
            )
        return None

    def at(self, update: int) -> Arrays | None:
        """Return the checkpoint after that many updates, or None if it is missing or damaged.

        Raises:
            BadInput, ConfideError: as `latest`.
        """
        try:
            with (
                self._place.read(_name(update)) as path,
                safe_open(path, framework="numpy") as file,
            ):
                about, arrays = dict(file.metadata() or {}), load_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfideError(
                f"a checkpoint cannot be read: {_reason(error)}", where=self._place.where
            ) from error
        except (SafetensorError, ValueError):
            return None
        if about.get("digest") != arrays_digest(arrays, f"{update} {about.get('run', '')}"):
            return None
        if about["run"] != self._run:
            raise BadInput(
                "the checkpoint belongs to another run",
                where=self._place.where,
                fix="Its manifest differs: start anew, which is a new charge.",
            )
        return arrays

    def _updates(self) -> list[int]:
        try:
            matches = [_NAME.fullmatch(name) for name in self._place.names()]
        except OSError as error:
            raise ConfideError(
                f"checkpoints cannot be read: {_reason(error)}", where=self._place.where
            ) from error
        return sorted(int(match[1]) for match in matches if match)

    def _drop(self, newest: int) -> None:
        """Delete checkpoints older than the last `keep`, and newer ones, which are damaged."""
        updates = self._updates()
        kept = [u for u in updates if u <= newest][-self._keep :]
        for update in updates:
            if update not in kept:
                self._place.delete(_name(update))


def run_digest(*settings: object) -> str:
    """Return SHA-256 over all settings of a run, which ties its checkpoints to it."""
    return hashlib.sha256(json.dumps([str(s) for s in settings]).encode()).hexdigest()


def _name(update: int) -> str:
    return f"update-{update:010d}.safetensors"


def arrays_digest(arrays: Mapping[str, NDArray[Any]], about: str = "") -> str:
    """Return SHA-256 over names, types, shapes and every bit of arrays, in hex."""
    digest = hashlib.sha256(about.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _reason(error: BaseException) -> str:
    """Return the system's message of an error; a library's message may contain private text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    number = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(number[1])) if number else type(error).__name__
