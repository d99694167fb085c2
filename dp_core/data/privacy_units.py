"""From documents to privacy units: what is protected as a whole.

`example`: a tuple of at most N words, cut from one document (Hoory et al. 2021, section 3.2).
`document`: all text that shares a document id. `patient`: all text of a patient.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from dp_core.data.corpus import Document, open_corpus
from dp_core.data.hashing import coin, generator
from dp_core.data.tokens import word_starts
from dp_core.errors import BadInput
from dp_core.privacy.mechanisms import PrivacyUnit

T = TypeVar("T")


def bounded_sample(items: Sequence[T], limit: int, unit_id: str, key: bytes) -> list[T]:
    """Return at most `limit` of a unit's items, uniformly without replacement, in their order.

    Args:
        items: what the unit would contribute, in an order that depends on the unit alone.
        limit: the bound.
        unit_id: whose items these are.
        key: public coins.
    """
    if len(items) <= limit:
        return list(items)
    rng = generator(key, "contribution", unit_id)
    return [items[i] for i in sorted(rng.sample(range(len(items)), limit))]


def is_held_out(unit_id: str, share: float, key: bytes) -> bool:
    """Whether a unit measures and never trains: true for `share` of all keys."""
    return coin(key, "held out", unit_id) < share


@dataclass(frozen=True, slots=True)
class Unit:
    """One privacy unit: its id (unique in the corpus) and its texts.

    `documents` are those that the texts stand in, one for each text; none where nobody asks.
    """

    unit_id: str
    texts: list[str]
    documents: list[Document] = field(default_factory=list)


def iter_units(folder: Path, unit: PrivacyUnit, words_per_unit: int) -> Iterator[Unit]:
    """Yield the units of a corpus in normal form, each once.

    Args:
        folder: written by `write_corpus`.
        unit: what is protected.
        words_per_unit: N, the length of a tuple, for the unit `example`; otherwise unused (the
            cap on distinct words is the histogram's).

    Raises:
        BadInput: the unit is `patient`, and a document names none.
    """
    return units_of(open_corpus(folder), unit, words_per_unit)


def units_of(
    documents: Iterable[Document], unit: PrivacyUnit, words_per_unit: int
) -> Iterator[Unit]:
    """Yield the units of documents that are grouped by patient and document, as `iter_units`."""
    if unit is PrivacyUnit.PATIENT:
        return _patients(documents)
    if unit is PrivacyUnit.DOCUMENT:
        return _documents(documents)
    return _examples(documents, words_per_unit)


def nameless() -> BadInput:
    """Return the error of a corpus whose unit is the patient, with documents that name none."""
    return BadInput(
        "the corpus has documents without a patient id",
        where="unit",
        fix="Protect the unit `document`, or give every document its patient (of a folder of"
        " texts: a subfolder for each).",
    )


def document_unit_id(document: Document) -> str:
    """Return the id of the unit that a document is, if documents are the units."""
    # The length makes the pair unambiguous whatever characters the ids hold.
    return f"{len(document.patient_id)}:{document.patient_id}/{document.document_id}"


def _patients(documents: Iterable[Document]) -> Iterator[Unit]:
    for patient, group in itertools.groupby(documents, key=lambda d: d.patient_id):
        if not patient:
            raise nameless()
        held = list(group)
        yield Unit(patient, [d.text for d in held], held)


def _documents(documents: Iterable[Document]) -> Iterator[Unit]:
    for unit_id, group in itertools.groupby(documents, key=document_unit_id):
        held = list(group)
        yield Unit(unit_id, [d.text for d in held], held)


def _examples(documents: Iterable[Document], words: int) -> Iterator[Unit]:
    if words < 1:
        raise BadInput(f"{words} words make no tuple", where="words_per_unit", fix="Use 1 or more.")
    for document in _documents(documents):
        number = 0
        starts_of = word_starts(document.texts)
        for source, starts in zip(document.documents, starts_of, strict=True):
            cuts = [*starts[::words], len(source.text)]
            for begin, end in itertools.pairwise(cuts):
                yield Unit(f"{document.unit_id}#{number}", [source.text[begin:end]], [source])
                number += 1
