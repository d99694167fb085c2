"""The one door: what a source may hold, and that nothing in it is passed over, hangs or swells."""

from __future__ import annotations

import errno
import gzip
import io
import lzma
import os
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_core.data.readers import sources as packed
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.registry import read_corpus, read_sentences
from dp_core.data.readers.sources import entries, open_regular
from dp_core.errors import BadInput

NAME = "doe_john_1961"
FORMATS = {
    "text": "good.txt",
    "jsonl": "good.jsonl",
    "noteevents": "good.csv",
    "columns": "good.tsv",
    "pubtator": "good.txt",
    "i2b2": "good.txt",
}
GOOD = {
    "text": "good",
    "jsonl": '{"text": "good"}',
    "noteevents": "SUBJECT_ID,TEXT\n1,good\n",
    "columns": "good O\n",
    "pubtator": "1|t|good\n1|a|good\n",
    "i2b2": "good\n",
}


def folder_of(format: str, top: Path) -> Path:
    """Return a folder with one good file (of i2b2, with its concepts)."""
    folder = top / "source"
    folder.mkdir()
    (folder / FORMATS[format]).write_text(GOOD[format])
    if format == "i2b2":
        (folder / "good.con").write_text("")
    return folder


def read(format: str, path: Path, quarantine: Quarantine | None = None) -> int:
    reader = read_corpus if format in ("text", "jsonl", "noteevents") else read_sentences
    return len(list(reader(format, path, quarantine)))


def pipe(place: Path) -> None:
    os.mkfifo(place)


def plug(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(place.parent)  # a socket's path is short
        try:
            made.bind(place.name)
        finally:
            os.chdir(here)


def outside(place: Path) -> Path:
    found = place.parents[1] / "outside"
    found.mkdir(exist_ok=True)
    (found / "note.txt").write_text("good")
    return found


STRANGE: dict[str, Callable[[Path], None]] = {
    "pipe": pipe,
    "socket": plug,
    "endless": lambda p: p.symlink_to("/dev/zero"),
    "dangling": lambda p: p.symlink_to("nowhere"),
    "linked file": lambda p: p.symlink_to(outside(p) / "note.txt"),
    "linked folder": lambda p: p.symlink_to(outside(p)),
    "linked within": lambda p: p.symlink_to(next(f for f in p.parent.iterdir() if f.is_file())),
    "loop": lambda p: p.symlink_to(p.name),
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_neither_file_nor_folder_refuses_the_source(
    tmp_path: Path, format: str, kind: str
) -> None:
    source = folder_of(format, tmp_path)
    STRANGE[kind](source / f"{NAME}{Path(FORMATS[format]).suffix}")
    with pytest.raises(BadInput, match="a link, a pipe or a device") as told:
        read(format, source)
    assert NAME not in str(told.value)
    listed = str(told.value).split("`")[-2]  # the command that names it, for the operator
    found = subprocess.run(["sh", "-c", listed], capture_output=True, text=True, check=True)
    assert NAME in found.stdout
    assert found.stdout.count("\n") == 1


@pytest.mark.parametrize("kind", ["pipe", "socket", "endless", "dangling", "loop"])
def test_a_source_that_is_neither_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a").mkdir()
    STRANGE[kind](tmp_path / "a" / "source.txt")
    with pytest.raises(BadInput, match=r"neither a file nor a folder|no such file or folder"):
        read("text", tmp_path / "a" / "source.txt")


def test_a_source_may_itself_be_a_link(tmp_path: Path) -> None:
    source = folder_of("text", tmp_path)
    (tmp_path / "named").symlink_to(source)
    (tmp_path / "named.txt").symlink_to(source / "good.txt")
    assert read("text", tmp_path / "named") == read("text", tmp_path / "named.txt") == 1


def test_opening_never_waits(tmp_path: Path) -> None:
    """Also of what became a pipe after it was listed."""
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"not a regular file|directory"):
            open_regular(place)


@pytest.mark.parametrize("format", FORMATS)
def test_a_folder_that_may_not_be_read_refuses_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    source = folder_of(format, tmp_path)
    (source / NAME).mkdir()
    scandir = os.scandir

    def denied(place: object) -> object:
        if str(place).endswith(NAME):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        return scandir(place)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(BadInput, match="a folder in it may not be read") as told:
        read(format, source)
    assert NAME not in str(told.value)


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_may_not_be_read_refuses_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    source = folder_of(format, tmp_path)
    bad = source / f"{NAME}{Path(FORMATS[format]).suffix}"
    bad.write_text(GOOD[format])
    if format == "i2b2":
        bad.with_suffix(".con").write_text("")
    opened = os.open

    def denied(place: object, *how: int) -> int:
        if place == bad:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        return opened(place, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", denied)
    quarantine = Quarantine()
    with pytest.raises(BadInput, match="unreadable") as told:
        read(format, source, quarantine)
    assert NAME not in str(told.value)
    assert quarantine.places[Reason.UNREADABLE] == [bad.name]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_closed_folders_and_files_are_refused(tmp_path: Path) -> None:
    source = folder_of("text", tmp_path)
    for place in (source / "good.txt", source):
        place.chmod(0)
        with pytest.raises(BadInput, match="read"):
            read("text", source)
        place.chmod(0o700)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_folder", [True, False])
def test_a_name_that_is_not_utf_8_refuses_the_source(
    tmp_path: Path, format: str, is_folder: bool
) -> None:
    source = folder_of(format, tmp_path)
    name = os.fsencode(source) + b"/caf\xe9"
    try:
        if is_folder:
            os.mkdir(name)  # noqa: PTH102 - bytes
        else:
            os.close(os.open(name + b".md", os.O_CREAT | os.O_WRONLY))
    except OSError:
        pytest.skip("this file system holds UTF-8 names alone")
    with pytest.raises(BadInput, match="a name in it is not UTF-8") as told:
        read(format, source)
    assert "caf" not in str(told.value)
    str(told.value).encode()


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000, "a\0b"], ids=range(3))
@pytest.mark.parametrize("format", FORMATS)
def test_a_name_that_no_file_system_holds_is_refused(
    tmp_path: Path, format: str, name: str
) -> None:
    with pytest.raises(BadInput, match="no such file or folder"):
        read(format, tmp_path / name)


def test_files_of_another_kind_are_listed(tmp_path: Path) -> None:
    source = folder_of("i2b2", tmp_path)
    (source / "deep").mkdir()
    (source / "deep" / "note.text").write_text("a patient's, misnamed")
    quarantine = Quarantine()
    assert read("i2b2", source, quarantine) == 1
    assert quarantine.summary()["places_passed_over"] == ["deep/note.text"]
    assert (quarantine.rejected, quarantine.passed_over) == (0, 1)
    assert [f.name for f in entries(source)] == ["note.text", "good.con", "good.txt"]


BOMBS = """
import resource, sys
from pathlib import Path
from dp_core.data.readers.registry import read_corpus
from dp_core.errors import (BadInput)
from dp_core.data.readers.registry import (read_sentences)
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for path in map(Path, sys.argv[1:]):
    format = path.name.partition(".")[0]
    reader = read_corpus if format in ("text", "jsonl", "noteevents") else read_sentences
    try:
        for found in reader(format, path.parent if format == "i2b2" else path):
            pass
        print(format, "read")
    except BadInput as error:
        print(format, error.what)
"""


@pytest.mark.parametrize("line", ["", "good O", " = A = "])
def test_a_small_file_cannot_become_a_huge_one(tmp_path: Path, line: str) -> None:
    """Three gigabytes in as many megabytes, for every reader, in one of memory."""
    unit = line.ljust(1023).encode() + b"\n" if line else b"\0"
    block = unit * ((16 << 20) // len(unit))
    member, places = gzip.compress(block, mtime=0), []
    for format, name in FORMATS.items():
        place = tmp_path / format / f"{format}{Path(name).suffix}.gz"
        place.parent.mkdir()
        with place.open("wb") as bomb:
            if format == "noteevents":
                bomb.write(gzip.compress(b"SUBJECT_ID,TEXT\n", mtime=0))
            for _ in range(190):
                bomb.write(member)
        if format == "i2b2":
            (place.parent / "i2b2.con").write_text("")
        places.append(str(place))
    told = subprocess.run(
        [sys.executable, "-c", BOMBS, *places], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr[-400:]
    said = dict(line.split(" ", 1) for line in told.stdout.splitlines())
    assert said.keys() == FORMATS.keys()
    for format, what in said.items():
        broken = format == "noteevents" and "broken quoting" in what  # before it is large
        assert broken or what == "a packed file unpacks to far more than text does", format


def test_an_xz_file_cannot_ask_for_memory(tmp_path: Path) -> None:
    """Its header says how much of what was unpacked must be remembered: here 4 GB for a word."""
    whole = bytearray(lzma.compress(b"good"))
    size = (whole[12] + 1) * 4  # of the block's header, section 3.1 of the format
    whole[16] = 40
    whole[12 + size - 4 : 12 + size] = zlib.crc32(whole[12 : 12 + size - 4]).to_bytes(4, "little")
    (tmp_path / "a.txt.xz").write_bytes(whole)
    quarantine = Quarantine()
    with pytest.raises(BadInput, match="unreadable"):
        read("text", tmp_path, quarantine)


def test_large_files_that_are_text_are_read(tmp_path: Path) -> None:
    words = " ".join(f"word {i * i}" for i in range(3_000))
    rows = "".join(f'{{"text": "note {i} says {words}"}}\n' for i in range(20))
    count = packed.ALWAYS_ALLOWED // len(rows) + 5
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()) * count)
    assert read("jsonl", tmp_path / "a.jsonl.gz") == 20 * count


@settings(max_examples=30)
@given(
    st.lists(st.binary(max_size=200_000), min_size=1, max_size=3),
    st.sampled_from([".gz", ".xz"]),
    st.integers(0, 8),
    st.integers(1_000, 100_000),
)
def test_every_member_is_unpacked_to_the_byte(
    members: list[bytes], kind: str, padding: int, step: int
) -> None:
    pack = gzip.compress if kind == ".gz" else lzma.compress
    content = b"".join(pack(m) + bytes(4 * padding) for m in members)
    stream, found = packed.unpacked(io.BytesIO(content), f"a{kind}"), b""
    while piece := stream.read(step):
        found += piece
    assert found == b"".join(members)
    cut = packed.unpacked(io.BytesIO(pack(members[0])[:-1]), f"a{kind}")
    with pytest.raises(packed.DAMAGED):
        cut.read()
