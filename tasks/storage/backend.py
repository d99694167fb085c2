"""What a place to keep files must be able to do: six methods, keys instead of paths."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Missing(Exception):
    """No object under this key."""


class Backend(Protocol):
    """Keys are relative, slash-separated and already known to stay inside the backend's root."""

    def read(self, key: str) -> bytes:
        """Return the object's content; raise `Missing` if there is none."""

    def write(self, key: str, content: bytes) -> None:
        """Replace the object at once: a reader sees the old or the new content, never a part."""

    def get(self, key: str, destination: Path) -> None:
        """Copy the object to a local file, streaming; raise `Missing` if there is none."""

    def put(self, source: Path, key: str) -> None:
        """Copy a local file into the object, streaming, visible only when complete."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return key -> bytes of every object below a folder, by key."""

    def delete(self, key: str) -> None:
        """Remove the object if it is there."""
