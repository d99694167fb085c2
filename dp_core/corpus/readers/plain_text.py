"""Folders of plain text: a file is a document.

A file directly in the folder names no patient; in a subfolder, the subfolder at the top is the
patient (`folder/patient/note.txt`). A file in WikiText's layout (it begins with a heading
` = Title = `) holds many documents, and is cut at such headings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from dp_core.corpus.document import Document
from dp_core.corpus.readers.files import (
    BOM,
    LONGEST,
    UNREADABLE,
    bare_name,
    input_files,
    open_bytes,
)
from dp_core.corpus.readers.quarantine import Quarantine, Reason

_TITLE = re.compile(r"^ = [^=\s][^=]* = *$", re.MULTILINE)


def read_plain_text(path: Path, quarantine: Quarantine) -> Iterator[Document]:
    """Yield the documents of a file or folder; see `read_corpus`."""
    for file in input_files(path, ".txt"):
        place = file.relative_to(path).as_posix() if path.is_dir() else file.name
        text = _text(file, place, quarantine)
        if text is None:
            continue
        folders = Path(place).parts[:-1]
        name = Path(place).with_name(bare_name(file)).as_posix()
        for part, piece in _documents(text):
            if not piece.strip():
                quarantine.reject(Reason.EMPTY, place)
                continue
            quarantine.take()
            yield Document(name + part, folders[0] if folders else "", piece)


def _text(file: Path, place: str, quarantine: Quarantine) -> str | None:
    """Return a file's text with `\\n` line ends, or None after quarantining it."""
    try:
        with open_bytes(file) as stream:
            raw = stream.read()
    except UNREADABLE:
        quarantine.reject(Reason.UNREADABLE, place)
        return None
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        quarantine.reject(Reason.ENCODING, place)
        return None
    text = text.removeprefix(BOM).replace("\r\n", "\n").replace("\r", "\n")
    if max(map(len, text.split("\n"))) > LONGEST:
        quarantine.reject(Reason.TOO_LONG, place)
        return None
    return text


def _documents(text: str) -> Iterator[tuple[str, str]]:
    """Yield (suffix of the document id, text): one, or WikiText's articles."""
    titles = [m.start() for m in _TITLE.finditer(text)]
    if not titles or text[: titles[0]].strip():
        yield "", text
        return
    for number, (begin, end) in enumerate(zip(titles, [*titles[1:], len(text)], strict=True), 1):
        yield f"#{number}", text[begin:end]
