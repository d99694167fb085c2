import filecmp
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dp_core.errors import BadInput
from tasks.storage.backends import CHUNK, RANGE, Backend, backend_for
from tasks.storage.store import Store

CHECKOUT = Path(__file__).parents[2]
MIB = 1 << 20


def large_file(folder: Path, size: int) -> Path:
    file = folder / "large"
    with file.open("wb") as stream:
        for number in range(size // MIB):
            stream.write(number.to_bytes(4, "big") * (MIB // 4))
    return file


MEASURE = f"""
import resource, sys
sys.path.insert(0, {str(CHECKOUT)!r})
from pathlib import Path
from tasks.storage.backends import backend_for
root, small, large, copy = sys.argv[1], *map(Path, sys.argv[2:])
backend = backend_for(root)
peaks = []
for file in (small, large):
    backend.put(file, file.name)
    backend.get(file.name, copy)
    assert copy.stat().st_size == file.stat().st_size
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
print(peaks[1] - peaks[0])
"""


UPLOAD = f"""
import sys
sys.path.insert(0, {str(CHECKOUT)!r})
from pathlib import Path
from tasks.storage.backends import backend_for
backend = backend_for(sys.argv[1])
print("begins", flush=True)
for number in range(10**6):
    backend.put(Path(sys.argv[2]), "object")
"""


class BackendConformance:
    """Tests of every back end; a subclass provides an empty one."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        raise NotImplementedError

    @pytest.fixture
    def backend(self, root: str) -> Backend:
        return backend_for(root)

    def test_file_is_read_back_unchanged(self, backend, tmp_path):
        objects = {f"a folder/σ/{size}": size for size in (0, 1, MIB)}
        for key, size in objects.items():
            source = tmp_path / f"source-{size}"
            source.write_bytes(os.urandom(size))
            backend.put(source, key)
            backend.get(key, tmp_path / "copy")
            assert (tmp_path / "copy").read_bytes() == source.read_bytes()
        assert backend.sizes("a folder") == objects

    def test_object_exists_from_its_writing_to_its_deletion(self, backend, tmp_path):
        backend.write("step/one/x", b"1")
        backend.write("step/one/x", b"123")
        backend.write("step/one-more/x", b"22")
        assert backend.read("step/one/x") == b"123"
        assert backend.sizes("step/one") == {"step/one/x": 3}  # no other name with this prefix
        for _ in range(2):
            backend.delete("step/one/x")
            assert backend.sizes("step/one") == {}
            with pytest.raises(FileNotFoundError):
                backend.read("step/one/x")
            with pytest.raises(FileNotFoundError):
                backend.get("step/one/x", tmp_path / "copy")
            assert not (tmp_path / "copy").exists()

    def test_large_files_are_streamed_in_little_memory(self, root: str, tmp_path: Path) -> None:
        # large enough for an upload in parts
        (tmp_path / "small").write_bytes(os.urandom(CHUNK + 1))
        large = large_file(tmp_path, 8 * CHUNK)
        words = [sys.executable, "-c", MEASURE, root, tmp_path / "small", large, tmp_path / "copy"]
        answer = subprocess.run(words, capture_output=True, text=True, check=True)
        grown = int(answer.stdout)
        assert grown < 2 * CHUNK // MIB, f"{grown} MiB more for a file of {8 * CHUNK // MIB} MiB"

    def test_large_file_is_read_back_unchanged(self, backend, tmp_path):
        large = large_file(tmp_path, 3 * RANGE - MIB)
        with large.open("ab") as stream:
            stream.write(b"end")
        backend.put(large, "x")
        for size in (None, large.stat().st_size):
            backend.get("x", tmp_path / "copy", size)
            assert filecmp.cmp(large, tmp_path / "copy", shallow=False)
        with pytest.raises(FileNotFoundError):
            backend.get("y", tmp_path / "copy", 3 * RANGE)

    def test_killed_upload_leaves_no_partial_object(self, backend, root, tmp_path):
        elsewhere = Path("/dev/shm")  # noqa: S108 - another disk, from which files cannot be linked
        source = (elsewhere if elsewhere.is_dir() else tmp_path) / f"{os.getpid()}-upload"
        old, new = b"old", bytes(range(256)) * (3 * CHUNK // 256)
        source.write_bytes(new)
        backend.write("object", old)
        try:
            for moment in range(4 if root.startswith("gs") else 8):
                process = subprocess.Popen(
                    [sys.executable, "-c", UPLOAD, root, str(source)], stdout=subprocess.PIPE
                )
                with process:
                    process.stdout.readline()
                    time.sleep(0.01 + 0.03 * moment)
                    process.send_signal(signal.SIGKILL)
                content = backend.read("object")
                assert content in (old, new)
                assert backend.sizes("") == {"object": len(content)}
                backend.write("object", old)
        finally:
            source.unlink()


class TestLocal(BackendConformance):
    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return str(tmp_path / "store")


class TestGoogleStorage(BackendConformance):
    @pytest.fixture
    def root(self, tmp_path: Path, bucket: str) -> str:
        return f"gs://{bucket}/{tmp_path.name}"


def test_object_replaced_during_a_download_is_refused(tmp_path, bucket, monkeypatch):
    root = f"gs://{bucket}/{tmp_path.name}"
    store, made = Store(root, tmp_path / "cache"), tmp_path / "made"
    from google.cloud.storage.blob import Blob  # prints announcements until the store silences it

    made.mkdir()
    large_file(made, 2 * RANGE)
    store.publish(made, f"{root}/step/one")
    other = tmp_path / "other"
    other.write_bytes(bytes(2 * RANGE))
    generations, download, first = [], Blob._prep_and_do_download, threading.Lock()

    def replaced(blob: Blob, *words: object, **options: object) -> None:
        if options.get("start") is not None:
            with first:
                if not generations:
                    store.put(other, f"{root}/step/one/large")
                generations.append(options["if_generation_match"])
        download(blob, *words, **options)

    monkeypatch.setattr(Blob, "_prep_and_do_download", replaced)
    with pytest.raises(OSError, match="the bucket answered"):
        store.local_copy(f"{root}/step/one")
    assert len(generations) == 2 and len(set(generations)) == 1 and generations[0]
    monkeypatch.undo()
    with pytest.raises(BadInput, match="damaged"):
        store.local_copy(f"{root}/step/one")
    assert not [f for f in (tmp_path / "cache").iterdir() if f.is_dir() and not f.suffix]


def test_missing_credentials_are_reported_in_one_line(tmp_path, monkeypatch):
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with pytest.raises(BadInput, match="no Google credentials") as raised:
        backend_for("gs://bucket/x")
    assert "\n" not in str(raised.value)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small-disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("SKIPPED, no full disk is tried: only root can make a small one")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_full_disk_leaves_no_partial_file(small_disk, tmp_path):
    backend = backend_for(str(small_disk / "store"))
    backend.write("object", b"old")
    large = large_file(tmp_path, MIB)
    for attempt in (lambda: backend.put(large, "object"), lambda: backend.write("new", b"x" * MIB)):
        with pytest.raises(OSError, match="No space left"):
            attempt()
    assert backend.sizes("") == {"object": 3}
    assert backend.read("object") == b"old"
    assert not [f for f in small_disk.rglob("*") if f.name.endswith(".partial")]


def test_full_disk_is_reported_in_one_line_and_the_step_can_be_repeated(
    small_disk, tmp_path, tracked
):
    from tasks.protocol.job import job_steps
    from tasks.protocol.settings import JobSettings

    store = small_disk / "store"
    settings = JobSettings(synthetic_patients=400, declared_units=400)
    spec = job_steps(settings)["private_corpus"]
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    words = [sys.executable, "-m", "tasks", spec.step, "--spec", str(tmp_path / "spec.json")]
    places = {"CONFIDE_STORE": str(store), "CONFIDE_HOME": str(tracked.home)}
    environment = {**os.environ, **places}

    def step() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, env=environment, cwd=CHECKOUT, capture_output=True, text=True, check=False
        )

    answer = step()
    last = answer.stderr.strip().splitlines()[-1]
    assert answer.returncode == 1
    assert "the disk is full" in last
    assert "Traceback" not in answer.stderr
    assert not list(store.rglob("result.json"))
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    assert step().returncode == 0
    assert list(store.rglob("result.json"))
