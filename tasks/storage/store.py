"""The store: one folder or bucket prefix under which every step writes, and no step elsewhere.

A folder becomes visible file by file, each one whole, with `checksums.json` after them;
the step contract then writes `result.json` last, and only that makes it count.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dp_core.errors import BadInput
from tasks.storage.journal import exclusive
from tasks.storage.local import LocalBackend, Missing, backend_for, is_remote, local_path

CHECKSUMS = "checksums.json"
RESULT = "result.json"
_BLOCK = 1 << 20


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file, in hex, reading it in blocks."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


class Store:
    """Everything below one root URI.

    Args:
        root: a path, `file://` or `gs://` URI.
        cache: local folder for copies of remote files.
    """

    def __init__(self, root: str, cache: Path) -> None:
        self.root = root.rstrip("/")
        self._copies = Copies(cache)
        self._backend = backend_for(self.root)

    def key(self, uri: str) -> str:
        """Return the URI's place below the root.

        Raises:
            BadInput: the URI is not below the root.
        """
        if is_remote(self.root):
            inside = uri.startswith(f"{self.root}/") and ".." not in uri.split("/")
            key = uri.removeprefix(f"{self.root}/")
        else:
            root = local_path(self.root).resolve()
            path = local_path(uri).resolve() if not is_remote(uri) else Path("/")
            inside = path != root and path.is_relative_to(root)
            key = path.relative_to(root).as_posix() if inside else ""
        if not inside:
            raise BadInput(
                "a URI that is not below this deployment's store",
                where="storage",
                fix="Set CONFIDE_STORE to the store that the spec names as its root.",
            )
        return key

    def read(self, uri: str) -> bytes | None:
        """Return an object's content, or None if there is no such object."""
        try:
            return self._backend.read(self.key(uri))
        except Missing:
            return None

    def write(self, uri: str, content: bytes) -> None:
        """Replace an object at once."""
        self._backend.write(self.key(uri), content)

    def remove(self, uri: str) -> None:
        """Remove an object if it is there."""
        self._backend.delete(self.key(uri))

    def put(self, file: Path, uri: str) -> None:
        """Copy a local file into an object, visible only when complete."""
        with _as_os_errors(uri):
            self._backend.put(file, self.key(uri))

    def get(self, uri: str, destination: Path) -> None:
        """Copy an object to a local file.

        Raises:
            FileNotFoundError: there is no such object.
        """
        with _as_os_errors(uri):
            self._backend.get(self.key(uri), destination)

    def names(self, uri: str) -> list[str]:
        """Return the names of the objects right below a URI, sorted."""
        start = f"{self.key(uri)}/"
        with _as_os_errors(uri):
            keys = [k for k in self._backend.sizes(start.rstrip("/")) if k.startswith(start)]
        return sorted(k.removeprefix(start) for k in keys if "/" not in k.removeprefix(start))

    def clear(self, uri: str) -> None:
        """Remove every object below a URI."""
        for key in self._backend.sizes(self.key(uri)):
            self._backend.delete(key)

    def publish(self, folder: Path, uri: str) -> None:
        """Copy a finished local folder below the root, in place of what was left there."""
        key = self.key(uri)
        for old in self._backend.sizes(key):
            self._backend.delete(old)
        checksums = {}
        for file in sorted(f for f in folder.rglob("*") if f.is_file()):
            name = file.relative_to(folder).as_posix()
            checksums[name] = {"sha256": sha256_of(file), "bytes": file.stat().st_size}
            self._backend.put(file, f"{key}/{name}")
        self._backend.write(f"{key}/{CHECKSUMS}", json.dumps(checksums, indent=1).encode())

    def local_copy(self, uri: str) -> Path:
        """Return a published folder as a local path: itself, or a checked copy in the cache.

        Raises:
            BadInput: the folder is missing, incomplete or damaged.
        """
        key = self.key(uri)
        checksums = self._published(key, uri)
        if isinstance(self._backend, LocalBackend):
            folder = self._backend.path(key)
            for name, expected in checksums.items():
                file = self._backend.path(f"{key}/{name}")
                if not file.is_file() or sha256_of(file) != expected["sha256"]:
                    raise _damaged(uri, name)
            return folder
        return self._download(key, uri, checksums)

    def damaged(self, uri: str) -> list[str]:
        """Return which published files are missing or not as they were, sorted.

        A bucket checks contents by itself: there, sizes are looked at.

        Raises:
            BadInput: there is no complete folder.
        """
        key = self.key(uri)
        sizes = self._backend.sizes(key)

        def whole(name: str, expected: dict[str, Any]) -> bool:
            if sizes.get(f"{key}/{name}") != expected["bytes"]:
                return False
            if not isinstance(self._backend, LocalBackend):
                return True
            return bool(sha256_of(self._backend.path(f"{key}/{name}")) == expected["sha256"])

        checksums = self._published(key, uri)
        return sorted(name for name, expected in checksums.items() if not whole(name, expected))

    def published(self, uri: str) -> list[str]:
        """Return the names of the files that a step left in an output folder, sorted.

        What the platform puts beside them (the step's result, with the operator's numbers, and the
        checksums) is not among them.

        Raises:
            BadInput: there is no complete folder.
        """
        return sorted(self._published(self.key(uri), uri))

    def digests(self, uri: str) -> dict[str, str]:
        """Return the SHA-256 of each of these files, in hex, as it was when they were published.

        Raises:
            BadInput: there is no complete folder.
        """
        checksums = self._published(self.key(uri), uri)
        return {name: str(expected["sha256"]) for name, expected in sorted(checksums.items())}

    def outputs(self, step: str) -> list[str]:
        """Return the URIs of a step's output folders that hold a result."""
        keys = [k.split("/") for k in self._backend.sizes(step)]
        return [f"{self.root}/{k[0]}/{k[1]}" for k in keys if k[2:] == [RESULT]]

    def _published(self, key: str, uri: str) -> dict[str, dict[str, Any]]:
        try:
            return _checksums(self._backend.read(f"{key}/{CHECKSUMS}"))
        except (Missing, ValueError, TypeError) as error:
            raise BadInput("no complete folder there", where=uri, fix="Run its step first.") from (
                error
            )

    def _download(self, key: str, uri: str, checksums: dict[str, dict[str, Any]]) -> Path:
        mark = hashlib.sha256(json.dumps([uri, checksums], sort_keys=True).encode()).hexdigest()

        def fill(folder: Path) -> None:
            for name, expected in checksums.items():
                file = LocalBackend(folder).path(name)
                file.parent.mkdir(parents=True, exist_ok=True)
                try:
                    self._backend.get(f"{key}/{name}", file)
                except Missing as error:
                    raise _damaged(uri, name) from error
                if sha256_of(file) != expected["sha256"]:
                    raise _damaged(uri, name)

        return self._copies.copy(mark[:32], fill)


def _checksums(content: bytes) -> dict[str, dict[str, Any]]:
    """Return what `checksums.json` says: for each file its digest and size.

    Raises:
        ValueError, TypeError: it says something else.
    """
    checksums = json.loads(content)
    if not isinstance(checksums, dict):
        raise TypeError("not an object")
    for name, expected in checksums.items():
        if not (name and "\0" not in name and {"sha256", "bytes"} <= set(expected)):
            raise ValueError("not a file with its digest and size")
    return checksums


@contextmanager
def _as_os_errors(uri: str) -> Iterator[None]:
    """Turn a bucket's own errors into what a disk would say."""
    try:
        yield
    except Missing as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), uri) from error
    except Exception as error:
        if type(error).__module__.startswith("google."):
            raise OSError(errno.EIO, f"the bucket answered {type(error).__name__}", uri) from error
        raise


def _damaged(uri: str, name: str) -> BadInput:
    return BadInput(
        f"{name} is missing or damaged",
        where=uri,
        fix="Run its step again, which makes shards of a corpus anew; any other folder must be"
        " deleted first.",
    )


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
        with exclusive(copy.with_suffix(".lock")) as lock:
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
                with exclusive(lock):
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
