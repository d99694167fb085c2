"""The list of documents and their patients, since annotation formats do not name patients.

A line is a document and its patient, separated by a tab or a comma. A first line `document`,
`patient` is a heading. Ids are normalised, as in all readers.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from dp_core.data.corpus import normalised_id
from dp_core.data.labelled_text import LabelledText
from dp_core.data.ner import Sentence
from dp_core.data.readers.quarantine import Reason
from dp_core.data.readers.sources import UNREADABLE, text_lines
from dp_core.errors import BadInput, PrivateTextRefusal

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
            if isinstance(line, str) and not line.strip():
                continue
            cells = _cells(line)
            if number == 1 and [cell.lower() for cell in cells] == _HEADING:
                continue
            if len(cells) != 2 or not all(cells):
                raise _wrong(number, "it is not a document and its patient")
            document, patient = cells
            if patients.setdefault(document, patient) != patient:
                raise _wrong(number, "its document has another patient in an earlier line")
    except UNREADABLE:
        raise PrivateTextRefusal(
            "it cannot be read", where=_WHERE, fix="Repair the file."
        ) from None
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
        raise PrivateTextRefusal(
            "it does not name the patient of every training document",
            where=_WHERE,
            fix="List each document under the name that the reader gives it, or protect the unit"
            " `document`.",
        )
    return named


def _cells(line: str | Reason) -> list[str]:
    if isinstance(line, Reason):
        return []
    delimiter = "\t" if "\t" in line else ","
    try:
        rows = list(csv.reader([line.rstrip("\r\n")], delimiter=delimiter, strict=True))
    except csv.Error:
        return []
    return [normalised_id(cell) for cell in rows[0]] if rows else []


def _wrong(number: int, what: str) -> PrivateTextRefusal:
    return PrivateTextRefusal(what, where=f"{_WHERE}, line {number}", fix="Repair the list.")
