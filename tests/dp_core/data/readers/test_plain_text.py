"""Folders of plain text."""

import gzip
import lzma
from pathlib import Path

import pytest

from dp_core.data.corpus import Document
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.registry import read_corpus
from dp_core.data.readers.sources import LONGEST
from dp_core.errors import BadInput


def read(path: Path, share: float = 1.0) -> tuple[list[Document], Quarantine]:
    q = Quarantine(share)
    return list(read_corpus("text", path, q)), q


def test_files_are_documents_and_subfolders_patients(tmp_path: Path) -> None:
    (tmp_path / "p1" / "x").mkdir(parents=True)
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\rthree".encode())
    (tmp_path / "p1" / "b.TXT.gz").write_bytes(gzip.compress(b"b"))
    (tmp_path / "p1" / "x" / "c.txt.xz").write_bytes(lzma.compress(b"c"))
    (tmp_path / "p1" / "readme.md").write_text("not a note")
    docs, q = read(tmp_path)
    assert docs == [
        Document("a.txt", "", "one\ntwo\nthree"),
        Document("p1/b.TXT", "p1", "b"),
        Document("p1/x/c.txt", "p1", "c"),
    ]
    assert q.rejected == 0
    assert read(tmp_path / "a.txt")[0][0].document_id == "a.txt"


def test_wikitext_is_cut_at_its_titles(tmp_path: Path) -> None:
    text = " \n = One = \n \n words \n = = Section = = \n more \n \n = Two words = \n end \n"
    (tmp_path / "w.txt").write_text(text)
    docs, _ = read(tmp_path)
    assert [d.document_id for d in docs] == ["w.txt#1", "w.txt#2"]
    assert "Section" in docs[0].text
    assert docs[1].text.split() == ["=", "Two", "words", "=", "end"]


def test_a_note_with_a_line_like_a_title_stays_whole(tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_text("Seen today.\n = Plan = \nRest.\n")
    assert len(read(tmp_path)[0]) == 1


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("b.txt", b"secretword \xff", Reason.ENCODING),
        ("b.txt", "secretword".encode("utf-16"), Reason.ENCODING),
        ("b.txt", b" \n\t", Reason.EMPTY),
        ("b.txt", b"", Reason.EMPTY),
        ("b.txt", b"secretword " * (LONGEST // 10), Reason.TOO_LONG),
        ("b.txt.gz", gzip.compress(b"secretword" * 99)[:-9], Reason.UNREADABLE),
        ("b.txt.gz", b"secretword, not gzip", Reason.UNREADABLE),
        ("b.txt.xz", lzma.compress(b"secretword" * 99)[:-20], Reason.UNREADABLE),
        ("b.txt.xz", b"", Reason.UNREADABLE),
    ],
    ids=range(9),
)
def test_bad_files_are_counted(tmp_path: Path, name: str, content: bytes, reason: Reason) -> None:
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / name).write_bytes(content)
    docs, q = read(tmp_path)
    assert [d.text for d in docs] == ["good"]
    assert q.counts == {reason: 1}
    assert q.places[reason] == [name]
    with pytest.raises(BadInput) as caught:
        read(tmp_path, share=0.3)
    assert "secretword" not in str(caught.value)


@pytest.mark.parametrize("path", ["missing", "x" * 5000, "empty"], ids=range(3))
def test_a_path_without_text_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput):
        read(tmp_path / path)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a corpus format"):
        list(read_corpus("word", tmp_path))
