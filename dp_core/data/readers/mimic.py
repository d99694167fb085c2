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
    csv_cells,
    location_of,
    open_bytes,
    read_items,
    table_rows,
    text_problem,
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
    """Quoting that violates RFC 4180; the argument is the line at which the row begins."""


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

    def notes_of(file: Path) -> Iterator[tuple[int, Document | Reason | None]]:
        try:
            with open_bytes(file) as stream:
                yield from _notes(path, file, stream, quarantine)
        except _Broken as broken:
            quarantine.reject(Reason.WRONG_COLUMNS, f"{bare_name(file)}:{broken.args[0]}")
            raise PrivateTextRefusal(
                "a row has broken quoting, or not as many cells as the header",
                where=str(path),
                fix="Write it as RFC 4180 requires: quotes around a text, doubled inside it.",
            ) from None

    return read_items(path, ".csv", quarantine, notes_of)


def _notes(
    source: Path, file: Path, stream: IO[bytes], quarantine: Quarantine
) -> Iterator[tuple[int, Document | Reason | None]]:
    rows = _rows(stream)
    number, header = next(rows, (1, []))
    names = [name.strip().upper() for name in header]
    if missing := [name for name in _NEEDED if name not in names]:
        quarantine.reject(Reason.WRONG_COLUMNS, location_of(file, source))
        raise PrivateTextRefusal(
            f"a header lacks {' and '.join(missing)}",
            where=str(source),
            fix="NOTEEVENTS columns are ROW_ID, SUBJECT_ID, HADM_ID, …, ISERROR, TEXT.",
        )
    if any(names.count(name) > 1 for name in (*_IDS, "ISERROR", "TEXT")):
        raise _Broken(number)
    for number, cells in rows:
        row = dict(zip(names, cells, strict=False))
        if len(cells) != len(names) or any("\n" in row.get(name, "") for name in _IDS):
            raise _Broken(number)
        yield number, _note(row)


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


def _note(row: dict[str, str]) -> Document | Reason | None:
    """Return the note of a row, the reason why there is none, or None for an erroneous note."""
    ids = {name: row.get(name, "").strip() for name in _IDS}
    if row.get("ISERROR", "").strip().lower() in _ERROR_MARKS:
        return None
    if problem := text_problem(row["TEXT"], *row.values()):
        return problem
    if not normalised_id(ids["SUBJECT_ID"]):
        return Reason.NO_PATIENT
    text = row["TEXT"].replace("\r\n", "\n")
    return Document(ids["ROW_ID"], ids["SUBJECT_ID"], text, ids["HADM_ID"])


_PATIENT, _ADMISSION = "SUBJECT_ID", "HADM_ID"
_CODES = ("ICD9_CODE", "ICD_CODE")  # of MIMIC-III and MIMIC-IV
_CODE = "code"
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

        def rows_of(file: Path) -> Iterator[tuple[int, dict[str, str] | Reason | None]]:
            for number, row in table_rows(file, csv_cells, lambda header: _names(header, where)):
                yield number, row if isinstance(row, Reason) else _diagnosis(row)

        for row in read_items(path, ".csv", quarantine, rows_of):
            code = f"{row[_VERSION]}:{row[_CODE]}" if _VERSION in row else row[_CODE]
            self._patients[row[_PATIENT]].add(code)
            if row.get(_ADMISSION):
                self._admissions[row[_PATIENT], row[_ADMISSION]].add(code)
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


def _diagnosis(row: dict[str, str]) -> dict[str, str] | Reason | None:
    """Return a row's normalised ids; None for a row without a code, as in MIMIC-III."""
    ids = {name: normalised_id(cell) for name, cell in row.items()}
    if not ids[_PATIENT]:
        return Reason.NO_PATIENT
    return ids if ids[_CODE] else None


def _names(header: list[str], where: str) -> list[str]:
    """Return the names of the columns; the column of the codes is named `code`."""
    names = [cell.strip().upper() for cell in header]
    codes = [name for name in _CODES if name in names]
    if _PATIENT not in names or len(codes) != 1 or len(set(names)) < len(names):
        raise PrivateTextRefusal(
            f"its first line does not name {_PATIENT} and one of {' and '.join(_CODES)}, each once",
            where=where,
            fix="Give a table in the columns of DIAGNOSES_ICD.",
        )
    return [_CODE if name == codes[0] else name for name in names]
