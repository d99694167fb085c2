"""Tables of MIMIC: notes in the columns of NOTEEVENTS, and codes of diseases of DIAGNOSES_ICD.

NOTEEVENTS holds quoted text over many lines, with doubled quotes. The operator's audits read the
rarity of diseases from DIAGNOSES_ICD (Jagannatha et al. 2021, appendix A.2); no model reads it.
Everything in both tables is private.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dp_core.data.corpus import Document, normalised_id
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import (
    BOM,
    LONGEST,
    bare_name,
    bounded_lines,
    input_files,
    is_unicode,
    location_of,
    open_bytes,
    refuse_damaged_file,
    text_lines,
)
from dp_core.errors import PrivateTextRefusal

_NEEDED = ("SUBJECT_ID", "TEXT")
_IDS = ("SUBJECT_ID", "ROW_ID", "HADM_ID")
_ERROR_MARKS = frozenset({"1", "1.0", "true", "t"})
_LONGEST_ROW = 2 * LONGEST  # bytes; a longer row means broken quoting, not a long note
# RFC 4180, section 2: quotes enclose a whole field; a quote inside a field is doubled.
_FIELD = r'(?:"[^"]*+(?:""[^"]*+)*+"|[^",\r\n]*+)'
_ROW = re.compile(rf"{_FIELD}(?:,{_FIELD})*+")


class _Broken(Exception):
    """Quoting that violates RFC 4180, in the row that begins at this line."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line


def read_noteevents(path: Path, quarantine: Quarantine) -> Iterator[Document]:
    """Yield the notes of a file or folder; see `read_corpus`.

    Columns may come in any case and order; SUBJECT_ID and TEXT are required, ROW_ID, HADM_ID and
    ISERROR are optional. Rows marked ISERROR = 1 are left out.

    A note must not become several rows, and its words must not become patients. After a stray
    quote the beginning of the next row is unknown, so a file is read as RFC 4180 defines it or not
    at all. A misplaced quote, a quote that is not closed, an id over two lines, or a row with more
    or fewer cells than the header (as the lines of a note without its quotes have) refuses the
    source.
    """
    for file in input_files(path, ".csv", quarantine):
        try:
            with refuse_damaged_file(path, file, quarantine), open_bytes(file) as stream:
                yield from _notes(path, file, stream, quarantine)
        except _Broken as broken:
            quarantine.reject(Reason.WRONG_COLUMNS, f"{bare_name(file)}:{broken.line}")
            raise PrivateTextRefusal(
                "a row has broken quoting, or not as many cells as the header",
                where=str(path),
                fix="Write it as RFC 4180 requires: quotes around a text, doubled inside it.",
            ) from None


def _notes(
    source: Path, file: Path, stream: IO[bytes], quarantine: Quarantine
) -> Iterator[Document]:
    rows = _rows(stream)
    number, header = next(rows, (1, []))
    names = [name.strip().upper() for name in header]
    columns = {name: i for i, name in enumerate(names)}
    if missing := [name for name in _NEEDED if name not in columns]:
        quarantine.reject(Reason.WRONG_COLUMNS, location_of(file, source))
        raise PrivateTextRefusal(
            f"a header lacks {' and '.join(missing)}",
            where=str(source),
            fix="NOTEEVENTS columns are ROW_ID, SUBJECT_ID, HADM_ID, …, ISERROR, TEXT.",
        )
    if any(names.count(name) > 1 for name in (*_IDS, "ISERROR", "TEXT")):
        raise _Broken(number)
    for number, row in rows:
        if len(row) != len(header) or any("\n" in row[columns[i]] for i in _IDS if i in columns):
            raise _Broken(number)
        yield from _note(row, columns, f"{bare_name(file)}:{number}", quarantine)


def _rows(stream: IO[bytes]) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of its first line, cells) of each row.

    In CSV of this form, a row ends with the first line that closes every quote.

    Raises:
        _Broken: the file is not of this form, or the last row does not end.
    """
    csv.field_size_limit(_LONGEST_ROW)
    lines: list[bytes] = []
    begin, size, is_open = 1, 0, False
    for number, line in enumerate(bounded_lines(stream, _LONGEST_ROW, keep_ends=True), 1):
        if not lines:
            begin, size = number, 0
        if line is None:
            raise _Broken(begin)
        lines.append(line)
        size += len(line)
        is_open ^= line.count(b'"') % 2 == 1
        if size > _LONGEST_ROW:
            raise _Broken(begin)
        if not is_open:
            # Bytes that are not UTF-8 become lone surrogates, so that only their own row is lost.
            row = b"".join(lines).decode("utf-8", "surrogateescape")
            lines = []
            row = (row.removeprefix(BOM) if begin == 1 else row).removesuffix("\n")
            row = row.removesuffix("\r")
            if row.strip():
                yield begin, _cells(row, begin)
    if lines:
        raise _Broken(begin)


def _cells(row: str, number: int) -> list[str]:
    if not _ROW.fullmatch(row):
        raise _Broken(number)
    return next(csv.reader([row], strict=True))


def _note(
    row: list[str], columns: dict[str, int], location: str, quarantine: Quarantine
) -> Iterator[Document]:
    """Yield the note of a row, or quarantine it."""

    def cell(name: str) -> str:
        return row[columns[name]].strip() if name in columns else ""

    text, patient = row[columns["TEXT"]], normalised_id(cell("SUBJECT_ID"))
    if cell("ISERROR").lower() in _ERROR_MARKS:
        quarantine.leave_out()
    elif not is_unicode("".join(row)):
        quarantine.reject(Reason.ENCODING, location)
    elif not text.strip():
        quarantine.reject(Reason.EMPTY, location)
    elif len(text) > LONGEST:
        quarantine.reject(Reason.TOO_LONG, location)
    elif not patient:
        quarantine.reject(Reason.NO_PATIENT, location)
    else:
        quarantine.take()
        yield Document(cell("ROW_ID"), patient, text.replace("\r\n", "\n"), cell("HADM_ID"))


_PATIENT, _ADMISSION = "SUBJECT_ID", "HADM_ID"
_CODES = ("ICD9_CODE", "ICD_CODE")  # of MIMIC-III and MIMIC-IV
_VERSION = "ICD_VERSION"  # of MIMIC-IV: the same code means different diseases in ICD-9 and ICD-10


class Diagnoses:
    """The codes of each patient and of each admission.

    Args:
        path: a .csv file, plain or packed, or a folder of them.
        quarantine: counts rejected rows; a new one by default.
        where: the name of the source in errors.

    Raises:
        BadInput: a wrong path or header, a damaged file, or too large a share in quarantine. The
            message never quotes the file.
    """

    def __init__(
        self, path: Path, quarantine: Quarantine | None = None, where: str = "diagnoses"
    ) -> None:
        quarantine = quarantine or Quarantine()
        self._patients: dict[str, set[str]] = defaultdict(set)
        self._admissions: dict[tuple[str, str], set[str]] = defaultdict(set)
        for file in input_files(path, ".csv", quarantine):
            with refuse_damaged_file(path, file, quarantine):
                for patient, admission, code in _diagnoses_of(file, quarantine, where):
                    self._patients[patient].add(code)
                    if admission:
                        self._admissions[patient, admission].add(code)
        quarantine.finish(where)

    def of_patient(self, document: Document) -> frozenset[str]:
        """Return the codes of the document's patient, in all admissions; empty if none is known."""
        return frozenset(self._patients.get(document.patient_id, ()))

    def of_admission(self, document: Document) -> frozenset[str]:
        """Return the codes of the document's admission, or of its patient where it names none."""
        if not document.admission_id:
            return self.of_patient(document)
        key = document.patient_id, normalised_id(document.admission_id)
        return frozenset(self._admissions.get(key, ()))


def _diagnoses_of(file: Path, quarantine: Quarantine, where: str) -> Iterator[tuple[str, str, str]]:
    """Yield (patient, admission, code); rows without a code, as in MIMIC-III, are left out."""
    columns: dict[str, int] | None = None
    for number, line in text_lines(file):
        location = f"{bare_name(file)}:{number}"
        if isinstance(line, Reason):
            quarantine.reject(line, location)
            continue
        if not line.strip():
            continue
        cells = _cells_of_line(line)
        if columns is None:
            columns = _columns(cells, where)
            width = len(cells)
            continue
        if len(cells) != width:
            quarantine.reject(Reason.WRONG_COLUMNS, location)
            continue
        ids = {name: normalised_id(cells[place]) for name, place in columns.items()}
        if not ids[_PATIENT]:
            quarantine.reject(Reason.NO_PATIENT, location)
        elif not ids["code"]:
            quarantine.leave_out()
        else:
            quarantine.take()
            version = f"{ids[_VERSION]}:" if _VERSION in ids else ""
            yield ids[_PATIENT], ids.get(_ADMISSION, ""), version + ids["code"]


def _columns(header: list[str], where: str) -> dict[str, int]:
    """Return the indices of the columns by name; the column of the codes is named `code`."""
    names = [cell.strip().upper() for cell in header]
    codes = [name for name in _CODES if name in names]
    if _PATIENT not in names or len(codes) != 1 or len(set(names)) < len(names):
        raise PrivateTextRefusal(
            f"its first line does not name {_PATIENT} and one of {' and '.join(_CODES)}, each once",
            where=where,
            fix="Give a table in the columns of DIAGNOSES_ICD.",
        )
    places = {name: names.index(name) for name in (_PATIENT, _ADMISSION, _VERSION) if name in names}
    return places | {"code": names.index(codes[0])}


def _cells_of_line(line: str) -> list[str]:
    """Return the cells of a row; none if its quoting is broken. A cell is within one line."""
    try:
        rows = list(csv.reader([line.rstrip("\r\n")], strict=True))
    except csv.Error:
        return []
    return rows[0] if rows else []
