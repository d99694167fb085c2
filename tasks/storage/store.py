"""The store: one folder or bucket prefix; steps write below it and nowhere else.

Files of a folder become visible one by one, each complete, followed by `checksums.json`. The step
contract then writes `result.json` last; the folder counts as complete only with it.
"""

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from dp_core.config.fields import Config
from dp_core.errors import BadInput
from tasks.protocol.specs import STORE_SCHEME
from tasks.storage.backends import LocalBackend, backend_for, is_remote, local_path
from tasks.storage.copies import Copies

CHECKSUMS = "checksums.json"
RESULT = "result.json"


class PublishedFile(Config):
    """The digest and the size of a published file, in `checksums.json` by the file's name."""

    sha256: str  # in hex
    bytes: int


_Name = Annotated[str, Field(pattern=r"^[^\x00]+$")]
_CHECKSUMS = TypeAdapter(dict[_Name, PublishedFile])


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
        except FileNotFoundError:
            return None

    def write(self, uri: str, content: bytes) -> None:
        """Replace an object atomically."""
        self._backend.write(self.key(uri), content)

    def remove(self, uri: str) -> None:
        """Remove an object if it exists."""
        self._backend.delete(self.key(uri))

    def put(self, file: Path, uri: str) -> None:
        """Copy a local file into an object, which becomes visible only when complete."""
        self._backend.put(file, self.key(uri))

    def get(self, uri: str, destination: Path) -> None:
        """Copy an object to a local file.

        Raises:
            FileNotFoundError: there is no such object.
        """
        self._backend.get(self.key(uri), destination)

    def names(self, uri: str) -> list[str]:
        """Return the sorted names of the objects directly below a URI."""
        start = f"{self.key(uri)}/"
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
            checksums[name] = PublishedFile(sha256=sha256_of(file), bytes=file.stat().st_size)
            self._backend.put(file, f"{key}/{name}")
        self._backend.write(f"{key}/{CHECKSUMS}", _CHECKSUMS.dump_json(checksums, indent=1))

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
            named = self.location(uri).encode() + _CHECKSUMS.dump_json(dict(sorted(files.items())))
            mark = hashlib.sha256(named).hexdigest()[:32]
            size = sum(expected.bytes for expected in files.values())
            return self._copies.copy(mark, size, partial(self._download, uri, files))
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
        checksums, backend, key = self._published(uri), self._backend, self.key(uri)
        if isinstance(backend, LocalBackend):
            files = {name: backend.path(f"{key}/{name}") for name in checksums}
            return sorted(n for n, file in files.items() if not _is_whole(file, checksums[n]))
        sizes = backend.sizes(key)
        return sorted(n for n, e in checksums.items() if sizes.get(f"{key}/{n}") != e.bytes)

    def digests(self, uri: str) -> dict[str, str]:
        """Return the SHA-256 of each published file, in hex, sorted by name.

        The platform's own files are left out: the step's result, which has the operator's numbers,
        and the checksums.

        Raises:
            BadInput: there is no complete folder.
        """
        return {name: file.sha256 for name, file in sorted(self._published(uri).items())}

    def sizes(self, uri: str) -> dict[str, int]:
        """Return the size of each published file, in bytes, at the time of publication.

        Raises:
            BadInput: there is no complete folder.
        """
        return {name: file.bytes for name, file in self._published(uri).items()}

    def outputs(self, step: str) -> list[str]:
        """Return the addresses of a step's output folders that hold a result."""
        keys = [k.split("/") for k in self._backend.sizes(step)]
        return [f"{STORE_SCHEME}{k[0]}/{k[1]}" for k in keys if k[2:] == [RESULT]]

    def _published(self, uri: str) -> dict[str, PublishedFile]:
        try:
            return _CHECKSUMS.validate_json(self._backend.read(f"{self.key(uri)}/{CHECKSUMS}"))
        except (FileNotFoundError, ValueError) as error:
            raise BadInput("no complete folder there", where=uri, fix="Run its step first.") from (
                error
            )

    def _download(self, uri: str, files: Mapping[str, PublishedFile], folder: Path) -> None:
        """Copy the files of a bucket to a local folder, except those that are complete there."""
        for name, expected in files.items():
            file = LocalBackend(folder).path(name)
            if _is_whole(file, expected):
                continue  # an earlier, killed download has completed this file
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._backend.get(f"{self.key(uri)}/{name}", file, expected.bytes)
            except FileNotFoundError as error:
                raise _damaged(uri, name) from error
            if not _is_whole(file, expected):
                raise _damaged(uri, name)


def _is_whole(file: Path, expected: PublishedFile) -> bool:
    return file.is_file() and sha256_of(file) == expected.sha256


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
