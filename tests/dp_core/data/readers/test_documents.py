import gzip
import lzma

from reader_contract import SECRET, BadItem, ReaderContract, read_corpus, read_format

from dp_core.data.corpus import Document
from dp_core.data.readers.quarantine import Reason
from dp_core.data.readers.sources import LONGEST


class TestPlainText(ReaderContract):
    FORMAT, SUFFIX, GOOD = "text", ".txt", "good"
    MANY = f" = Title = \n{SECRET} one\ntwo\n" * 30
    BAD_ITEMS = tuple(
        BadItem({"a.txt": b"good", name: content}, reason, name, 1)
        for name, content, reason in (
            ("b.txt", b"zyxsecret \xff", Reason.ENCODING),
            ("b.txt", "zyxsecret".encode("utf-16"), Reason.ENCODING),
            ("b.txt", b" \n\t", Reason.EMPTY),
            ("b.txt", b"", Reason.EMPTY),
            ("b.txt", b"zyxsecret " * (LONGEST // 9), Reason.TOO_LONG),
            ("b.txt.gz", gzip.compress(b"zyxsecret" * 99)[:-9], Reason.UNREADABLE),
            ("b.txt.gz", b"zyxsecret, not gzip", Reason.UNREADABLE),
            ("b.txt.xz", lzma.compress(b"zyxsecret" * 99)[:-20], Reason.UNREADABLE),
            ("b.txt.xz", b"", Reason.UNREADABLE),
        )
    )


def test_files_are_documents_and_subfolders_patients(tmp_path):
    (tmp_path / "p1" / "x").mkdir(parents=True)
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\rthree".encode())
    (tmp_path / "p1" / "b.TXT.gz").write_bytes(gzip.compress(b"b"))
    (tmp_path / "p1" / "x" / "c.txt.xz").write_bytes(lzma.compress(b"c"))
    (tmp_path / "p1" / "readme.md").write_text("not a note")
    docs, q = read_format("text", tmp_path)
    assert docs == [
        Document("a.txt", "", "one\ntwo\nthree"),
        Document("p1/b.TXT", "p1", "b"),
        Document("p1/x/c.txt", "p1", "c"),
    ]
    assert q.rejected == 0
    assert read_format("text", tmp_path / "a.txt")[0][0].document_id == "a.txt"


def test_private_text_is_not_cut_at_titles(tmp_path):
    """The text of a note must not affect its number of documents."""
    (tmp_path / "n.txt").write_text("".join(f" = Day {day} = \nseen\n" for day in range(400)))
    (document,) = read_corpus("text", tmp_path)
    assert (document.document_id, document.text.count("seen")) == ("n.txt", 400)


def test_public_wikitext_is_cut_at_its_titles(tmp_path):
    text = " \n = One = \n \n words \n = = Section = = \n more \n \n = Two words = \n end \n"
    (tmp_path / "w.txt").write_text(text)
    one, two = read_format("text", tmp_path)[0]
    assert (one.document_id, two.document_id) == ("w.txt#1", "w.txt#2")
    assert "Section" in one.text and two.text.split() == ["=", "Two", "words", "=", "end"]
    (tmp_path / "w.txt").write_text(f"Seen today.\n{text}")  # the file begins with another line
    assert [d.document_id for d in read_format("text", tmp_path)[0]] == ["w.txt"]
