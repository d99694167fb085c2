"""The storage emulator, made to survive `kill -9`: its files are replaced whole or not at all.

It writes in place, its index of all objects too: killed at the wrong moment, it would forget them
all. Everything that it writes goes through one method, which this replaces before it starts.
"""

import os
import sys
import tempfile
from pathlib import Path

from gcp_storage_emulator import storage
from gcp_storage_emulator.__main__ import main

_in_place = storage._FileStore.write_bytes
_path_of = storage._FileStore._disk_path


def write_whole(store: storage._FileStore, name: str, content: bytes) -> None:
    """Write a complete, synced file beside the old one, and rename it over."""
    if store._use_memory:
        _in_place(store, name, content)
        return
    path: Path = _path_of(store, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=store._root, prefix=".partial-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)  # noqa: PTH105 - a name, not a path
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    storage._FileStore.write_bytes = write_whole
    main(["start", "--quiet", *sys.argv[1:]])
