"""What people point at: specs, and source files anywhere this machine or its cloud can read."""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from dp_core.errors import BadInput
from tasks.storage.backend import Missing
from tasks.storage.uris import backend_for, decode_data, is_remote, local_path


def read_spec(uri: str) -> bytes:
    """Return a spec's JSON from a path, `file://`, `gs://` or `data:` URI.

    Raises:
        BadInput: nothing can be read there.
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
    except OSError as error:
        raise BadInput(f"cannot read the spec ({os.strerror(error.errno or 0)})", where=uri) from (
            error
        )


def stage_source(uri: str, folder: Path, *, field: str) -> Path:
    """Return a source file or folder as a local path, downloading a `gs://` one into `folder`.

    Raises:
        BadInput: it is not there; `field` names the setting.
    """
    if not is_remote(uri):
        path = local_path(uri)
        if not path.exists():
            raise BadInput("no such file or folder", where=field, fix="Check the path.")
        return path
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    parent, _, name = uri.rstrip("/").rpartition("/")
    backend = backend_for(parent)
    for key in backend.sizes(name) or [name]:
        target = (folder / key).resolve()
        if not target.is_relative_to(folder.resolve()):
            raise BadInput("an object's name leaves its folder", where=field)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            backend.get(key, target)
        except Missing as error:
            raise BadInput("no such object", where=field, fix="Check the URI.") from error
    return folder / name


def keyed_digest(path: Path, key: bytes, *, without: Collection[str] = ()) -> str:
    """Return HMAC-SHA256 over the names and contents of a file or folder, in hex.

    Files of the folder itself that are named in `without` do not count.

    Keyed, because a plain hash of private data would let anybody confirm a guess of it.
    """
    digest = hmac.new(key, digestmod=hashlib.sha256)
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
    for file in files:
        if file.parent == path and file.name in without:
            continue
        name = file.relative_to(path).as_posix().encode() if file != path else b""
        digest.update(len(name).to_bytes(4, "big") + name)
        digest.update(file.stat().st_size.to_bytes(8, "big"))
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
