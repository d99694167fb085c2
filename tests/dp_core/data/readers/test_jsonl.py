"""JSON lines: what is taken, and what is quarantined why."""

import gzip
import json
import lzma
from pathlib import Path

import pytest

from dp_core.data.corpus import Document
from dp_core.data.readers.jsonl import JsonlFields
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.registry import read_corpus
from dp_core.data.readers.sources import LONGEST
from dp_core.errors import BadInput

ROW = {"text": "Line one.\r\nLine two.", "document_id": "d1", "patient_id": 7, "admission_id": "a"}
PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
GOOD = Document("d1", "7", "Line one.\nLine two.", "a")


def read(path: Path, share: float = 1.0) -> tuple[list[Document], Quarantine]:
    q = Quarantine(share)
    return list(read_corpus("jsonl", path, q)), q


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)]
)
def test_plain_and_compressed(tmp_path: Path, suffix: str, pack: object) -> None:
    file = tmp_path / f"notes.jsonl{suffix}"
    text = "\ufeff" + json.dumps(ROW) + "\r\n\n" + json.dumps({"text": "x"}) + "\n"
    file.write_bytes(PACKERS[suffix](text.encode()))
    docs, q = read(file)
    assert docs == [GOOD, Document("notes.jsonl:3", "", "x")]
    assert q.rejected == 0
    assert read(tmp_path)[0] == docs  # the folder, too


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "secretword"', Reason.NOT_JSON),
        (b'["secretword"]', Reason.NOT_JSON),
        (b"[" * 100_000, Reason.NOT_JSON),
        (b'{"text": 5}', Reason.WRONG_FIELD),
        (b'{"note": "secretword"}', Reason.WRONG_FIELD),
        (b'{"text": "secretword", "patient_id": true}', Reason.WRONG_FIELD),
        (b'{"text": "secretword", "patient_id": {"a": 1}}', Reason.WRONG_FIELD),
        (b'{"text": " \\n"}', Reason.EMPTY),
        (b'{"text": "secretword \xff"}', Reason.ENCODING),
        (b'{"text": "secretword \\ud800"}', Reason.ENCODING),
        (b'{"text": "' + b"secretword " * (LONGEST // 10) + b'"}', Reason.TOO_LONG),
    ],
    ids=range(11),
)
def test_bad_lines_are_counted_where_they_stand(
    tmp_path: Path, line: bytes, reason: Reason
) -> None:
    good = json.dumps(ROW).encode()
    (tmp_path / "n.jsonl").write_bytes(good + b"\n" + line + b"\n" + good + b"\n")
    docs, q = read(tmp_path / "n.jsonl")
    assert docs == [GOOD, GOOD]
    assert q.counts == {reason: 1}
    assert q.places[reason] == ["n.jsonl:2"]
    with pytest.raises(BadInput) as caught:
        read(tmp_path / "n.jsonl", share=0.2)
    assert "secretword" not in str(caught.value) + json.dumps(q.summary())


def test_a_null_id_is_no_id(tmp_path: Path) -> None:
    (tmp_path / "n.jsonl").write_text('{"text": "x", "patient_id": null, "document_id": "d"}')
    assert read(tmp_path)[0] == [Document("d", "", "x")]


def test_other_field_names(tmp_path: Path) -> None:
    (tmp_path / "n.jsonl").write_text('{"body": "x", "id": 3, "who": "p"}')
    fields = JsonlFields(text="body", document_id="id", patient_id="who")
    assert list(read_corpus("jsonl", tmp_path, fields=fields)) == [Document("3", "p", "x")]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_half_written_file_is_refused(tmp_path: Path, suffix: str, pack: object) -> None:
    whole = pack(
        "\n".join(json.dumps({"text": f"secretword {i * i}"}) for i in range(5000)).encode()
    )  # type: ignore[operator]
    file = tmp_path / f"n.jsonl{suffix}"
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadInput, match="half-written") as caught:
        read(file)
    assert "secretword" not in str(caught.value)
