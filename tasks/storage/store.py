"""The store: one folder or bucket prefix; steps write below it and nowhere else.

Files of a folder become visible one by one, each complete, followed by `checksums.json`. The step
contract then writes `result.json` last; the folder counts as complete only with it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dp_core.errors import BadInput
from tasks.protocol.specs import STORE_SCHEME
from tasks.storage.backends import LocalBackend, Missing, backend_for, is_remote, local_path
from tasks.storage.copies import Copies

CHECKSUMS = "checksums.json"
RESULT = "result.json"

Published = dict[str, dict[str, Any]]  # by name: `sha256`, in hex, and `bytes`


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class Store:
    """All objects below one root URI.

    Objects are named by store addresses (`store://STEP/HASH`), which do not depend on the root, or
    by URIs below the root.

    Args:
        root: a path, `file://` or `gs://` URI.
        cache: local folder for copies of remote files.
        cache_bytes: bound on the size of the copies; None for the default of `Copies`.
    """

    def __init__(self, root: str, cache: Path, cache_bytes: int | None = None) -> None:
        self.root = root.rstrip("/")
        self._copies = Copies(cache, cache_bytes)
        self._backend = backend_for(self.root)

    def address(self, uri: str) -> str:
        """Return the store address of an object, given as a URI below the root.

        Raises:
            BadInput: the URI is not below the root.
        """
        return f"{STORE_SCHEME}{self.key(uri)}"

    def location(self, uri: str) -> str:
        """Return the URI of an object below the root.

        Raises:
            BadInput: the URI is not below the root.
        """
        return f"{self.root}/{self.key(uri)}"

    def key(self, uri: str) -> str:
        """Return the key of an object relative to the root.

        Raises:
            BadInput: the URI is not below the root.
        """
        if uri.startswith(STORE_SCHEME):
            key = uri.removeprefix(STORE_SCHEME).rstrip("/")
            inside = not {"", ".", ".."}.intersection(key.split("/"))
        elif is_remote(self.root):
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
                fix="Give the address of an output (store://STEP/HASH), or set CONFIDE_STORE.",
            )
        return key

    def read(self, uri: str) -> bytes | None:
        """Return an object's content, or None if there is no such object."""
        try:
            return self._backend.read(self.key(uri))
        except Missing:
            return None

    def write(self, uri: str, content: bytes) -> None:
        """Replace an object atomically."""
        self._backend.write(self.key(uri), content)

    def remove(self, uri: str) -> None:
        """Remove an object if it exists."""
        self._backend.delete(self.key(uri))

    def put(self, file: Path, uri: str) -> None:
        """Copy a local file into an object, which becomes visible only when complete."""
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
        """Return the sorted names of the objects directly below a URI."""
        start = f"{self.key(uri)}/"
        with _as_os_errors(uri):
            keys = [k for k in self._backend.sizes(start.rstrip("/")) if k.startswith(start)]
        return sorted(k.removeprefix(start) for k in keys if "/" not in k.removeprefix(start))

    def clear(self, uri: str) -> None:
        """Remove every object below a URI."""
        for key in self._backend.sizes(self.key(uri)):
            self._backend.delete(key)

    def publish(self, folder: Path, uri: str) -> None:
        """Copy a finished local folder below the root, replacing the files of earlier attempts."""
        self.clear(uri)
        key, checksums = self.key(uri), {}
        for file in sorted(f for f in folder.rglob("*") if f.is_file()):
            name = file.relative_to(folder).as_posix()
            checksums[name] = {"sha256": sha256_of(file), "bytes": file.stat().st_size}
            self._backend.put(file, f"{key}/{name}")
        self._backend.write(f"{key}/{CHECKSUMS}", json.dumps(checksums, indent=1).encode())

    def local_copy(self, uri: str, without: Callable[[str], bool] = lambda _: False) -> Path:
        """Return a published folder as a local path: the folder, or a checked copy in the cache.

        The copy is kept for the life of this process.

        Args:
            uri: URI of the folder.
            without: whether to skip a file, given its name; skipped files are neither checked nor
                copied.

        Raises:
            BadInput: the folder is missing, incomplete or damaged.
        """
        published = self._published(uri)
        files = {name: expected for name, expected in published.items() if not without(name)}
        if not isinstance(self._backend, LocalBackend):
            return self._copies.copy(*self._download(uri, files))
        folder = LocalBackend(local_path(self.location(uri)))
        for name, expected in files.items():
            if not _is_whole(folder.path(name), expected):
                raise _damaged(uri, name)
        return folder.root

    def damaged(self, uri: str) -> list[str]:
        """Return the sorted names of published files that are missing or have changed.

        In a bucket, which checks contents itself, only the sizes are compared.

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

        checksums = self._published(uri)
        return sorted(name for name, expected in checksums.items() if not whole(name, expected))

    def digests(self, uri: str) -> dict[str, str]:
        """Return the SHA-256 of each published file, in hex, sorted by name.

        The platform's own files are left out: the step's result, which has the operator's numbers,
        and the checksums.

        Raises:
            BadInput: there is no complete folder.
        """
        checksums = self._published(uri)
        return {name: str(expected["sha256"]) for name, expected in sorted(checksums.items())}

    def sizes(self, uri: str) -> dict[str, int]:
        """Return the size of each published file, in bytes, at the time of publication.

        Raises:
            BadInput: there is no complete folder.
        """
        checksums = self._published(uri)
        return {name: int(expected["bytes"]) for name, expected in checksums.items()}

    def outputs(self, step: str) -> list[str]:
        """Return the addresses of a step's output folders that hold a result."""
        keys = [k.split("/") for k in self._backend.sizes(step)]
        return [f"{STORE_SCHEME}{k[0]}/{k[1]}" for k in keys if k[2:] == [RESULT]]

    def _published(self, uri: str) -> Published:
        try:
            return _checksums(self._backend.read(f"{self.key(uri)}/{CHECKSUMS}"))
        except (Missing, ValueError, TypeError) as error:
            raise BadInput("no complete folder there", where=uri, fix="Run its step first.") from (
                error
            )

    def _download(self, uri: str, files: Published) -> tuple[str, int, Callable[[Path], None]]:
        """Return the arguments of `Copies.copy` for these files: mark, size and function."""
        key = self.key(uri)
        named = [self.location(uri), files]
        mark = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()

        def fill(folder: Path) -> None:
            for name, expected in files.items():
                file = LocalBackend(folder).path(name)
                if _is_whole(file, expected):
                    continue  # an earlier, killed download has completed this file
                file.parent.mkdir(parents=True, exist_ok=True)
                try:
                    with _as_os_errors(f"{uri}/{name}"):
                        self._backend.get(f"{key}/{name}", file, int(expected["bytes"]))
                except FileNotFoundError as error:
                    raise _damaged(uri, name) from error
                if not _is_whole(file, expected):
                    raise _damaged(uri, name)

        return mark[:32], sum(int(expected["bytes"]) for expected in files.values()), fill


def _is_whole(file: Path, expected: dict[str, Any]) -> bool:
    return file.is_file() and sha256_of(file) == expected["sha256"]


def _checksums(content: bytes) -> Published:
    """Return the digest and size of each file from the content of `checksums.json`.

    Raises:
        ValueError, TypeError: the content has another form.
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
    """Turn a bucket's errors into the corresponding errors of a disk."""
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

    An object appears in the store only when it is complete, so a kill during an upload leaves the
    previous object.

    Args:
        store: the store that keeps the files.
        uri: folder below the store's root.
        scratch: local folder for the file that is being transferred.
    """

    def __init__(self, store: Store, uri: str, scratch: Path) -> None:
        self._store, self._uri, self._scratch = store, uri.rstrip("/"), scratch

    @property
    def where(self) -> str:
        """The URI of the files."""
        return self._uri

    def write(self, name: str, make: Callable[[Path], None]) -> None:
        """Store the file that `make` writes."""
        with self._room() as folder:
            make(folder / name)
            self._store.put(folder / name, f"{self._uri}/{name}")

    def names(self) -> list[str]:
        """Return the sorted names of the files."""
        return self._store.names(self._uri)

    @contextmanager
    def read(self, name: str) -> Iterator[Path]:
        """Yield a local copy, which exists within the context."""
        with self._room() as folder:
            self._store.get(f"{self._uri}/{name}", folder / name)
            yield folder / name

    def delete(self, name: str) -> None:
        """Remove the file."""
        self._store.remove(f"{self._uri}/{name}")

    @contextmanager
    def _room(self) -> Iterator[Path]:
        shutil.rmtree(self._scratch, ignore_errors=True)  # files of a killed run
        self._scratch.mkdir(parents=True, mode=0o700)
        try:
            yield self._scratch
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
