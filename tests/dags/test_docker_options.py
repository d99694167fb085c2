"""What the docker launcher makes of its variables; it needs no engine for that."""

from __future__ import annotations

import io
import tarfile

import pytest

from dags.launcher.docker import archive, gpus, mounts


def test_mounts_are_volumes_and_folders() -> None:
    volume, folder = mounts(" home:/var/lib/confide  /srv/notes:/data:ro ")
    assert (volume["Type"], volume["Source"], volume["Target"]) == (
        "volume",
        "home",
        "/var/lib/confide",
    )
    assert (folder["Type"], folder["Source"], folder["ReadOnly"]) == ("bind", "/srv/notes", True)
    assert mounts("") == []


@pytest.mark.parametrize("word", ["home", "home:", ":/data", "home:data", "home:/data:rw"])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="CONFIDE_DOCKER_MOUNTS"):
        mounts(word)


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
