"""Checkpoints that survive a kill at any instant: complete under their name, or not there.

One folder per checkpoint, named by its update: written under another name, flushed to disk, then
renamed. Reading goes from the newest backwards to the first whose content matches its checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dp_core.bert.parameters import Arrays
from dp_core.errors import BadInput, ConfideError

_PREFIX, _ARRAYS, _ABOUT = "update-", "state.safetensors", "about.json"
_PARTIAL = ".partial"


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to go on: `update` updates are done."""

    update: int
    arrays: Arrays


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        folder: where they are; made when missing.
        run: digest of what the run is; a checkpoint of another run is refused.
        keep: how many are kept.
    """

    def __init__(self, folder: Path, run: str, keep: int = 2) -> None:
        self._folder, self._run, self._keep = folder, run, keep

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and drop the oldest beyond `keep`.

        Raises:
            ConfideError: the disk is full or the folder not writable; older ones stay as they are.
        """
        final = self._folder / f"{_PREFIX}{checkpoint.update:010d}"
        partial = final.with_suffix(_PARTIAL)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            self._write(partial, checkpoint)
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            _sync(self._folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            reason = error.strerror if isinstance(error, OSError) else "write failed"
            raise ConfideError(
                f"checkpoint not written: {reason}",
                where=str(self._folder),
                fix="Free the disk and start again: the last good checkpoint is kept.",
            ) from error
        for old in self._finished()[self._keep :]:
            shutil.rmtree(old, ignore_errors=True)

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is whole, or None.

        Raises:
            BadInput: it belongs to another run (its data, plan or code differ): resuming would
                draw the same noise for other gradients.
        """
        for folder in self._finished():
            try:
                about = json.loads((folder / _ABOUT).read_text())
                if about["run"] != self._run:
                    raise BadInput(
                        "the checkpoint belongs to another run",
                        where=str(folder),
                        fix="Its manifest differs: start anew, which is a new charge.",
                    )
                if about["sha256"] != _sha256(folder / _ARRAYS):
                    continue
                return Checkpoint(about["update"], load_file(folder / _ARRAYS))
            except (OSError, ValueError, KeyError, TypeError, SafetensorError):
                continue  # torn or corrupt: the one before it is good
        return None

    def _finished(self) -> list[Path]:
        if not self._folder.is_dir():
            return []
        named = [p for p in self._folder.glob(f"{_PREFIX}*") if p.suffix != _PARTIAL]
        return sorted(named, reverse=True)

    def _write(self, folder: Path, checkpoint: Checkpoint) -> None:
        save_file(checkpoint.arrays, folder / _ARRAYS)
        _sync(folder / _ARRAYS)
        about = {
            "update": checkpoint.update,
            "run": self._run,
            "sha256": _sha256(folder / _ARRAYS),
        }
        (folder / _ABOUT).write_text(json.dumps(about))
        _sync(folder / _ABOUT)
        _sync(folder)


def run_digest(manifest: bytes, *parts: object) -> str:
    """Return what ties a checkpoint to its run: SHA-256 of the manifest and the settings."""
    text = json.dumps([str(p) for p in parts]).encode()
    return hashlib.sha256(hashlib.sha256(manifest).digest() + text).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
