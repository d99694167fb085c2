"""Copies of what lies in a bucket: made once, kept while somebody uses them, bounded, then gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dp_core.errors import BadInput
from tasks.runtime.deployment import Deployment
from tasks.storage.copies import UNUSED, Copies, bytes_from

CHECKOUT = Path(__file__).parents[2]
SIZE = 100  # bytes, as it is told


def there(cache: Path) -> set[str]:
    return {entry.name for entry in cache.iterdir() if entry.is_dir()}


def filled(words: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "text").write_text(words)

    return fill


def never(folder: Path) -> None:
    pytest.fail("it was there already")


def later(cache: Path) -> None:
    """Let everything here have been used last so long ago that it may go."""
    before = time.time() - UNUSED - 60
    for lock in cache.glob("*.lock"):
        os.utime(lock, (before, before))


def ended(copies: Copies) -> None:
    """Let go of what a process holds, as the kernel does at its end."""
    for descriptor in copies._used.values():
        os.close(descriptor)


def test_a_copy_is_made_once_and_used_again(tmp_path: Path) -> None:
    folder = Copies(tmp_path).copy("a", SIZE, filled("note"))
    assert (folder / "text").read_text() == "note"
    assert Copies(tmp_path).copy("a", SIZE, never) == folder


def test_a_copy_that_nobody_uses_goes(tmp_path: Path) -> None:
    process = Copies(tmp_path)
    process.copy("a", SIZE, filled("note"))
    ended(process)
    Copies(tmp_path).copy("b", SIZE, filled("other"))
    assert (tmp_path / "a").exists()  # a week has not passed
    later(tmp_path)
    (tmp_path / "c.partial").mkdir()  # of a download that was killed
    (tmp_path / "c.lock").touch()
    later(tmp_path)
    Copies(tmp_path).copy("b", SIZE, never)  # in use by a process that lives
    assert there(tmp_path) == {"b"}
    assert not list(tmp_path.glob("[!b.]*"))


def test_a_copy_stays_as_long_as_the_process_that_asked_for_it(tmp_path: Path) -> None:
    training = Copies(tmp_path)
    folder = training.copy("a", SIZE, filled("note"))
    later(tmp_path)
    Copies(tmp_path).copy("b", SIZE, filled("other"))
    assert (folder / "text").read_text() == "note"
    ended(training)
    Copies(tmp_path).copy("b", SIZE, never)
    assert not folder.exists()


def test_use_keeps_a_copy(tmp_path: Path) -> None:
    first, second = Copies(tmp_path), Copies(tmp_path)
    first.copy("a", SIZE, filled("note"))
    later(tmp_path)
    second.copy("a", SIZE, never)  # the first one holds it still
    ended(first)
    ended(second)
    Copies(tmp_path).copy("b", SIZE, filled("other"))
    assert (tmp_path / "a").exists()


def test_a_copy_that_could_not_be_made_is_not_there(tmp_path: Path) -> None:
    def breaks(folder: Path) -> None:
        (folder / "text").write_text("half")
        raise OSError("the bucket went away")

    with pytest.raises(OSError, match="went away"):
        Copies(tmp_path).copy("a", SIZE, breaks)
    folder = Copies(tmp_path).copy("a", SIZE, filled("note"))
    assert (folder / "text").read_text() == "note"


# --- bounded


def used(cache: Path, mark: str, seconds_ago: float) -> None:
    """Let a copy have been made, used so long ago, by a process that has ended."""
    process = Copies(cache)
    process.copy(mark, SIZE, filled(mark))
    ended(process)
    at = time.time() - seconds_ago
    os.utime(cache / f"{mark}.lock", (at, at))


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    for mark, seconds in (("a", 20), ("b", 40), ("c", 30)):
        used(tmp_path, mark, seconds)
    Copies(tmp_path, bound=4 * SIZE).copy("d", SIZE, filled("d"))
    assert there(tmp_path) == {"a", "b", "c", "d"}  # they just fit
    Copies(tmp_path, bound=4 * SIZE).copy("e", SIZE + 1, filled("e"))
    assert there(tmp_path) == {"a", "d", "e"}
    assert not (tmp_path / "b.lock").exists()
    Copies(tmp_path, bound=4 * SIZE).copy("a", SIZE, never)  # what is there takes no room


def test_what_is_held_stays_even_past_the_bound(tmp_path: Path) -> None:
    training = Copies(tmp_path, bound=SIZE)
    folder = training.copy("a", SIZE, filled("note"))
    with training.held("b", SIZE, filled("shard")) as shard:
        used(tmp_path, "c", 10)
        Copies(tmp_path, bound=SIZE).copy("d", SIZE, filled("d"))
        assert there(tmp_path) == {"a", "b", "d"}
        assert (shard / "text").read_text() == "shard"
    Copies(tmp_path, bound=SIZE).copy("e", SIZE, filled("e"))
    assert there(tmp_path) == {"a", "d", "e"}  # the context was left, the processes live
    assert (folder / "text").read_text() == "note"


def test_a_shard_after_the_other_takes_the_room_of_one(tmp_path: Path) -> None:
    copies = Copies(tmp_path, bound=2 * SIZE)
    for number in range(10):
        with copies.held(f"shard{number}", SIZE, filled("x")):
            assert len(there(tmp_path)) <= 2


def test_a_copy_that_is_being_made_has_its_room_and_is_not_taken_away(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        """While this one is fetched, another process fetches one, and finds no room."""
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
    assert there(tmp_path) == {"a", "b"}


def test_what_a_killed_download_left_is_counted_and_goes(tmp_path: Path) -> None:
    def breaks(folder: Path) -> None:
        (folder / "text").write_text("half")
        raise OSError("the bucket went away")

    with pytest.raises(OSError, match="went away"):
        Copies(tmp_path).copy("a", SIZE, breaks)
    assert there(tmp_path) == {"a.partial"}
    Copies(tmp_path, bound=SIZE).copy("b", SIZE, filled("b"))
    assert there(tmp_path) == {"b"}


def test_copies_of_an_earlier_version_are_counted(tmp_path: Path) -> None:
    used(tmp_path, "a", 10)
    (tmp_path / "a" / "text").write_bytes(bytes(SIZE))
    os.truncate(tmp_path / "a.lock", 0)
    Copies(tmp_path, bound=2 * SIZE - 1).copy("b", SIZE, filled("b"))
    assert there(tmp_path) == {"b"}


def test_by_itself_the_cache_leaves_half_of_the_free_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.storage import copies

    used(tmp_path, "a", 10)
    monkeypatch.setattr(copies.shutil, "disk_usage", lambda _: Disk())
    Disk.free = 3 * SIZE  # with what the cache has, 4: half of it are 2
    Copies(tmp_path).copy("b", SIZE, filled("b"))
    assert there(tmp_path) == {"a", "b"}
    Disk.free = 2 * SIZE
    Copies(tmp_path).copy("c", SIZE, filled("c"))
    assert there(tmp_path) == {"c"} | {"b"}


class Disk:
    free = 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [("", None), ("0", 0), ("123", 123), ("5k", 5 << 10), ("7M", 7 << 20), (" 2g", 2 << 30)],
)
def test_the_bound_is_read_from_the_deployment(words: str, expected: int | None) -> None:
    assert bytes_from(words) == expected
    told = {"CONFIDE_HOME": "/nonexist", "CONFIDE_CACHE_BYTES": words}
    assert Deployment.from_environment(told).cache_bytes == expected


def test_the_store_of_a_deployment_keeps_its_bound(tmp_path: Path, bucket: str) -> None:
    root = f"gs://{bucket}/{tmp_path.name}"
    told = {"CONFIDE_HOME": str(tmp_path), "CONFIDE_STORE": root, "CONFIDE_CACHE_BYTES": "200"}
    deployment = Deployment.from_environment(told)
    store, made = deployment.open_store(), tmp_path / "made"
    made.mkdir()
    for name in ("one", "two", "three"):
        (made / name).write_bytes(bytes(SIZE))
    store.publish(made, f"{root}/step/shards")
    for name in ("one", "two", "three"):
        with store.local_file(f"{root}/step/shards", name) as file:
            assert file.stat().st_size == SIZE
    assert len(there(deployment.cache)) == 2


@pytest.mark.parametrize("words", ["much", "-1", "1.5g", "10 %", "5gb"])
def test_another_bound_is_refused(words: str) -> None:
    with pytest.raises(BadInput, match=r"CONFIDE_CACHE_BYTES: .* is no number of bytes"):
        bytes_from(words)
