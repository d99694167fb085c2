"""Codes of diseases by patient and admission: a table in the columns of MIMIC's DIAGNOSES_ICD.

The operator's audits read the rarity of diseases from it (Jagannatha et al. 2021, appendix A.2); no
model reads it. Everything in it is private.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from dp_core.data.corpus import Document, normalised_id
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import bare_name, input_files, refuse_damaged_file, text_lines
from dp_core.errors import PrivateTextRefusal

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
                for patient, admission, code in _rows(file, quarantine, where):
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


def _rows(file: Path, quarantine: Quarantine, where: str) -> Iterator[tuple[str, str, str]]:
    """Yield (patient, admission, code); rows without a code, as in MIMIC-III, are left out."""
    columns: dict[str, int] | None = None
    for number, line in text_lines(file):
        location = f"{bare_name(file)}:{number}"
        if isinstance(line, Reason):
            quarantine.reject(line, location)
            continue
        if not line.strip():
            continue
        cells = _cells(line)
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


def _cells(line: str) -> list[str]:
    """Return the cells of a row; none if its quoting is broken. A cell is within one line."""
    try:
        rows = list(csv.reader([line.rstrip("\r\n")], strict=True))
    except csv.Error:
        return []
    return rows[0] if rows else []
