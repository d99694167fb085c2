import filecmp
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from child_processes import free_port, wait_for

from tasks.storage.backends import RANGE, backend_for

SERVER = Path(__file__).parents[2] / "docker" / "storage_server.py"
NOTE = b"The patient was seen in clinic."


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Yield the address of a bucket with files in this folder."""
    pytest.importorskip("gcp_storage_emulator", reason="needs gcp-storage-emulator")
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, SERVER, f"--port={port}", "--default-bucket=notes"],
        env=os.environ | {"STORAGE_BASE": str(folder), "STORAGE_DIR": "objects"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _answers(address), what="the server's start", pause=0.1)
        yield address
    finally:
        server.kill()
        server.wait()


def _answers(address: str) -> bool:
    try:
        return bool(_call(f"{address}/storage/v1/b/notes"))
    except OSError:
        return False


def _call(url: str, method: str = "GET", body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, body, method=method)  # noqa: S310 - loopback
    with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310
        return bytes(answer.read())


def _holding(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and NOTE in file.read_bytes()]


def test_deleted_object_is_removed_from_the_disk(tmp_path):
    with serving(tmp_path) as address:
        upload = f"{address}/upload/storage/v1/b/notes/o?uploadType=media&name=a.txt"
        for _ in range(2):  # the second upload replaces the first
            _call(upload, "POST", NOTE)
            assert len(_holding(tmp_path)) == 1
        _call(f"{address}/storage/v1/b/notes/o/a.txt", "DELETE")
        assert _holding(tmp_path) == []


def test_large_object_is_transferred_in_parts_and_ranges(tmp_path, monkeypatch):
    """The real client writes each part once and reads only the requested ranges."""
    large, copy = tmp_path / "large", tmp_path / "copy"
    with large.open("wb") as stream:
        for number in range(3 * RANGE >> 20):
            stream.write(number.to_bytes(4, "big") * (1 << 18))
        stream.write(b"end")
    with serving(tmp_path / "served") as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        backend = backend_for("gs://notes/x")
        backend.put(large, "large")
        backend.get("large", copy)
        assert filecmp.cmp(large, copy, shallow=False)
        backend.put(copy, "large")  # the second upload replaces the first
        assert backend.sizes("") == {"large": large.stat().st_size}
        backend.delete("large")
        kept = [
            f for f in (tmp_path / "served").rglob("*") if f.is_file() and f.stat().st_size > 1e6
        ]
        assert kept == []


def test_deleted_and_partial_files_are_removed_at_the_next_start(tmp_path):
    aside = tmp_path / "objects" / "_softdelete" / "notes" / "abc"
    aside.parent.mkdir(parents=True)
    aside.write_bytes(NOTE)
    (tmp_path / "objects" / ".partial-abc").write_bytes(NOTE)
    with serving(tmp_path) as address:
        upload = f"{address}/upload/storage/v1/b/notes/o?uploadType=media&name=a.txt"
        _call(upload, "POST", NOTE)
        assert len(_holding(tmp_path)) == 1
    with serving(tmp_path) as address:
        assert _call(f"{address}/download/storage/v1/b/notes/o/a.txt?alt=media") == NOTE
