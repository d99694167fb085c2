"""One large object to the object store and back: time, and peak memory of both sides.

    python benchmarks/large_object.py --gigabytes 5 --folder /srv/scratch

The store is the compose stack's own (docker/storage_server.py), as a process here; the way is the
steps' own: published, then fetched alone into the cache and checked. It takes four times the size
on the folder's disk, so it is run by hand. Results: benchmarks/results/large_object.json.
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
from tasks.storage import Store

BLOCK = 1 << 24
RESULT = ROOT / "benchmarks" / "results" / "large_object.json"


def write(file: Path, size: int) -> None:
    """Write random bytes: nothing between here and there can make them shorter."""
    rng = np.random.default_rng(0)
    with file.open("wb") as stream:
        for start in range(0, size, BLOCK):
            stream.write(rng.bytes(min(BLOCK, size - start)))


def serve(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start the store; return its process and address, once it answers."""
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
    """The peak of a process's own memory, in MiB: pages of files are the disk's cache."""

    def __init__(self, pid: int | str) -> None:
        super().__init__(daemon=True)
        self.status, self.peak, self.first = Path(f"/proc/{pid}/status"), 0, 0
        self.start()

    def run(self) -> None:
        while self.status.exists():
            found = re.findall(r"^RssAnon:\s+(\d+)", self.status.read_text(), re.M)
            now = int(found[0]) >> 10 if found else 0
            self.peak, self.first = max(self.peak, now), self.first or now
            time.sleep(0.1)


def measured(gigabytes: float, folder: Path) -> dict[str, object]:
    """Move the object there and back."""
    size = int(gigabytes * 1e9)
    made = folder / "made"
    made.mkdir()
    write(made / "corpus", size)
    server, os.environ["STORAGE_EMULATOR_HOST"] = serve(folder / "served")
    try:
        store, uri = Store("gs://b/store", folder / "cache"), "gs://b/store/corpus/one"
        here, there = Watch("self"), Watch(server.pid)
        began = time.monotonic()
        store.publish(made, uri)
        sent = time.monotonic()
        with store.local_file(uri, "corpus") as copy:
            got = time.monotonic()
            assert copy.stat().st_size == size
        return {
            "bytes": size,
            "seconds_to_send": round(sent - began, 1),
            "seconds_to_get": round(got - sent, 1),
            "client_MiB": {"before": here.first, "peak": here.peak},
            "store_MiB": {"before": there.first, "peak": there.peak},
        }
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--folder", type=Path, default=None, help="on a disk with room")
    given = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        found = measured(given.gigabytes, scratch)
    finally:
        shutil.rmtree(scratch)
    print(json.dumps(found, indent=1))
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
