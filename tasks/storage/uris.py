"""URIs: a plain path, `file://`, `gs://bucket/…`, and `data:` for specs."""

from __future__ import annotations

import base64
import binascii
import os
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes

from dp_core.errors import BadInput
from tasks.storage.backend import Backend
from tasks.storage.local import LocalBackend


def is_remote(uri: str) -> bool:
    """Return whether the URI names a bucket and not this machine's disk."""
    return uri.startswith("gs://")


def local_path(uri: str) -> Path:
    """Return the path of a plain path or a `file://` URI.

    Raises:
        BadInput: another scheme, or a relative path (steps run in other folders than people).
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
        path = Path(os.path.expanduser(uri))  # noqa: PTH111 - which leaves what it cannot expand
    if not path.is_absolute():
        raise BadInput("a path must be absolute", where=f"{uri!r}", fix="Write it from / on.")
    return path


def backend_for(uri: str) -> Backend:
    """Return the backend whose root is the URI."""
    if is_remote(uri):
        from tasks.storage.gcs import GoogleStorageBackend

        bucket, _, prefix = uri.removeprefix("gs://").partition("/")
        return GoogleStorageBackend(bucket, prefix)
    return LocalBackend(local_path(uri))


def decode_data(uri: str) -> bytes:
    """Return the content of a `data:` URI (RFC 2397).

    Raises:
        BadInput: it is cut or not base64.
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
    """Return JSON as a `data:` URI."""
    return "data:application/json;base64," + base64.b64encode(content).decode()
