"""JSON lines: one object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dp_core.data.corpus import Document, normalised_id
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import (
    BOM,
    LONGEST,
    bare_name,
    input_files,
    is_unicode,
    refuse_damaged_file,
    text_lines,
)


@dataclass(frozen=True)
class JsonlFields:
    """The names of the fields. Only `text` is required; ids are strings or whole numbers."""

    text: str = "text"
    document_id: str = "document_id"
    patient_id: str = "patient_id"
    admission_id: str = "admission_id"


def read_jsonl(path: Path, quarantine: Quarantine, fields: JsonlFields) -> Iterator[Document]:
    """Yield the documents of a file or folder; see `read_corpus`."""
    for file in input_files(path, ".jsonl", quarantine):
        with refuse_damaged_file(path, file, quarantine):
            for number, row in json_objects(file):
                location = f"{bare_name(file)}:{number}"
                document = row if isinstance(row, Reason) else _document(row, fields)
                if isinstance(document, Document):
                    quarantine.take()
                    yield document
                else:
                    quarantine.reject(document, location)


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
