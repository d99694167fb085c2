"""One large object to the object store and back: time, and peak memory of both sides.

    python benchmarks/large_object.py --gigabytes 5 --folder /srv/scratch

The store is the object store of the compose stack (docker/storage_server.py), run as a local
process. The object is published, fetched into the cache and checked, as steps do. The benchmark
needs four times the size on the folder's disk, so it is run by hand. Results:
benchmarks/results/large_object.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tasks.storage.store import Store

BLOCK = 1 << 24
RESULT = ROOT / "benchmarks" / "results" / "large_object.json"


def write(file: Path, size: int) -> None:
    """Write random bytes, which no layer can compress."""
    rng = np.random.default_rng(0)
    with file.open("wb") as stream:
        for start in range(0, size, BLOCK):
            stream.write(rng.bytes(min(BLOCK, size - start)))


def serve(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start the store; return its process and its address after it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, ROOT / "docker/storage_server.py", f"--port={port}", "--default-bucket=b"],
        env=os.environ | {"STORAGE_BASE": str(folder), "STORAGE_DIR": "objects"},
    )
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return server, f"http://127.0.0.1:{port}"
        time.sleep(0.1)


class Watch(threading.Thread):
    """The peak anonymous memory of a process in MiB, without the page cache of files."""

    def __init__(self, pid: int | str) -> None:
        super().__init__(daemon=True)
        self.status, self.peak, self.first = Path(f"/proc/{pid}/status"), 0, 0
        self.start()

    def run(self) -> None:
        while self.status.exists():
            matches = re.findall(r"^RssAnon:\s+(\d+)", self.status.read_text(), re.M)
            now = int(matches[0]) >> 10 if matches else 0
            self.peak, self.first = max(self.peak, now), self.first or now
            time.sleep(0.1)


def measured(gigabytes: float, folder: Path) -> dict[str, object]:
    """Send the object to the store and fetch it back."""
    size = int(gigabytes * 1e9)
    made = folder / "made"
    made.mkdir()
    write(made / "corpus", size)
    server, os.environ["STORAGE_EMULATOR_HOST"] = serve(folder / "served")
    try:
        store, uri = Store("gs://b/store", folder / "cache"), "gs://b/store/corpus/one"
        client, store_watch = Watch("self"), Watch(server.pid)
        began = time.monotonic()
        store.publish(made, uri)
        sent = time.monotonic()
        copy = store.local_copy(uri) / "corpus"
        got = time.monotonic()
        assert copy.stat().st_size == size
        return {
            "bytes": size,
            "seconds_to_send": round(sent - began, 1),
            "seconds_to_get": round(got - sent, 1),
            "client_MiB": {"before": client.first, "peak": client.peak},
            "store_MiB": {"before": store_watch.first, "peak": store_watch.peak},
        }
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument(
        "--folder", type=Path, default=None, help="folder on a disk with enough space"
    )
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        result = measured(options.gigabytes, scratch)
    finally:
        shutil.rmtree(scratch)
    print(json.dumps(result, indent=1))
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
