"""CSV in the columns of MIMIC-III's NOTEEVENTS: quoted text over many lines, doubled quotes."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

from dp_core.corpus.document import Document
from dp_core.corpus.readers.files import (
    BOM,
    LONGEST,
    bare_name,
    damage_told,
    input_files,
    is_unicode,
    open_bytes,
    place_of,
)
from dp_core.corpus.readers.quarantine import Quarantine, Reason
from dp_core.errors import BadInput

_NEEDED = ("SUBJECT_ID", "TEXT")
_ERROR_MARKS = frozenset({"1", "1.0", "true", "t"})


def read_noteevents(path: Path, quarantine: Quarantine) -> Iterator[Document]:
    """Yield the notes of a file or folder; see `read_corpus`.

    Columns may come in any case and order; SUBJECT_ID and TEXT are needed, ROW_ID, HADM_ID and
    ISERROR used where they are. Rows marked ISERROR = 1 are left out.
    """
    for file in input_files(path, ".csv"):
        with damage_told(path, file, quarantine), open_bytes(file) as stream:
            # Broken bytes become lone surrogates, so that only their own row is lost.
            text = io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="")
            yield from _notes(path, file, text, quarantine)
            text.detach()  # the file closes itself


def _notes(
    source: Path, file: Path, text: Iterable[str], quarantine: Quarantine
) -> Iterator[Document]:
    csv.field_size_limit(LONGEST)
    reader = csv.reader(text, strict=True)
    columns = _columns(reader)
    if missing := [name for name in _NEEDED if name not in columns]:
        quarantine.reject(Reason.WRONG_COLUMNS, place_of(file, source))
        raise BadInput(
            f"a header lacks {' and '.join(missing)}",
            where=str(source),
            fix="NOTEEVENTS columns are ROW_ID, SUBJECT_ID, HADM_ID, …, ISERROR, TEXT.",
        )
    while True:
        place = f"{bare_name(file)}:{reader.line_num + 1}"
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error:
            quarantine.reject(Reason.WRONG_COLUMNS, place)
            continue
        if row:
            yield from _note(row, columns, place, quarantine)


def _columns(reader: Iterator[list[str]]) -> dict[str, int]:
    """Return the place of each column by its name in capitals, and by '' how many there are."""
    try:
        header = next(reader, [])
    except csv.Error:
        header = []
    columns = {
        name.removeprefix(BOM).strip().strip('"').upper(): i for i, name in enumerate(header)
    }
    return {"": len(header), **columns}


def _note(
    row: list[str], columns: dict[str, int], place: str, quarantine: Quarantine
) -> Iterator[Document]:
    """Yield the note of a row, or quarantine it."""
    if len(row) != columns[""]:
        quarantine.reject(Reason.WRONG_COLUMNS, place)
        return

    def cell(name: str) -> str:
        return row[columns[name]].strip() if name in columns else ""

    text, patient = row[columns["TEXT"]], _number(cell("SUBJECT_ID"))
    if cell("ISERROR").lower() in _ERROR_MARKS:
        quarantine.leave_out()
    elif not is_unicode("".join(row)):
        quarantine.reject(Reason.ENCODING, place)
    elif not text.strip():
        quarantine.reject(Reason.EMPTY, place)
    elif not patient:
        quarantine.reject(Reason.NO_PATIENT, place)
    else:
        quarantine.take()
        document = _number(cell("ROW_ID")) or place
        yield Document(document, patient, text.replace("\r\n", "\n"), _number(cell("HADM_ID")))


def _number(cell: str) -> str:
    """Return an id as an integer is written: tables once read as floats say `10001.0`."""
    whole = cell.removesuffix(".0")
    return whole if whole.isdigit() else cell
