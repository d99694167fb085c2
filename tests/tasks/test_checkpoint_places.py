from pathlib import Path

import numpy as np
import pytest

from dp_core.errors import ConfideError
from dp_core.training.checkpoints import CheckpointPlace, Checkpoints, LocalFolder
from tasks.storage.store import Store, StoredCheckpoints


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointPlace:
    if request.param == "folder":
        return LocalFolder(tmp_path / "checkpoints")
    root = f"gs://{request.getfixturevalue('bucket')}/{tmp_path.name}"
    store = Store(root, tmp_path / "cache")
    return StoredCheckpoints(store, f"{root}/unfinished/run/checkpoints", tmp_path / "scratch")


def put(place: CheckpointPlace, name: str, content: bytes) -> None:
    place.write(name, lambda path: path.write_bytes(content) and None)


def content(place: CheckpointPlace, name: str) -> bytes:
    with place.read(name) as path:
        return path.read_bytes()


def test_checkpoint_file_is_read_listed_replaced_and_deleted(place):
    assert place.names() == []
    with pytest.raises(FileNotFoundError), place.read("a"):
        pass
    put(place, "b", b"2" * 100_000)
    put(place, "a", b"1")
    assert place.names() == ["a", "b"]
    assert content(place, "b") == b"2" * 100_000
    put(place, "a", b"another")
    assert content(place, "a") == b"another"
    place.delete("a")
    place.delete("a")
    assert place.names() == ["b"]


def test_failed_write_keeps_the_old_file(place, tmp_path):
    put(place, "a", b"old")

    def half(path: Path) -> None:
        path.write_bytes(b"ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        place.write("a", half)
    assert place.names() == ["a"]
    assert content(place, "a") == b"old"
    assert not (tmp_path / "scratch").exists()


def test_missing_bucket_is_reported_in_one_line(bucket, tmp_path):
    root = "gs://no-such-bucket/x"
    place = StoredCheckpoints(Store(root, tmp_path), f"{root}/c", tmp_path / "scratch")
    with pytest.raises(ConfideError, match=r"^gs://no-such-bucket/x/c: checkpoint not written: "):
        Checkpoints(place, "run").save(1, {"w": np.zeros(1, np.float32)})
