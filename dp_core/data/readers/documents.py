"""Documents from folders of plain text.

Of plain text, a file is a document, named by its path. A file directly in the folder names no
patient; for a file in a subfolder, the subfolder at the top is the patient
(`folder/patient/note.txt`).

Public text may also be in the layout of WikiText: a file that begins with a heading ` = Title = `
holds many articles, and is cut at such headings. Private text is never cut, since the author of a
text would decide how many privacy units it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dp_core.data.corpus import Document
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import (
    DAMAGED,
    read_items,
    text_lines,
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
