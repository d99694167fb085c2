import gzip
import io
import itertools
import lzma
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_contract import STRANGE, read_corpus, read_format, read_sentences

from dp_core.data.readers import sources as packed
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import open_regular
from dp_core.errors import BadInput

FORMATS = {
    "text": ".txt", "jsonl": ".jsonl", "noteevents": ".csv", "csv": ".csv", "columns": ".tsv",
    "pubtator": ".txt", "i2b2": ".txt",
}  # fmt: skip


def read(format: str, path: Path) -> int:
    return len(read_format(format, path)[0])


@pytest.mark.parametrize("read_any", [read_corpus, read_sentences])
def test_an_unknown_format_is_refused(tmp_path, read_any):
    with pytest.raises(BadInput, match="is no format of these texts"):
        list(read_any("word", tmp_path))


@pytest.mark.parametrize("kind", ["pipe", "socket", "endless", "dangling", "loop"])
def test_a_source_that_is_neither_file_nor_folder_is_refused(tmp_path, kind):
    (tmp_path / "a").mkdir()
    STRANGE[kind](tmp_path / "a" / "source.txt")
    with pytest.raises(BadInput, match=r"neither a file nor a folder|no such file or folder"):
        read("text", tmp_path / "a" / "source.txt")


def test_a_source_may_itself_be_a_link(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "good.txt").write_text("good")
    (tmp_path / "named").symlink_to(source)
    (tmp_path / "named.txt").symlink_to(source / "good.txt")
    assert read("text", tmp_path / "named") == read("text", tmp_path / "named.txt") == 1


def test_opening_never_waits(tmp_path):
    """This includes a file that became a pipe after it was listed."""
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"not a regular file|directory"):
            open_regular(place)


BOMBS = """
import resource, sys
from pathlib import Path
from dp_core.data.readers.quarantine import Quarantine
from dp_core.data.readers.registry import corpus_readers, read_source, sentence_readers
from dp_core.errors import BadInput
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for path in map(Path, sys.argv[1:]):
    format = path.name.partition(".")[0]
    readers = corpus_readers() | sentence_readers()
    place = path.parent if format == "i2b2" else path
    try:
        for found in read_source(readers, format, place, Quarantine()):
            pass
        print(format, "read")
    except BadInput as error:
        print(format, error.what)
"""


def test_a_small_file_cannot_become_a_huge_one(tmp_path):
    """Three megabytes unpack to three gigabytes; each reader has one gigabyte of memory."""
    lines, places = ("", "good O", " = A = "), []
    for line, (format, suffix) in itertools.product(lines, FORMATS.items()):
        unit = line.ljust(1023).encode() + b"\n" if line else b"\0"
        member = gzip.compress(unit * ((16 << 20) // len(unit)), mtime=0)
        place = tmp_path / f"{lines.index(line)} {format}" / f"{format}{suffix}.gz"
        place.parent.mkdir()
        with place.open("wb") as bomb:
            if suffix == ".csv":
                bomb.write(gzip.compress(b"SUBJECT_ID,TEXT\n", mtime=0))
            for _ in range(190):
                bomb.write(member)
        if format == "i2b2":
            (place.parent / "i2b2.con").write_text("")
        places.append(str(place))
    process = subprocess.run(
        [sys.executable, "-c", BOMBS, *places], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-400:]
    answers = [line.split(" ", 1) for line in process.stdout.splitlines()]
    assert [format for format, _ in answers] == list(FORMATS) * len(lines)
    for format, what in answers:
        broken = (
            format in ("noteevents", "csv") and "broken quoting" in what
        )  # refused before it is large
        assert broken or what == "a packed file unpacks to far more than text does", format


def test_an_xz_file_that_requires_much_memory_is_refused(tmp_path):
    """The header states the size of the dictionary: here 4 GB for a single word."""
    whole = bytearray(lzma.compress(b"good"))
    size = (whole[12] + 1) * 4  # size of the block's header, section 3.1 of the format
    whole[16] = 40
    whole[12 + size - 4 : 12 + size] = zlib.crc32(whole[12 : 12 + size - 4]).to_bytes(4, "little")
    (tmp_path / "a.txt.xz").write_bytes(whole)
    with pytest.raises(BadInput, match="unreadable"):
        read("text", tmp_path)


def test_large_files_that_are_text_are_read(tmp_path):
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
def test_every_member_is_unpacked_to_the_byte(members, kind, padding, step):
    pack = gzip.compress if kind == ".gz" else lzma.compress
    content = b"".join(pack(m) + bytes(4 * padding) for m in members)
    stream, unpacked = packed.unpacked(io.BytesIO(content), f"a{kind}"), b""
    while piece := stream.read(step):
        unpacked += piece
    assert unpacked == b"".join(members)
    cut = packed.unpacked(io.BytesIO(pack(members[0])[:-1]), f"a{kind}")
    with pytest.raises(packed.DAMAGED):
        cut.read()


# --- quarantine


def test_counts_and_first_places():
    q = Quarantine()
    for i in range(100):
        q.reject(Reason.EMPTY, f"f:{i}")
    q.taken += 1
    q.left_out += 1
    summary = q.summary()
    assert summary["taken"] == summary["left_out"] == 1
    assert summary["rejected"] == {"no text": 100}
    assert q.locations[Reason.EMPTY][0] == "f:0"
    assert len(q.locations[Reason.EMPTY]) == 20


@pytest.mark.cases
def test_sources_without_items_or_above_the_share_are_refused(good, bad, reason):
    q = Quarantine(largest_share=0.1)
    q.taken, q.left_out = good, 5
    for i in range(bad):
        q.reject(Reason.ENCODING, f"f:{i}")
    if not reason:
        return q.finish("f")
    with pytest.raises(BadInput, match=reason) as error:
        q.finish("source")
    assert "f:0" not in str(error.value)  # a file may be named after a patient
