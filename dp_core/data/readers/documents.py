"""Documents from folders of plain text, and from JSON lines.

Of plain text, a file is a document, named by its path. A file directly in the folder names no
patient; for a file in a subfolder, the subfolder at the top is the patient
(`folder/patient/note.txt`).

Public text may also be in the layout of WikiText: a file that begins with a heading ` = Title = `
holds many articles, and is cut at such headings. Private text is never cut, since the author of a
text would decide how many privacy units it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dp_core.data.corpus import Document, normalised_id
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import (
    BOM,
    DAMAGED,
    read_items,
    text_lines,
    text_problem,
    unpacked_name,
)

LARGEST = 128_000_000  # bytes of a document: a novel has one million
_TITLE = re.compile(r" = [^=\s][^=\n]* = *\n?")


def read_plain_text(
    path: Path, quarantine: Quarantine, *, public: bool = False
) -> Iterator[Document]:
    """Yield each file of a file or folder as one document; see `read_corpus`.

    Memory holds one document at a time.

    Args:
        path: a file or folder.
        quarantine: counts the unusable documents.
        public: whether files in the layout of WikiText are cut into articles.
    """

    def documents_of(file: Path) -> Iterator[tuple[int, Document | Reason]]:
        name = unpacked_name(file, path)
        folder, inside, _ = name.partition("/")
        patient = folder if inside else ""
        for number, text in _pieces(file, cut=public):
            if isinstance(text, Reason):
                yield 0, text
            elif text.strip():
                yield 0, Document(f"{name}#{number}" if number else name, patient, text)
            else:
                yield 0, Reason.EMPTY

    return read_items(path, ".txt", quarantine, documents_of)


def _pieces(file: Path, *, cut: bool) -> Iterator[tuple[int, str | Reason]]:
    """Yield the number of titles so far, and the text of each piece or why it cannot be used.

    Args:
        file: a file of plain text.
        cut: whether a title begins a piece, if the file begins with a title.
    """
    number, lines, size = 0, list[str](), 0
    problem: Reason | None = None
    for line in _lines(file):
        is_title = cut and _TITLE.fullmatch(line)
        if is_title and (number or not (problem or any(map(str.strip, lines)))):
            if number:
                yield number, problem or "".join(lines)
            number, lines, size, problem = number + 1, [], 0, None
        if isinstance(line, Reason):
            problem = problem or line
        else:
            lines.append(line)
            size += len(line)
            if size > LARGEST:
                problem = problem or Reason.TOO_LONG
        if problem:
            lines = []
    yield number, problem or "".join(lines)


def _lines(file: Path) -> Iterator[str | Reason]:
    """Yield the lines with `\\n` at their ends, or the reason why a line cannot be read."""
    try:
        for _, line in text_lines(file, keep_ends=True):
            is_bad = isinstance(line, Reason)
            yield line if is_bad else line.replace("\r\n", "\n").replace("\r", "\n")
    except DAMAGED:
        yield Reason.UNREADABLE


FIELDS = ("text", "document_id", "patient_id")  # usual names; ids are strings or whole numbers
_ADMISSION = "admission_id"


def read_jsonl(
    path: Path, quarantine: Quarantine, fields: Sequence[str] = FIELDS
) -> Iterator[Document]:
    """Yield the documents of a file or folder; see `read_corpus`."""

    def documents_of(file: Path) -> Iterator[tuple[int, Document | Reason]]:
        for number, row in json_objects(file):
            document = row if isinstance(row, Reason) else _document(row, fields)
            yield number, document

    return read_items(path, ".jsonl", quarantine, documents_of)


def json_objects(file: Path) -> Iterator[tuple[int, dict[str, Any] | Reason]]:
    """Yield (number, object or the reason why there is none) of each line that is not blank."""
    for number, line in text_lines(file):
        if isinstance(line, Reason):
            yield number, line
            continue
        line = line.removeprefix(BOM)  # of a file that was joined from several
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # also a number of thousands of digits
            row = None
        yield number, row if isinstance(row, dict) else Reason.NOT_JSON


def _document(row: dict[str, Any], fields: Sequence[str]) -> Document | Reason:
    """Return an object's document, or the reason why there is none."""
    text, *ids = (row.get(name) for name in (*fields, _ADMISSION))
    try:
        document, patient, admission = map(normalised_id, ids)
    except ValueError:
        return Reason.WRONG_FIELD
    if not isinstance(text, str):
        return Reason.WRONG_FIELD
    if problem := text_problem(text, document, patient, admission):
        return problem
    return Document(document, patient, text.replace("\r\n", "\n"), admission)
