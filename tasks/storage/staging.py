"""Inputs by URI: specs (also as `data:` URIs) and source files, local or in a bucket."""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import hmac
import os
import shlex
import shutil
from collections.abc import Collection
from pathlib import Path
from urllib.parse import unquote_to_bytes

from dp_core.data.readers.sources import entries, open_regular
from dp_core.errors import BadInput
from tasks.storage.backends import Missing, backend_for, is_remote, local_path

# Errors of a file system for a name that is too long, or that is both a file and a folder.
_NO_NAMES = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EINVAL}


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
        except Missing as error:
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
    """
    path = _downloaded(uri, folder, field) if is_remote(uri) else local_path(uri)
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
        except Missing as error:
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


def encode_data(content: bytes) -> str:
    """Return JSON content as a `data:` URI."""
    return "data:application/json;base64," + base64.b64encode(content).decode()
