"""The storage emulator with patches for `kill -9`, deletion and large objects.

The emulator writes files in place, including its index of all objects. A kill at the wrong moment
would lose all objects. All writes go through one method, which this script replaces.

The emulator would keep deleted objects for seven days and never remove them: private text would
remain, and the disk would fill up.

For each part of an upload, the emulator would write all earlier parts again, and for each range of
an object, it would read the whole object into memory. An object of 5 GB would take a day and exceed
the memory.
"""

import base64
import mmap
import os
import shutil
import sys
import tempfile
from pathlib import Path

import google_crc32c
from gcp_storage_emulator import storage
from gcp_storage_emulator.__main__ import main
from gcp_storage_emulator.exceptions import BadRequest
from gcp_storage_emulator.handlers import objects

_PARTIAL = ".partial-"
_MAPPED = 1 << 20  # bytes; of larger objects, only the requested range is read
_in_place = storage._FileStore.write_bytes
_read = storage._FileStore.read_bytes
_path_of = storage._FileStore._disk_path
_read_index = storage.Storage._read_config_from_file


class Mapped(mmap.mmap):
    """The content of a file, which is read from the disk on access."""

    file: Path


def write_whole(store: storage._FileStore, name: str, content: bytes | Mapped) -> None:
    """Write and sync a complete temporary file, and rename it to replace the old one.

    Mapped content is already a file, so it gets a hard link instead of a copy. This is safe because
    no file ever changes except an upload in progress.
    """
    if store._use_memory:
        _in_place(store, name, content)
        return
    path: Path = _path_of(store, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=store._root, prefix=_PARTIAL)
    try:
        with os.fdopen(handle, "wb") as stream:
            if not isinstance(content, Mapped):
                stream.write(content)
        if isinstance(content, Mapped):
            Path(temporary).unlink()
            os.link(content.file, temporary)
        with open(temporary, "rb") as stream:  # noqa: PTH123 - a name, not a path
            os.fsync(stream.fileno())
        os.replace(temporary, path)  # noqa: PTH105 - a name, not a path
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_mapped(store: storage._FileStore, name: str) -> bytes | Mapped:
    """Return a file's content; the content of a large file is mapped and read on access."""
    path: Path | None = None if store._use_memory else _path_of(store, name)
    if path is None or not path.is_file() or path.stat().st_size < _MAPPED:
        return bytes(_read(store, name))
    with path.open("rb") as stream:
        content = Mapped(stream.fileno(), 0, access=mmap.ACCESS_READ)
    content.file = path
    return content


def append(
    kept: storage.Storage,
    upload: str,
    content: bytes,
    total_size: int | None = None,
    expected_start: int | None = None,
) -> bytes | Mapped | None:
    """Append a part to an upload; return the whole object with its last part."""
    name = kept._object_path(storage.RESUMABLE_DIR, kept.safe_id(upload))
    path: Path = _path_of(kept._store, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as stream:  # a part interrupted by a kill continues at its end
        if expected_start not in (None, stream.tell()):
            raise BadRequest(f"a part begins at {expected_start}, not at {stream.tell()}")
        stream.write(content or b"")
        size = stream.tell()
    return None if total_size is None or size < total_size else read_mapped(kept._store, name)


def crc32c(content: str | bytes | Mapped) -> str:
    """Return the checksum of a content, block by block."""
    given = content.encode() if isinstance(content, str) else content
    checksum = google_crc32c.Checksum()
    for start in range(0, len(given), _MAPPED):
        checksum.update(given[start : start + _MAPPED])
    return base64.b64encode(checksum.digest()).decode()


def read_index(kept: storage.Storage) -> None:
    """Read the index of all objects; remove deleted objects and files that a kill left partial."""
    _read_index(kept)
    kept.soft_deleted = {}
    if not kept._use_memory_fs:
        root = kept._store._root
        shutil.rmtree(root / storage.SOFT_DELETE_DIR, ignore_errors=True)
        for partial in root.glob(f"{_PARTIAL}*"):
            partial.unlink()


if __name__ == "__main__":
    storage._FileStore.write_bytes = write_whole
    storage._FileStore.read_bytes = read_mapped
    storage.Storage.add_to_resumable_upload = append
    storage.Storage._read_config_from_file = read_index
    objects._crc32c = crc32c
    storage.Storage._bucket_soft_delete_retention_seconds = lambda *_: 0
    main(["start", "--quiet", *sys.argv[1:]])
