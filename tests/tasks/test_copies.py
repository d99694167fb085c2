"""Copies of a bucket's folders: made once, kept while somebody uses them, and then gone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.storage.copies import UNUSED, Copies


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
    folder = Copies(tmp_path).copy("a", filled("note"))
    assert (folder / "text").read_text() == "note"
    assert Copies(tmp_path).copy("a", never) == folder


def test_a_copy_that_nobody_uses_goes(tmp_path: Path) -> None:
    process = Copies(tmp_path)
    process.copy("a", filled("note"))
    ended(process)
    Copies(tmp_path).copy("b", filled("other"))
    assert (tmp_path / "a").exists()  # a week has not passed
    later(tmp_path)
    (tmp_path / "c.partial").mkdir()  # of a download that was killed
    (tmp_path / "c.lock").touch()
    later(tmp_path)
    Copies(tmp_path).copy("b", never)  # in use by a process that lives
    assert sorted(f.name for f in tmp_path.iterdir()) == ["b", "b.lock"]


def test_a_copy_stays_as_long_as_the_process_that_asked_for_it(tmp_path: Path) -> None:
    training = Copies(tmp_path)
    folder = training.copy("a", filled("note"))
    later(tmp_path)
    Copies(tmp_path).copy("b", filled("other"))
    assert (folder / "text").read_text() == "note"
    ended(training)
    Copies(tmp_path).copy("b", never)
    assert not folder.exists()


def test_use_keeps_a_copy(tmp_path: Path) -> None:
    first, second = Copies(tmp_path), Copies(tmp_path)
    first.copy("a", filled("note"))
    later(tmp_path)
    second.copy("a", never)  # the first one holds it still
    ended(first)
    ended(second)
    Copies(tmp_path).copy("b", filled("other"))
    assert (tmp_path / "a").exists()


def test_a_copy_that_could_not_be_made_is_not_there(tmp_path: Path) -> None:
    def breaks(folder: Path) -> None:
        (folder / "text").write_text("half")
        raise OSError("the bucket went away")

    with pytest.raises(OSError, match="went away"):
        Copies(tmp_path).copy("a", breaks)
    folder = Copies(tmp_path).copy("a", filled("note"))
    assert (folder / "text").read_text() == "note"
