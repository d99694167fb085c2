"""The formats that are read, by name: of documents, sentences with entities, texts with a class.

A reader of private text must not let the text decide how many privacy units it is: lines, cells,
objects and files of the format divide it, and words of the text do not. A reader that also divides
text at words in it does so for public text alone.

Of plain text, a file is a document, named by its path. A file directly in the folder names no
patient; for a file in a subfolder, the subfolder at the top is the patient
(`folder/patient/note.txt`). Public text may also be in the layout of WikiText: a file that begins
with a heading ` = Title = ` holds many articles, and is cut at such headings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from dp_core.config.data import TagScheme
from dp_core.data.corpus import Document
from dp_core.data.labelled_text import LabelledText, Sentence
from dp_core.data.readers.entity_formats import read_columns, read_i2b2
from dp_core.data.readers.labelled_texts import read_texts
from dp_core.data.readers.note_tables import SUFFIXES, layout_of, read_table
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import DAMAGED, read_items, text_lines, unpacked_name
from dp_core.data.readers.standoff_formats import read_brat, read_i2b2_xml, read_pubtator
from dp_core.errors import BadInput

Item = TypeVar("Item")
# (file or folder, quarantine for unusable items) -> the items of one format
Reader = Callable[[Path, Quarantine], Iterator[Item]]


def corpus_readers(columns: str = "", *, public: bool = False) -> Mapping[str, Reader[Document]]:
    """Return the readers of documents by format.

    Args:
        columns: the columns of a table, recognised by common names if it is empty; see
            `note_tables.Layout.parse`.
        public: whether the text is public; files in the layout of WikiText are then cut.
    """
    tables = {
        format: partial(read_table, format=format, layout=layout_of(format, columns))
        for format in SUFFIXES
    }
    return {"text": partial(read_plain_text, public=public), **tables}


def sentence_readers(
    *, public: bool = False, scheme: TagScheme | None = None
) -> Mapping[str, Reader[Sentence]]:
    """Return the readers of sentences with entities by format.

    Args:
        public: whether the text is public.
        scheme: the scheme of the tags of `columns`; None: each scheme is read.
    """
    return {
        "i2b2": read_i2b2,  # folders of .txt and .con or .extent
        "i2b2-2012": read_i2b2_xml,  # .xml
        "columns": partial(read_columns, public=public, scheme=scheme),  # token and tag
        "brat": read_brat,  # folders of .txt and .ann
        "pubtator": read_pubtator,  # .txt
    }


def labelled_text_readers(*, pairs: bool = False) -> Mapping[str, Reader[LabelledText]]:
    """Return the readers of texts with a class, or of pairs of them, by format."""
    return {name: partial(read_texts, format=name, pairs=pairs) for name in ("jsonl", "tsv")}


def read_source(
    readers: Mapping[str, Reader[Item]], format: str, path: Path, quarantine: Quarantine
) -> Iterator[Item]:
    """Yield the documents, sentences or texts of a file or folder.

    Args:
        readers: the readers by format, of one of the functions above.
        format: one of these formats; files of each may be .gz or .xz.
        path: a file, or a folder that is searched at any depth.
        quarantine: counts the unusable items.

    Raises:
        BadInput: a wrong path, format or header; a source that holds anything but readable files
            and folders; a damaged table; or, at the end, too large a share in
            quarantine. Never with any text in it.
    """
    if format not in readers:
        fix = f"Use {', '.join(readers)}."
        raise BadInput(f"{format!r} is no format of these texts", where="format", fix=fix)
    yield from readers[format](path, quarantine)
    quarantine.finish(str(path))


# --- plain text

LARGEST = 128_000_000  # bytes of a document: a novel has one million
_TITLE = re.compile(r" = [^=\s][^=\n]* = *\n?")


def read_plain_text(
    path: Path, quarantine: Quarantine, *, public: bool = False
) -> Iterator[Document]:
    """Yield each file of a file or folder as one document; see `read_source`.

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
