"""Checkpoints that survive a kill at any instant: complete under their name, or not there.

One safetensors file per checkpoint, named by its update. Its header holds the update, the run
that it belongs to, and a digest over these and all arrays, so a torn or altered file is known as
such. Reading goes from the newest backwards to the first that is whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from dp_core.bert.parameters import Arrays
from dp_core.errors import BadInput, ConfideError
from dp_core.training.checkpoint_places import CheckpointPlace

_NAME = re.compile(r"update-(\d{10})\.safetensors")
_LOG = logging.getLogger("confide.training")


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to go on: `update` updates are done."""

    update: int
    arrays: Arrays


class Checkpoints:
    """The checkpoints of one run.

    Args:
        place: where they are.
        run: digest of what the run is; a checkpoint of another run is refused.
        keep: how many are kept.
    """

    def __init__(self, place: CheckpointPlace, run: str, keep: int = 2) -> None:
        self._place, self._run, self._keep = place, run, keep

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and drop the oldest beyond `keep`.

        Raises:
            ConfideError: the disk is full or the place not writable; older ones stay as they are.
        """
        about = {"update": str(checkpoint.update), "run": self._run}
        about["digest"] = _digest(checkpoint, self._run)
        try:
            self._place.write(
                _name(checkpoint.update),
                lambda path: save_file(checkpoint.arrays, path, metadata=about),
            )
            self._drop(checkpoint.update)
        except (OSError, SafetensorError) as error:
            raise ConfideError(
                f"checkpoint not written: {_reason(error)}",
                where=self._place.where,
                fix="Make room there and start again: the last good checkpoint is kept.",
            ) from error

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is whole, or None; damaged ones are named in the log.

        Raises:
            BadInput: it belongs to another run (its data, plan or code differ): resuming would
                draw the same noise for other gradients.
            ConfideError: the place cannot be read; that is no reason to begin anew.
        """
        for update in reversed(self._updates()):
            found = self._read(update)
            if found is not None:
                return found
            _LOG.warning(
                "%s: the checkpoint of update %d is damaged; going on from the one before it",
                self._place.where,
                update,
            )
        return None

    def _updates(self) -> list[int]:
        try:
            matches = [_NAME.fullmatch(name) for name in self._place.names()]
        except OSError as error:
            raise ConfideError(
                f"checkpoints cannot be read: {_reason(error)}", where=self._place.where
            ) from error
        return sorted(int(match[1]) for match in matches if match)

    def _read(self, update: int) -> Checkpoint | None:
        """Return a checkpoint, or None if it is torn or altered."""
        try:
            with self._place.read(_name(update)) as path:
                about = _header(path)
                checkpoint = Checkpoint(update, load_file(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfideError(
                f"a checkpoint cannot be read: {_reason(error)}", where=self._place.where
            ) from error
        except (SafetensorError, ValueError):
            return None
        if about.get("digest") != _digest(checkpoint, about.get("run", "")):
            return None
        if about["run"] != self._run:
            raise BadInput(
                "the checkpoint belongs to another run",
                where=self._place.where,
                fix="Its manifest differs: start anew, which is a new charge.",
            )
        return checkpoint

    def _drop(self, newest: int) -> None:
        """Drop what is older than the last `keep`, and later ones: those were found damaged."""
        updates = self._updates()
        kept = [u for u in updates if u <= newest][-self._keep :]
        for update in updates:
            if update not in kept:
                self._place.delete(_name(update))


def run_digest(manifest: bytes, *parts: object) -> str:
    """Return what ties a checkpoint to its run: SHA-256 of the manifest and the settings."""
    text = json.dumps([str(p) for p in parts]).encode()
    return hashlib.sha256(hashlib.sha256(manifest).digest() + text).hexdigest()


def _name(update: int) -> str:
    return f"update-{update:010d}.safetensors"


def _header(path: Path) -> dict[str, str]:
    with safe_open(path, framework="numpy") as file:
        return dict(file.metadata() or {})


def _digest(checkpoint: Checkpoint, run: str) -> str:
    digest = hashlib.sha256(f"{checkpoint.update} {run}".encode())
    for name, array in sorted(checkpoint.arrays.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _reason(error: BaseException) -> str:
    """Return the system's words for an error; a library's own message may hold anything."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    number = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(number[1])) if number else type(error).__name__
