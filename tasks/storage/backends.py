"""Back ends of the store (a local folder, a bucket of Google Cloud Storage), and inputs by URI.

`STORAGE_EMULATOR_HOST` names an emulator of Cloud Storage.
"""

import base64
import binascii
import contextlib
import errno
import hashlib
import hmac
import os
import shlex
import shutil
import tempfile
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from dp_core.data.readers.sources import entries, open_regular
from dp_core.errors import BadInput, ConfideError, is_full_disk

CHUNK = 16 << 20  # bytes; uploads larger than this are sent in parts
RANGE = 32 << 20  # bytes; larger objects are read in parallel in ranges of this size
CONNECTIONS = 4
PATIENCE = 300.0  # seconds; an emulator answers the last part only after reading the whole object
_NUMBERS = {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT}  # by the status of HTTP
# Errors of a file system for a name that is too long, or that is both a file and a folder.
_NO_NAMES = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL}


class LocalBackend:
    """A folder. Nothing outside it is read or written, not even through symbolic links.

    All back ends have the same methods. Keys are relative, separated by slashes, and already known
    to be inside the back end's root. Errors are `OSError`s: a missing object raises a
    `FileNotFoundError`. A reader sees an old or a new object, never a part of it.
    """

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
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key) from error

    def write(self, key: str, content: bytes) -> None:
        """Replace the file by renaming a complete, synced file."""
        with self._temporary(key) as temporary:
            with temporary.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(self.path(key))

    def get(self, key: str, destination: Path, size: int | None = None) -> None:
        """Copy the file; a failed copy may leave a part of it."""
        shutil.copyfile(self.path(key), destination)

    def put(self, source: Path, key: str) -> None:
        """Link the file if it is on the same disk, or else copy it; then rename."""
        with self._temporary(key) as temporary:
            temporary.unlink()
            try:
                os.link(source, temporary)
            except OSError:  # another disk, or a file system without links
                shutil.copyfile(source, temporary)
            temporary.replace(self.path(key))

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the sizes of the files below a folder."""
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


def _client() -> Any:
    with warnings.catch_warnings():
        # In every process, the client warns of the end of Python 3.11 and of optional packages.
        warnings.simplefilter("ignore")
        from google.auth.credentials import AnonymousCredentials
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud import storage

    if os.environ.get("STORAGE_EMULATOR_HOST"):
        return storage.Client(project="confide", credentials=AnonymousCredentials())  # type: ignore[no-untyped-call]
    try:
        return storage.Client()  # credentials by the standard ways only
    except DefaultCredentialsError:
        raise BadInput(
            "no Google credentials",
            where="storage",
            fix="Run as a service account (Workload Identity), set GOOGLE_APPLICATION_CREDENTIALS, "
            "or log in with `gcloud auth application-default login`.",
        ) from None


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Turn the errors of Google's client into the corresponding errors of a disk."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("google."):
            raise
        number = _NUMBERS.get(getattr(error, "code", 0), errno.EIO)
        raise OSError(number, f"the bucket answered {type(error).__name__}") from error


class GoogleStorageBackend:
    """The objects of a bucket whose names begin with a prefix.

    An object appears in Cloud Storage only when its upload is complete, and the client compares
    a checksum of every upload and download.
    """

    def __init__(self, bucket: str, prefix: str) -> None:
        self.prefix = prefix.strip("/")
        self._bucket = _client().bucket(bucket)

    def _name(self, key: str) -> str:
        parts = key.split("/")
        if ".." in parts:
            raise BadInput("a path leaves the store", where="storage", fix="Use paths below it.")
        return "/".join(part for part in [self.prefix, *parts] if part not in ("", "."))

    @_as_os_errors()
    def read(self, key: str) -> bytes:
        """Return the object's content."""
        content: bytes = self._bucket.blob(self._name(key)).download_as_bytes()
        return content

    @_as_os_errors()
    def write(self, key: str, content: bytes) -> None:
        """Upload the content in one request."""
        blob = self._bucket.blob(self._name(key))
        blob.upload_from_string(content, content_type="application/octet-stream", checksum="crc32c")

    @_as_os_errors()
    def get(self, key: str, destination: Path, size: int | None = None) -> None:
        """Download the object as a stream; a large one in ranges, all of the same generation.

        Args:
            key: key of the object.
            destination: the local file; a failed copy may leave a part of it.
            size: size of the object in bytes, if the caller knows it.
        """
        from google.cloud.storage import transfer_manager

        blob = self._bucket.blob(self._name(key))
        if size is None:
            blob.reload()
            size = int(blob.size)
        if size <= RANGE:
            blob.download_to_filename(str(destination), checksum="crc32c")
            return
        blob.reload()  # its size, checksum and generation must match
        transfer_manager.download_chunks_concurrently(
            blob,
            str(destination),
            chunk_size=RANGE,
            download_kwargs={"if_generation_match": blob.generation},
            worker_type=transfer_manager.THREAD,  # a process would get the credentials pickled
            max_workers=CONNECTIONS,
        )

    @_as_os_errors()
    def put(self, source: Path, key: str) -> None:
        """Upload the file, in parts if it is large."""
        large = source.stat().st_size > CHUNK
        blob = self._bucket.blob(self._name(key), chunk_size=CHUNK if large else None)
        blob.upload_from_filename(str(source), checksum="crc32c", timeout=PATIENCE)

    @_as_os_errors()
    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the sizes of the objects below a folder, by key."""
        start = f"{self.prefix}/" if self.prefix else ""
        folder = self._name(prefix)
        blobs = self._bucket.list_blobs(prefix=f"{folder}/" if folder else "")
        return {blob.name.removeprefix(start): int(blob.size) for blob in blobs}

    def delete(self, key: str) -> None:
        """Remove the object."""
        with contextlib.suppress(FileNotFoundError), _as_os_errors():
            self._bucket.blob(self._name(key)).delete()


Backend = LocalBackend | GoogleStorageBackend


def is_remote(uri: str) -> bool:
    """Return whether the URI names a bucket and not this machine's disk."""
    return uri.startswith("gs://")


def local_path(uri: str) -> Path:
    """Return the path of a plain path or a `file://` URI.

    Raises:
        BadInput: the URI has another scheme, or the path is relative (steps run in other folders
            than the commands that users type).
    """
    if uri.startswith("file://"):
        path = Path(unquote(uri.removeprefix("file://")))
    elif "://" in uri or uri.startswith("data:"):
        raise BadInput(
            f"unknown kind of URI {uri.split(':')[0]!r}",
            where="storage",
            fix="Use a path, file:// or gs://.",
        )
    else:
        path = Path(os.path.expanduser(uri))  # noqa: PTH111 - keeps unknown users' paths
    if not path.is_absolute():
        raise BadInput("a path must be absolute", where=f"{uri!r}", fix="Write it from / on.")
    return path


def backend_for(uri: str) -> Backend:
    """Return the back end whose root is the URI."""
    if is_remote(uri):
        bucket, _, prefix = uri.removeprefix("gs://").partition("/")
        return GoogleStorageBackend(bucket, prefix)
    return LocalBackend(local_path(uri))


# --- inputs: specs and source files


def read_spec(uri: str) -> bytes:
    """Return a spec's JSON from a path, `file://`, `gs://` or `data:` URI.

    Raises:
        BadInput: the spec cannot be read.
    """
    if uri.startswith("data:"):
        return decode_data(uri)
    if is_remote(uri):
        folder, _, name = uri.rpartition("/")
        try:
            return backend_for(folder).read(name)
        except FileNotFoundError as error:
            raise BadInput("no such spec", where=uri) from error
    try:
        return local_path(str(Path(uri).resolve()) if "://" not in uri else uri).read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # also for a zero byte or circular links
        reason = os.strerror(getattr(error, "errno", None) or errno.EINVAL)
        raise BadInput(f"cannot read the spec ({reason})", where=uri) from error


def stage_source(uri: str, folder: Path, *, field: str) -> Path:
    """Return a source file or folder as a local path, downloading a `gs://` one into `folder`.

    Raises:
        BadInput: the source is missing, or holds an entry that is neither file nor folder or that
            may not be read (see `entries`); `field` names the setting.
        ConfideError: the bucket does not answer, or refuses; may be retried.
    """
    if not is_remote(uri):
        path = local_path(uri)
    else:
        try:
            path = _downloaded(uri, folder, field)
        except OSError as error:
            if is_full_disk(error):
                raise
            raise ConfideError(
                f"it cannot be read now: {error.strerror or type(error).__name__}",
                where=f"{field} {uri}",
                fix="Check the network, the bucket's name and the credentials, and run again.",
            ) from None  # the cause may name an object
    entries(path, field)
    return path


def _downloaded(uri: str, folder: Path, field: str) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    parent, _, name = uri.rstrip("/").rpartition("/")
    backend = backend_for(parent)
    sizes: dict[str, int | None] = {**backend.sizes(name)}
    for key, size in (sizes or {name: None}).items():
        if key.endswith("/"):
            continue  # Google's console writes such an object for an empty folder
        target = (folder / key).resolve()
        if not target.is_relative_to(folder.resolve()):
            raise BadInput("an object's name leaves its folder", where=field)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            backend.get(key, target, size)
        except FileNotFoundError as error:
            raise BadInput("no such object", where=field, fix="Check the URI.") from error
        except OSError as error:
            if error.errno not in _NO_NAMES:
                raise
            raise BadInput(
                "an object's name cannot be a file's", where=field, fix="Rename it."
            ) from None  # the name may be a patient's
    return folder / name


def keyed_digest(path: Path, key: bytes, *, without: Collection[str] = ()) -> str:
    """Return HMAC-SHA256 over the names and contents of a file or folder, in hex.

    The digest covers the entries that the readers read, without the files in the top folder that
    `without` names. It is keyed, because a plain hash of private data would let anyone confirm a
    guess of the data.

    Raises:
        BadInput: as in `entries`; or a file cannot be read. The message does not name the file,
            whose name may be a patient's.
    """
    digest = hmac.new(key, digestmod=hashlib.sha256)
    for file in entries(path):
        if file.parent == path and file.name in without:
            continue
        name = file.relative_to(path).as_posix().encode() if file != path else b""
        digest.update(len(name).to_bytes(4, "big") + name)
        try:
            with open_regular(file) as stream:
                digest.update(os.fstat(stream.fileno()).st_size.to_bytes(8, "big"))
                while block := stream.read(1 << 20):
                    digest.update(block)
        except OSError:
            raise BadInput(
                "a file in it may not be read",
                where=str(path),
                fix=f"`find {shlex.quote(str(path))} ! -readable` lists it.",
            ) from None
    return digest.hexdigest()


def decode_data(uri: str) -> bytes:
    """Return the content of a `data:` URI (RFC 2397).

    Raises:
        BadInput: the URI is truncated or not base64.
    """
    head, comma, body = uri.removeprefix("data:").partition(",")
    if not comma:
        raise BadInput("a data: URI without a comma", where="spec", fix="Check the quoting.")
    if not head.endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise BadInput("a data: URI that is not base64", where="spec", fix="Send it whole.") from (
            error
        )
