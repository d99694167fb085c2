"""Checkpoints in the store: for a step that may be started again on another machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.storage.store import Store


class StoredCheckpoints:
    """Files below a URI of the store; a `dp_core` `CheckpointPlace`.

    An object appears in the store only when it is complete, so a kill during an upload leaves
    the one before.

    Args:
        store: where they are kept.
        uri: below the store's root.
        scratch: local folder for the file that is on its way.
    """

    def __init__(self, store: Store, uri: str, scratch: Path) -> None:
        self._store, self._uri, self._scratch = store, uri.rstrip("/"), scratch

    @property
    def where(self) -> str:
        """The URI."""
        return self._uri

    def write(self, name: str, make: Callable[[Path], None]) -> None:
        """Keep the file that `make` writes."""
        with self._room() as folder:
            make(folder / name)
            self._store.put(folder / name, f"{self._uri}/{name}")

    def names(self) -> list[str]:
        """Return the files' names, sorted."""
        return self._store.names(self._uri)

    @contextmanager
    def read(self, name: str) -> Iterator[Path]:
        """Give a local copy for as long as the context lasts."""
        with self._room() as folder:
            self._store.get(f"{self._uri}/{name}", folder / name)
            yield folder / name

    def delete(self, name: str) -> None:
        """Remove the file."""
        self._store.remove(f"{self._uri}/{name}")

    @contextmanager
    def _room(self) -> Iterator[Path]:
        shutil.rmtree(self._scratch, ignore_errors=True)  # what a killed run left
        self._scratch.mkdir(parents=True, mode=0o700)
        try:
            yield self._scratch
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
