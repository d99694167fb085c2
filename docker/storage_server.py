"""The storage emulator, made to survive `kill -9`, and to keep nothing that was deleted.

It writes in place, its index of all objects too: killed at the wrong moment, it would forget them
all. Everything that it writes goes through one method, which this replaces before it starts.

What is deleted it would set aside for seven days, and then not remove either: private text would
stay, and the disk fill up.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from gcp_storage_emulator import storage
from gcp_storage_emulator.__main__ import main

_PARTIAL = ".partial-"
_in_place = storage._FileStore.write_bytes
_path_of = storage._FileStore._disk_path
_read_index = storage.Storage._read_config_from_file


def write_whole(store: storage._FileStore, name: str, content: bytes) -> None:
    """Write a complete, synced file beside the old one, and rename it over."""
    if store._use_memory:
        _in_place(store, name, content)
        return
    path: Path = _path_of(store, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=store._root, prefix=_PARTIAL)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)  # noqa: PTH105 - a name, not a path
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_index(kept: storage.Storage) -> None:
    """Read the index of all objects; remove what was set aside, or was being written at a kill."""
    _read_index(kept)
    kept.soft_deleted = {}
    if not kept._use_memory_fs:
        root = kept._store._root
        shutil.rmtree(root / storage.SOFT_DELETE_DIR, ignore_errors=True)
        for partial in root.glob(f"{_PARTIAL}*"):
            partial.unlink()


if __name__ == "__main__":
    storage._FileStore.write_bytes = write_whole
    storage.Storage._read_config_from_file = read_index
    storage.Storage._bucket_soft_delete_retention_seconds = lambda *_: 0
    main(["start", "--quiet", *sys.argv[1:]])
