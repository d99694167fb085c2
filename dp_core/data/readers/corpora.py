"""The door to all readers of text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dp_core.data.documents import Document
from dp_core.data.readers.jsonl import JsonlFields, read_jsonl
from dp_core.data.readers.noteevents import read_noteevents
from dp_core.data.readers.plain_text import read_plain_text
from dp_core.data.readers.quarantine import Quarantine
from dp_core.errors import BadInput

_FIELDS = JsonlFields()


def read_corpus(
    format: str,
    path: Path | str,
    quarantine: Quarantine | None = None,
    *,
    fields: JsonlFields = _FIELDS,
) -> Iterator[Document]:
    """Yield the documents of a file or folder.

    Args:
        format: `text`, `jsonl` or `noteevents`; files of each may be .gz or .xz.
        path: a file, or a folder that is searched at any depth.
        quarantine: counts what is not taken; a new one by default.
        fields: names of the fields of `jsonl`.

    Raises:
        BadInput: a wrong path, format or header; a source that holds something else than files
            and folders, or what may not be read; a damaged .csv or .jsonl file; or, at the end,
            too large a share in quarantine. Never with any text in it.
    """
    quarantine = Quarantine() if quarantine is None else quarantine
    path = Path(path)
    match format:
        case "text":
            documents = read_plain_text(path, quarantine)
        case "jsonl":
            documents = read_jsonl(path, quarantine, fields)
        case "noteevents":
            documents = read_noteevents(path, quarantine)
        case _:
            raise BadInput(
                f"{format!r} is not a corpus format",
                where="format",
                fix="Use text, jsonl or noteevents.",
            )
    yield from documents
    quarantine.finish(str(path))
