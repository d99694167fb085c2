"""What the docker launcher makes of its variables; it needs no engine for that."""

from __future__ import annotations

import io
import tarfile

import pytest

from dags.launcher.docker import archive, for_every_step, gpus, mounts

MOUNTS = "CONFIDE_DOCKER_MOUNTS"


def test_mounts_are_volumes_and_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MOUNTS, " home:/var/lib/confide  /srv/notes:/data:ro ")
    volume, folder = mounts(MOUNTS)
    assert (volume["Type"], volume["Source"], volume["Target"]) == (
        "volume",
        "home",
        "/var/lib/confide",
    )
    assert (folder["Type"], folder["Source"], folder["ReadOnly"]) == ("bind", "/srv/notes", True)
    monkeypatch.delenv(MOUNTS)
    assert mounts(MOUNTS) == []


@pytest.mark.parametrize("word", ["home", "home:", ":/data", "home:data", "home:/data:rw"])
def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv(MOUNTS, word)
    with pytest.raises(ValueError, match=MOUNTS):
        mounts(MOUNTS)


@pytest.mark.parametrize("target", ["/var/lib/confide-seeds", "/var/lib"])
def test_the_seeds_are_no_mount_of_every_step(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.setenv(MOUNTS, f"home:/var/lib/confide seeds:{target}")
    with pytest.raises(ValueError, match="CONFIDE_DOCKER_SEEDS"):
        for_every_step(MOUNTS)


def test_gpus() -> None:
    assert gpus("") is None
    assert [request["Count"] for request in gpus("all") or []] == [-1]
    assert [request["Count"] for request in gpus("2") or []] == [2]


def test_an_archive_holds_its_file() -> None:
    with tarfile.open(fileobj=io.BytesIO(archive("tmp/spec.json", b"{}"))) as tar:
        entry = tar.getmember("tmp/spec.json")
        content = tar.extractfile(entry)
        assert content is not None
        assert (content.read(), entry.mode) == (b"{}", 0o644)
