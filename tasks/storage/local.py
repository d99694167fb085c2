"""Objects as files below one folder of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dp_core.errors import BadInput
from tasks.storage.backend import Missing


class LocalBackend:
    """A folder. Nothing outside it is read or written, not even through symbolic links."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    def path(self, key: str) -> Path:
        """Return the file of a key.

        Raises:
            BadInput: the path leaves the root.
        """
        path = (self.root / key).resolve()
        if not path.is_relative_to(self.root):
            raise BadInput("a path leaves the store", where="storage", fix="Use paths below it.")
        return path

    def read(self, key: str) -> bytes:
        """Return the file's content."""
        try:
            return self.path(key).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise Missing(key) from error

    def write(self, key: str, content: bytes) -> None:
        """Replace the file by renaming a complete, synced one over it."""
        with self._temporary(key) as temporary:
            with temporary.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(self.path(key))

    def get(self, key: str, destination: Path) -> None:
        """Copy the file."""
        try:
            shutil.copyfile(self.path(key), destination)
        except FileNotFoundError as error:
            raise Missing(key) from error

    def put(self, source: Path, key: str) -> None:
        """Link the file in where the disk is the same, else copy it; then rename."""
        with self._temporary(key) as temporary:
            temporary.unlink()
            try:
                os.link(source, temporary)
            except OSError:  # another disk, or a file system without links
                shutil.copyfile(source, temporary)
            temporary.replace(self.path(key))

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the files below a folder."""
        folder = self.path(prefix)
        return {
            file.relative_to(self.root).as_posix(): file.stat().st_size
            for file in sorted(folder.rglob("*"))
            if file.is_file() and not file.name.endswith(".partial")
        }

    def delete(self, key: str) -> None:
        """Remove the file."""
        self.path(key).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _temporary(self, key: str) -> Iterator[Path]:
        folder = self.path(key).parent
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".partial")
        os.close(handle)
        try:
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)
