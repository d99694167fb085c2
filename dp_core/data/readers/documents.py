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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dp_core.data.corpus import Document, normalised_id
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import (
    BOM,
    DAMAGED,
    LONGEST,
    is_unicode,
    read_items,
    text_lines,
    unpacked_name,
)

LARGEST = 128_000_000  # bytes of a document: a novel has one million
_TITLE = re.compile(r" = [^=\s][^=\n]* = *\n?")

# file -> (suffix of the document id, the text or the reason why there is none)
_Division = Callable[[Path], Iterator[tuple[str, str | Reason]]]


def read_plain_text(path: Path, quarantine: Quarantine) -> Iterator[Document]:
    """Yield each file of a file or folder as one document; see `read_corpus`."""
    return _documents(path, quarantine, _whole)


def read_public_text(path: Path, quarantine: Quarantine) -> Iterator[Document]:
    """Yield the documents of public text, with files in the layout of WikiText cut into articles.

    Memory holds one article at a time.
    """
    return _documents(path, quarantine, _articles)


def _documents(path: Path, quarantine: Quarantine, divide: _Division) -> Iterator[Document]:
    def documents_of(file: Path) -> Iterator[tuple[int, Document | Reason]]:
        name = unpacked_name(file, path)
        folder, inside, _ = name.partition("/")
        patient = folder if inside else ""
        for part, text in divide(file):
            yield 0, text if isinstance(text, Reason) else Document(name + part, patient, text)

    return read_items(path, ".txt", quarantine, documents_of)


def _whole(file: Path) -> Iterator[tuple[str, str | Reason]]:
    piece = _Piece()
    for line in _lines(file):
        piece.add(line)
    yield "", piece.text()


def _articles(file: Path) -> Iterator[tuple[str, str | Reason]]:
    piece, number = _Piece(), 0
    for line in _lines(file):
        if (number or piece.is_blank) and isinstance(line, str) and _TITLE.fullmatch(line):
            if number:
                yield f"#{number}", piece.text()
            piece, number = _Piece(), number + 1
        piece.add(line)
    yield f"#{number}" if number else "", piece.text()


def _lines(file: Path) -> Iterator[str | Reason]:
    """Yield the lines with `\\n` at their ends, or the reason why a line cannot be read."""
    try:
        for _, line in text_lines(file, keep_ends=True):
            is_bad = isinstance(line, Reason)
            yield line if is_bad else line.replace("\r\n", "\n").replace("\r", "\n")
    except DAMAGED:
        yield Reason.UNREADABLE


class _Piece:
    """The lines of one document, until one of them cannot be used."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._size = 0
        self._problem: Reason | None = None
        self.is_blank = True

    def add(self, line: str | Reason) -> None:
        """Add a line, or the reason why it cannot be read."""
        if isinstance(line, Reason):
            self._problem = self._problem or line
        else:
            self._size += len(line)
            self._lines.append(line)
            if self._size > LARGEST:
                self._problem = self._problem or Reason.TOO_LONG
        if self._problem:
            self._lines, self.is_blank = [], False
        elif self.is_blank:
            self.is_blank = not self._lines[-1].strip()

    def text(self) -> str | Reason:
        """Return the whole text, or the reason why there is none."""
        return self._problem or ("".join(self._lines) if not self.is_blank else Reason.EMPTY)


@dataclass(frozen=True)
class JsonlFields:
    """The names of the fields. Only `text` is required; ids are strings or whole numbers."""

    text: str = "text"
    document_id: str = "document_id"
    patient_id: str = "patient_id"
    admission_id: str = "admission_id"


def read_jsonl(path: Path, quarantine: Quarantine, fields: JsonlFields) -> Iterator[Document]:
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


def _document(row: dict[str, Any], fields: JsonlFields) -> Document | Reason:
    """Return an object's document, or the reason why there is none."""
    text = row.get(fields.text)
    names = (fields.document_id, fields.patient_id, fields.admission_id)
    try:
        document, patient, admission = (normalised_id(row.get(name)) for name in names)
    except ValueError:
        return Reason.WRONG_FIELD
    if not isinstance(text, str):
        return Reason.WRONG_FIELD
    if not text.strip():
        return Reason.EMPTY
    if not is_unicode(text + document + patient + admission):
        return Reason.ENCODING
    if len(text) > LONGEST:
        return Reason.TOO_LONG
    return Document(document, patient, text.replace("\r\n", "\n"), admission)
