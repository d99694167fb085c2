"""Texts with a class, and pairs of them: JSON lines, or a table with tabs between its columns.

Columns, or fields of an object, are `text` and `label`, or `sentence1`, `sentence2` and
`gold_label` as in MedNLI and SNLI; also, optionally, the ids of document and patient, under the
common names of these columns (`note_tables`). Other columns are ignored. A pair with the label `-`
had no majority among its annotators, and is left out, as usual (Bowman et al. 2015).

Annotation formats do not name patients, so a separate list of documents and their patients can be
read: a line is a document and its patient, separated by a tab or a comma. A first line `document`,
`patient` is a heading. Ids are normalised, as in all readers.

MIMIC's table DIAGNOSES_ICD has the codes of diseases of patients and admissions. The operator's
audits read the rarity of diseases from it (Jagannatha et al. 2021, appendix A.2); no model reads
it. Everything in it is private.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from dp_core.data.corpus import Document, id_in_cell, normalised_id
from dp_core.data.hashing import given_id
from dp_core.data.labelled_text import LabelledText, Sentence
from dp_core.data.readers.note_tables import ids_alike, recognised
from dp_core.data.readers.quarantine import Quarantine, Reason
from dp_core.data.readers.sources import (
    LONGEST,
    UNREADABLE,
    csv_cells,
    json_objects,
    read_items,
    table_rows,
    text_lines,
    text_problem,
)
from dp_core.errors import BadInput, PrivateTextRefusal

_FIRST, _SECOND = ("text", "sentence1"), ("sentence2",)
_LABEL = ("label", "gold_label")
_IDS = ("document", "patient")
_cells = partial(str.split, sep="\t")
_NO_MAJORITY = "-"


def read_texts(
    path: Path, quarantine: Quarantine, *, format: str, pairs: bool
) -> Iterator[LabelledText]:
    """Yield the texts of a file or folder; see `read_source`.

    Args:
        path: a file or folder.
        quarantine: counts the unusable texts.
        format: `jsonl`, an object a line, or `tsv`, whose first line names its columns; without
            quotes around cells, as GLUE has it.
        pairs: whether each text has a second one.
    """

    def names_of(header: list[str]) -> list[str]:
        for names in (_FIRST, _LABEL, *((_SECOND,) if pairs else ())):
            if not set(names) & set(header):
                raise PrivateTextRefusal(
                    f"a header lacks {' or '.join(names)}",
                    where=str(path),
                    fix="The first line of each table names its columns, tabs between them.",
                )
        return header

    alike = ids_alike(str(path), "Rename them.")

    @lru_cache
    def ids_of(names: tuple[str, ...]) -> dict[str, str]:
        columns = recognised(names)
        return alike((role, name) for role in _IDS for name in columns[role])

    def texts_of(file: Path) -> Iterator[tuple[int, LabelledText | Reason | None]]:
        is_table = format == "tsv"
        for number, row in table_rows(file, _cells, names_of) if is_table else json_objects(file):
            yield number, row if isinstance(row, Reason) else _text(row, ids_of(tuple(row)), pairs)

    return read_items(path, f".{format}", quarantine, texts_of)


def _text(
    row: Mapping[str, Any], ids: Mapping[str, str], pairs: bool
) -> LabelledText | Reason | None:
    """Return a row's text, the reason why there is none, or None for a pair without majority.

    Args:
        row: the cells by column.
        ids: the columns of the ids of document and patient, if there are any.
        pairs: whether the text has a second one.
    """
    first, label = _of(row, _FIRST), _of(row, _LABEL)
    second = _of(row, _SECOND) if pairs else ""
    try:
        document, patient = (id_in_cell(row[ids[role]]) if role in ids else "" for role in _IDS)
        label = normalised_id(label)  # classes may be numbers
    except ValueError:
        return Reason.WRONG_FIELD
    if not isinstance(first, str) or not isinstance(second, str) or not label:
        return Reason.WRONG_FIELD
    if pairs and not second.strip():
        return Reason.EMPTY
    if problem := text_problem(first, second, label, document, patient):
        return problem
    if len(first) + len(second) > LONGEST:
        return Reason.TOO_LONG
    if "patient" in ids and not patient:
        return Reason.NO_PATIENT
    if label == _NO_MAJORITY:
        return None
    return LabelledText(first, second, label, given_id(document), patient)


def _of(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if name in row), None)


Item = TypeVar("Item", Sentence, LabelledText)
_WHERE = "entities_patients"
_HEADING = ["document", "patient"]


def read_patients(file: Path) -> dict[str, str]:
    """Return each document's patient.

    Raises:
        BadInput: the file cannot be read; a line is not a document and a patient; a document has
            two patients. The message never quotes the file, because ids may be names.
    """
    if not file.is_file():
        raise BadInput("it is not a file", where=_WHERE, fix="Give a .csv or .tsv file.")
    patients: dict[str, str] = {}
    try:
        for number, line in text_lines(file):
            if isinstance(line, Reason):
                raise _wrong(number, "it is not a document and its patient")
            if not line.strip():
                continue
            delimiter = "\t" if "\t" in line else ","
            cells = [id_in_cell(cell) for cell in csv_cells(line, delimiter)]
            if number == 1 and [cell.lower() for cell in cells] == _HEADING:
                continue
            if len(cells) != 2 or not all(cells):
                raise _wrong(number, "it is not a document and its patient")
            document, patient = cells
            if patients.setdefault(document, patient) != patient:
                raise _wrong(number, "its document has another patient in an earlier line")
    except UNREADABLE:
        raise PrivateTextRefusal("it cannot be read", where=_WHERE, fix="Repair it.") from None
    if not patients:
        raise PrivateTextRefusal("it names no document", where=_WHERE, fix="Check the file.")
    return patients


def with_patients(items: Iterable[Item], patients: Mapping[str, str]) -> list[Item]:
    """Return the sentences, or texts, with their patients.

    Raises:
        BadInput: a document is not listed, so its privacy unit is unknown.
    """
    named = [replace(item, patient_id=patients.get(item.document_id, "")) for item in items]
    if not all(item.patient_id for item in named):
        what = "it does not name the patient of every training document"
        fix = "List each document under its name in the reader, or protect the unit `document`."
        raise PrivateTextRefusal(what, where=_WHERE, fix=fix)
    return named


def _wrong(number: int, what: str) -> PrivateTextRefusal:
    return PrivateTextRefusal(what, where=f"{_WHERE}, line {number}", fix="Repair the list.")


# --- diagnoses

_SUBJECT, _ADMISSION = "SUBJECT_ID", "HADM_ID"
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
            for number, row in table_rows(file, csv_cells, lambda header: _columns(header, where)):
                yield number, row if isinstance(row, Reason) else _diagnosis(row)

        for row in read_items(path, ".csv", quarantine, rows_of):
            code = f"{row[_VERSION]}:{row[_CODE]}" if _VERSION in row else row[_CODE]
            self._patients[row[_SUBJECT]].add(code)
            if row.get(_ADMISSION):
                self._admissions[row[_SUBJECT], row[_ADMISSION]].add(code)
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
    ids = {name: id_in_cell(cell) for name, cell in row.items()}
    if not ids[_SUBJECT]:
        return Reason.NO_PATIENT
    return ids if ids[_CODE] else None


def _columns(header: list[str], where: str) -> list[str]:
    """Return the names of the columns; the column of the codes is named `code`."""
    names = [cell.strip().upper() for cell in header]
    codes = [name for name in _CODES if name in names]
    if _SUBJECT not in names or len(codes) != 1 or len(set(names)) < len(names):
        raise PrivateTextRefusal(
            f"its first line does not name {_SUBJECT} and one of {' and '.join(_CODES)}, each once",
            where=where,
            fix="Give a table in the columns of DIAGNOSES_ICD.",
        )
    return [_CODE if name == codes[0] else name for name in names]
