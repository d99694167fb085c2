"""Creates a command's output folder atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dp_core.errors import BadInput
from tasks.runtime.deployment import refused

_PARTIAL = ".partial"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context manager of a temporary folder whose content moves to `folder` on success.

    The temporary folder is next to `folder`, or inside it if it exists, because its parent may not
    be writable. The remains of a killed process are removed.

    Raises:
        BadInput: the folder is not empty, or cannot be made or written.
    """
    partial = _beginning_of(folder)
    try:
        yield partial
        _finish(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _beginning_of(folder: Path) -> Path:
    there = os.path.lexists(folder)
    partial = folder / _PARTIAL if there else folder.with_name(f".{folder.name}{_PARTIAL}")
    try:
        if there and (not folder.is_dir() or {f.name for f in folder.iterdir()} - {_PARTIAL}):
            raise BadInput(
                "it is there, and not empty", where=str(folder), fix="Name a new folder."
            )
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        what = f"cannot be {'written' if there else 'made'}"
        raise refused(error, what, where=str(folder)) from None
    return partial


def _finish(partial: Path, folder: Path) -> None:
    if partial.parent != folder:
        partial.rename(folder)
        return
    for entry in sorted(partial.iterdir()):
        entry.rename(folder / entry.name)
