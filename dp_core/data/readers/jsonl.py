"""JSON lines: one object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dp_core.data.corpus import Document, normalised_id
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import (
    BOM,
    LONGEST,
    bare_name,
    damage_told,
    input_files,
    is_unicode,
    text_lines,
)


@dataclass(frozen=True)
class JsonlFields:
    """What the fields are called. Only `text` must be there; ids are strings or whole numbers."""

    text: str = "text"
    document_id: str = "document_id"
    patient_id: str = "patient_id"
    admission_id: str = "admission_id"


def read_jsonl(path: Path, quarantine: Quarantine, fields: JsonlFields) -> Iterator[Document]:
    """Yield the documents of a file or folder; see `read_corpus`.

    A document without an id is named by its file and line.
    """
    for file in input_files(path, ".jsonl", quarantine):
        with damage_told(path, file, quarantine):
            for number, line in text_lines(file):
                location = f"{bare_name(file)}:{number}"
                document = _document(line, location, fields)
                if isinstance(document, Document):
                    quarantine.take()
                    yield document
                elif document is not None:
                    quarantine.reject(document, location)


def _document(line: str | Reason, location: str, fields: JsonlFields) -> Document | Reason | None:
    """Return a line's document, why there is none, or None for a blank line."""
    if isinstance(line, Reason):
        return line
    line = line.removeprefix(BOM)  # of a file that was joined from several
    if not line.strip():
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # also a number of thousands of digits
        return Reason.NOT_JSON
    if not isinstance(row, dict):
        return Reason.NOT_JSON
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
    return Document(document or location, patient, text.replace("\r\n", "\n"), admission)
