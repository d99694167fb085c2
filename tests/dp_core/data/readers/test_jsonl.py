"""Tests of JSON lines: accepted items, and reasons for quarantine."""

import json
from pathlib import Path

from reader_contract import SECRET, BadItem, ReaderContract, read

from dp_core.data.corpus import Document
from dp_core.data.readers.documents import JsonlFields
from dp_core.data.readers.quarantine import Reason
from dp_core.data.readers.sources import LONGEST

ROW = {"text": "Line one.\r\nLine two.", "document_id": "d1", "patient_id": 7, "admission_id": "a"}
GOOD = json.dumps(ROW).encode()


class TestJsonl(ReaderContract):
    FORMAT, SUFFIX, GOOD = "jsonl", ".jsonl", '{"text": "good"}'
    MANY = "".join(
        json.dumps({"text": f"{SECRET} note {i}\nline", "patient_id": i % 5}) + "\n"
        for i in range(30)
    )
    BAD_ITEMS = tuple(
        BadItem({"n.jsonl": GOOD + b"\n" + line + b"\n" + GOOD + b"\n"}, reason, "n.jsonl:2", 2)
        for line, reason in (
            (b'{"text": "zyxsecret"', Reason.NOT_JSON),
            (b'["zyxsecret"]', Reason.NOT_JSON),
            (b"[" * 100_000, Reason.NOT_JSON),
            (b'{"text": 5}', Reason.WRONG_FIELD),
            (b'{"note": "zyxsecret"}', Reason.WRONG_FIELD),
            (b'{"text": "zyxsecret", "patient_id": true}', Reason.WRONG_FIELD),
            (b'{"text": "zyxsecret", "patient_id": {"a": 1}}', Reason.WRONG_FIELD),
            (b'{"text": " \\n"}', Reason.EMPTY),
            (b'{"text": "zyxsecret \xff"}', Reason.ENCODING),
            (b'{"text": "zyxsecret \\ud800"}', Reason.ENCODING),
            (b'{"text": "' + b"zyxsecret " * (LONGEST // 10) + b'"}', Reason.TOO_LONG),
        )
    )


def test_ids_line_ends_and_blank_lines(tmp_path: Path) -> None:
    text = "\ufeff" + json.dumps(ROW) + "\r\n\n" + json.dumps({"text": "x"}) + "\n"
    (tmp_path / "notes.jsonl").write_bytes(text.encode())
    documents, _ = read("jsonl", tmp_path)
    assert documents == [
        Document("d1", "7", "Line one.\nLine two.", "a"),
        Document("", "", "x"),
    ]


def test_a_null_id_is_no_id(tmp_path: Path) -> None:
    (tmp_path / "n.jsonl").write_text('{"text": "x", "patient_id": null, "document_id": "d"}')
    assert read("jsonl", tmp_path)[0] == [Document("d", "", "x")]


def test_other_field_names(tmp_path: Path) -> None:
    (tmp_path / "n.jsonl").write_text('{"body": "x", "id": 3, "who": "p"}')
    fields = JsonlFields(text="body", document_id="id", patient_id="who")
    assert read("jsonl", tmp_path, fields=fields)[0] == [Document("3", "p", "x")]
