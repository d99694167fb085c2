"""Codes of diseases of MIMIC's table DIAGNOSES_ICD.

The operator's audits read the rarity of diseases from it (Jagannatha et al. 2021, appendix A.2); no
model reads it. Everything in it is private.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from dp_core.data.corpus import Document, normalised_id
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import (
    csv_cells,
    read_items,
    table_rows,
)
from dp_core.errors import PrivateTextRefusal

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
