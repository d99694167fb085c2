"""Codes of diseases by patient and admission: a table in the columns of MIMIC's DIAGNOSES_ICD.

Whose disease is how rare is asked of it (Jagannatha et al. 2021, appendix A.2), by the operator: no
model reads it. Everything in it is private.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from dp_core.data.corpus import Document, normalised_id
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import bare_name, damage_told, input_files, text_lines
from dp_core.errors import PrivateTextRefusal

_PATIENT, _ADMISSION = "SUBJECT_ID", "HADM_ID"
_CODES = ("ICD9_CODE", "ICD_CODE")  # of MIMIC-III and MIMIC-IV
_VERSION = "ICD_VERSION"  # of MIMIC-IV: the same letters mean another disease in 9 and in 10


class Diagnoses:
    """Which codes each patient, and each admission, was given.

    Args:
        path: a .csv file, plain or packed, or a folder of them.
        quarantine: counts what is not taken; a new one by default.
        where: what errors name.

    Raises:
        BadInput: a wrong path or header, a damaged file, or too large a share in quarantine. Never
            with any text in it.
    """

    def __init__(
        self, path: Path, quarantine: Quarantine | None = None, where: str = "diagnoses"
    ) -> None:
        quarantine = quarantine or Quarantine()
        self._patients: dict[str, set[str]] = defaultdict(set)
        self._admissions: dict[tuple[str, str], set[str]] = defaultdict(set)
        for file in input_files(path, ".csv", quarantine):
            with damage_told(path, file, quarantine):
                for patient, admission, code in _rows(file, quarantine, where):
                    self._patients[patient].add(code)
                    if admission:
                        self._admissions[patient, admission].add(code)
        quarantine.finish(where)

    def of_patient(self, document: Document) -> frozenset[str]:
        """Return the codes of the document's patient, in all admissions; empty: none is known."""
        return frozenset(self._patients.get(document.patient_id, ()))

    def of_admission(self, document: Document) -> frozenset[str]:
        """Return the codes of the document's admission, or of its patient where it names none."""
        if not document.admission_id:
            return self.of_patient(document)
        key = document.patient_id, normalised_id(document.admission_id)
        return frozenset(self._admissions.get(key, ()))


def _rows(file: Path, quarantine: Quarantine, where: str) -> Iterator[tuple[str, str, str]]:
    """Yield (patient, admission, code); a row without a code is left out, as MIMIC-III has some."""
    columns: dict[str, int] | None = None
    for number, line in text_lines(file):
        at = f"{bare_name(file)}:{number}"
        if isinstance(line, Reason):
            quarantine.reject(line, at)
            continue
        if not line.strip():
            continue
        cells = _cells(line)
        if columns is None:
            columns = _columns(cells, where)
            width = len(cells)
            continue
        if len(cells) != width:
            quarantine.reject(Reason.WRONG_COLUMNS, at)
            continue
        told = {name: normalised_id(cells[place]) for name, place in columns.items()}
        if not told[_PATIENT]:
            quarantine.reject(Reason.NO_PATIENT, at)
        elif not told["code"]:
            quarantine.leave_out()
        else:
            quarantine.take()
            version = f"{told[_VERSION]}:" if _VERSION in told else ""
            yield told[_PATIENT], told.get(_ADMISSION, ""), version + told["code"]


def _columns(header: list[str], where: str) -> dict[str, int]:
    """Return the places of the columns that are read, by name; the code's is called `code`."""
    names = [cell.strip().upper() for cell in header]
    codes = [name for name in _CODES if name in names]
    if _PATIENT not in names or len(codes) != 1 or len(set(names)) < len(names):
        raise PrivateTextRefusal(
            f"its first line does not name {_PATIENT} and one of {' and '.join(_CODES)}, each once",
            where=where,
            fix="Give a table in the columns of DIAGNOSES_ICD.",
        )
    found = {name: names.index(name) for name in (_PATIENT, _ADMISSION, _VERSION) if name in names}
    return found | {"code": names.index(codes[0])}


def _cells(line: str) -> list[str]:
    """Return the cells of a row; none where its quoting is broken: no cell goes over two lines."""
    try:
        rows = list(csv.reader([line.rstrip("\r\n")], strict=True))
    except csv.Error:
        return []
    return rows[0] if rows else []
