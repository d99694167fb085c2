import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dp_core.errors import BadInput
from tasks.runtime.deployment import Deployment
from tasks.storage import copies
from tasks.storage.copies import UNUSED, Copies, bytes_from

CHECKOUT = Path(__file__).parents[2]
SIZE = 100  # bytes, as stated to the cache


def cached(cache: Path) -> set[str]:
    return {entry.name for entry in cache.iterdir() if entry.is_dir()}


def filled(words: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "text").write_text(words)

    return fill


def must_not_copy(folder: Path) -> None:
    pytest.fail("it was there already")


def age_all(cache: Path) -> None:
    before = time.time() - UNUSED - 60
    for lock in cache.glob("*.lock"):
        os.utime(lock, (before, before))


def end_process(copies: Copies) -> None:
    """Close the locks of a process, as the kernel does at its end."""
    for descriptor in copies._used.values():
        os.close(descriptor)


def test_unused_copy_is_deleted_after_a_week(tmp_path):
    process = Copies(tmp_path)
    process.copy("a", SIZE, filled("note"))
    used = Copies(tmp_path)
    used.copy("b", SIZE, filled("other"))
    assert cached(tmp_path) == {"a", "b"}  # a week has not passed
    (tmp_path / "c.partial").mkdir()  # of a download that was killed
    (tmp_path / "c.lock").touch()
    age_all(tmp_path)
    Copies(tmp_path).copy("a", SIZE, must_not_copy)  # a use makes the copy recent
    Copies(tmp_path).copy("d", SIZE, filled("other"))
    assert cached(tmp_path) == {"a", "b", "d"}  # a running process uses b
    end_process(process)
    end_process(used)
    age_all(tmp_path)
    Copies(tmp_path).copy("e", SIZE, filled("other"))
    assert cached(tmp_path) == {"a", "d", "e"}  # this process has not ended
    assert not list(tmp_path.glob("[bc]*"))


def test_half_of_a_failed_copy_is_not_used_and_is_deleted(tmp_path):
    def breaks(folder: Path) -> None:
        (folder / "text").write_text("half")
        raise OSError("the bucket went away")

    for mark in ("a", "b"):
        with pytest.raises(OSError, match="went away"):
            Copies(tmp_path).copy(mark, SIZE, breaks)
    assert cached(tmp_path) == {"a.partial", "b.partial"}
    folder = Copies(tmp_path, bound=SIZE).copy("a", SIZE, filled("note"))
    assert (folder / "text").read_text() == "note"
    assert cached(tmp_path) == {"a"}


def test_copy_is_kept_while_its_process_runs(tmp_path):
    training = Copies(tmp_path)
    folder = training.copy("a", SIZE, filled("note"))
    age_all(tmp_path)
    Copies(tmp_path).copy("b", SIZE, filled("other"))
    assert (folder / "text").read_text() == "note"
    end_process(training)
    Copies(tmp_path).copy("c", SIZE, filled("other"))
    assert not folder.exists()


def used(cache: Path, mark: str, seconds_ago: float) -> None:
    process = Copies(cache)
    process.copy(mark, SIZE, filled(mark))
    end_process(process)
    last_used = time.time() - seconds_ago
    os.utime(cache / f"{mark}.lock", (last_used, last_used))


def test_least_recently_used_copy_is_deleted_first(tmp_path):
    for mark, seconds in (("a", 20), ("b", 40), ("c", 30)):
        used(tmp_path, mark, seconds)
    Copies(tmp_path, bound=4 * SIZE).copy("d", SIZE, filled("d"))
    assert cached(tmp_path) == {"a", "b", "c", "d"}  # the copies just fit
    Copies(tmp_path, bound=4 * SIZE).copy("e", SIZE + 1, filled("e"))
    assert cached(tmp_path) == {"a", "d", "e"}
    assert not (tmp_path / "b.lock").exists()
    # an existing copy needs no further space
    Copies(tmp_path, bound=4 * SIZE).copy("a", SIZE, must_not_copy)


def test_copy_in_use_is_kept_above_the_bound(tmp_path):
    training = Copies(tmp_path, bound=SIZE)
    folder = training.copy("a", SIZE, filled("note"))
    with training.held("b", SIZE, filled("shard")) as shard:
        used(tmp_path, "c", 10)
        Copies(tmp_path, bound=SIZE).copy("d", SIZE, filled("d"))
        assert cached(tmp_path) == {"a", "b", "d"}
        assert (shard / "text").read_text() == "shard"
    Copies(tmp_path, bound=SIZE).copy("e", SIZE, filled("e"))
    assert cached(tmp_path) == {"a", "d", "e"}  # outside the context, with processes that still run
    assert (folder / "text").read_text() == "note"


def test_shards_read_in_turn_stay_within_the_bound(tmp_path):
    copies = Copies(tmp_path, bound=2 * SIZE)
    for number in range(10):
        with copies.held(f"shard{number}", SIZE, filled("x")):
            assert len(cached(tmp_path)) <= 2


def test_unfinished_copy_counts_and_is_not_deleted(tmp_path):
    def fill(folder: Path) -> None:
        program = (
            f"import sys; sys.path.insert(0, {str(CHECKOUT)!r})\n"
            "from pathlib import Path; from tasks.storage.copies import Copies\n"
            "def fill(folder): (folder / 'text').write_text('other')\n"
            f"Copies(Path({str(tmp_path)!r}), bound={2 * SIZE}).copy('b', {SIZE}, fill)"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
        (folder / "text").write_text("note")

    used(tmp_path, "old", 10)
    folder = Copies(tmp_path, bound=2 * SIZE).copy("a", SIZE, fill)
    assert (folder / "text").read_text() == "note"
    assert cached(tmp_path) == {"a", "b"}


def test_default_bound_is_half_of_the_free_disk(tmp_path, monkeypatch):
    used(tmp_path, "a", 10)
    disk = SimpleNamespace(free=3 * SIZE)
    monkeypatch.setattr(copies.shutil, "disk_usage", lambda _: disk)
    # with the cache's contents 4, of which half are 2
    Copies(tmp_path).copy("b", SIZE, filled("b"))
    assert cached(tmp_path) == {"a", "b"}
    disk.free = 2 * SIZE
    Copies(tmp_path).copy("c", SIZE, filled("c"))
    assert cached(tmp_path) == {"c"} | {"b"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [("", None), ("0", 0), ("123", 123), ("5k", 5 << 10), ("7M", 7 << 20), (" 2g", 2 << 30)],
)
def test_cache_bound_is_read_from_the_environment(words, expected):
    assert bytes_from(words) == expected
    environment = {"CONFIDE_HOME": "/nonexist", "CONFIDE_CACHE_BYTES": words}
    assert Deployment.from_environment(environment).cache_bytes == expected


def test_store_of_a_deployment_keeps_the_cache_bound(tmp_path, bucket):
    root = f"gs://{bucket}/{tmp_path.name}"
    environment = {
        "CONFIDE_HOME": str(tmp_path),
        "CONFIDE_STORE": root,
        "CONFIDE_CACHE_BYTES": "200",
    }
    deployment = Deployment.from_environment(environment)
    store, made = deployment.open_store(), tmp_path / "made"
    made.mkdir()
    (made / "file").write_bytes(bytes(SIZE))
    for name in ("one", "two", "three"):
        store.publish(made, f"{root}/step/{name}")
        copy = store.local_copy(f"{root}/step/{name}")
        assert (copy / "file").stat().st_size == SIZE
        end_process(store._copies)
        store._copies._used.clear()
    assert len(cached(deployment.cache)) == 2


@pytest.mark.parametrize("words", ["much", "-1", "1.5g", "10 %", "5gb"])
def test_invalid_cache_bound_is_refused(words):
    with pytest.raises(BadInput, match=r"CONFIDE_CACHE_BYTES: .* is no number of bytes"):
        bytes_from(words)
