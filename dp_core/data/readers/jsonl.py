"""JSON lines: one object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dp_core.data.documents import Document, normalised_id
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import (
    BOM,
    LONGEST,
    bare_name,
    bounded_lines,
    damage_told,
    input_files,
    is_unicode,
    open_bytes,
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
        with damage_told(path, file, quarantine), open_bytes(file) as stream:
            for number, line in enumerate(bounded_lines(stream), 1):
                place = f"{bare_name(file)}:{number}"
                found = _document(line, place, fields)
                if isinstance(found, Document):
                    quarantine.take()
                    yield found
                elif found is not None:
                    quarantine.reject(found, place)


def _document(line: bytes | None, place: str, fields: JsonlFields) -> Document | Reason | None:
    """Return a line's document, why there is none, or None for a blank line."""
    if line is None:
        return Reason.TOO_LONG
    try:
        decoded = line.decode().removeprefix(BOM)
    except UnicodeDecodeError:
        return Reason.ENCODING
    if not decoded.strip():
        return None
    try:
        row = json.loads(decoded)
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
    return Document(document or place, patient, text.replace("\r\n", "\n"), admission)
