"""Privacy units of documents, and the random draws for each unit.

`example`: a tuple of at most N words, cut from one text (Hoory et al. 2021, section 3.2).
`document`: all text of a patient with the same document id. `patient`: all text of a patient.

A unit's id is a function of the unit's own content (`hashing`), and every draw is a function of
that id and a key. So adding or removing one unit changes no draw of another unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dp_core.data.corpus import Document, arrow_strings, grouped_by_size
from dp_core.data.hashing import coin, document_unit_id, drawn, example_name
from dp_core.data.tokens import word_starts
from dp_core.errors import BadInput, PrivateTextRefusal
from dp_core.privacy.mechanisms import PrivacyUnit

T = TypeVar("T")
Ints = NDArray[np.int64]
_TOGETHER = 1 << 20  # characters of text that are split at once, so that arrays fit into the cache


def bounded_sample(items: Sequence[T], limit: int, unit_id: str, key: bytes) -> list[T]:
    """Return at most `limit` of a unit's items in order, drawn uniformly without replacement.

    Args:
        items: the unit's items, in an order that depends on the unit alone.
        limit: the bound.
        unit_id: the id of the unit.
        key: public coins.
    """
    if len(items) <= limit:
        return list(items)
    places = drawn(len(items), limit, key, "contribution", unit_id)
    return [items[i] for i in places.tolist()]


def is_held_out(unit_id: str, share: float, key: bytes) -> bool:
    """Return whether a unit is held out from training; true for `share` of all keys."""
    return coin(key, "held out", unit_id) < share


@dataclass(frozen=True, slots=True)
class Unit:
    """One privacy unit: its id and its texts.

    Ids of patients and documents are unique in the corpus. Examples with equal content have the
    same id.

    `documents` holds the document of each text, or is empty.
    """

    unit_id: str
    texts: list[str]
    documents: list[Document] = field(default_factory=list)


def units_of(
    documents: Iterable[Document], unit: PrivacyUnit, words_per_unit: int
) -> Iterator[Unit]:
    """Yield the units of documents, each once.

    Args:
        documents: documents grouped by patient and document, as `open_corpus` yields them.
        unit: the protected unit.
        words_per_unit: N, the length of a tuple, for the unit `example`. Other units do not use
            it: the cap on distinct words belongs to the histogram.

    Raises:
        BadInput: the unit is `patient`, and a document names no patient.
    """
    if unit is PrivacyUnit.EXAMPLE:
        yield from _examples(documents, words_per_unit)
        return

    def unit_id_of(document: Document) -> str:
        if unit is PrivacyUnit.PATIENT:
            return document.patient_id
        return document_unit_id(document.patient_id, document.document_id)

    for unit_id, group in itertools.groupby(documents, key=unit_id_of):
        if not unit_id:
            raise nameless()
        held = list(group)
        yield Unit(unit_id, [d.text for d in held], held)


def nameless() -> PrivateTextRefusal:
    """Return the error for a corpus in which the unit is the patient and a patient is missing."""
    return PrivateTextRefusal(
        "the corpus has documents without a patient id",
        where="unit",
        fix="Protect the unit `document`, or give every document its patient (of a folder of"
        " texts: a subfolder for each).",
    )


def _examples(documents: Iterable[Document], words: int) -> Iterator[Unit]:
    if words < 1:
        raise BadInput(f"{words} words make no tuple", where="words_per_unit", fix="Use 1 or more.")
    for document in documents:
        cuts = [*word_starts(document.text)[::words], len(document.text)]
        for begin, end in itertools.pairwise(cuts):
            text = document.text[begin:end]
            name = example_name(document.patient_id, document.document_id, text)
            yield Unit(name, [text], [document])


# --- many units at once


@dataclass(frozen=True)
class UnitTexts:
    """Some whole units and their texts. Private.

    Attributes:
        unit_ids: the ids of the units.
        rows: int64 `[units + 1]`; unit u has the texts `texts[rows[u]:rows[u + 1]]`.
        texts: an Arrow array of strings.
    """

    unit_ids: list[str]
    rows: Ints
    texts: pa.Array


def refuse_more_than_declared(units: int, declared: int, where: str = "declared_units") -> None:
    """Refuse text with more units than the setting `where` declares, without their number.

    Raises:
        PrivateTextRefusal: there are more units.
    """
    if units > declared:
        raise PrivateTextRefusal(
            f"there are more units than the declared bound of {declared}",
            where=where,
            fix="Declare a higher bound, from public knowledge.",
        )


def in_blocks(units: Iterable[Unit]) -> Iterator[UnitTexts]:
    """Yield the same units in blocks of about a megabyte of text."""
    for block in grouped_by_size(units, lambda unit: sum(map(len, unit.texts)), _TOGETHER):
        rows = np.concatenate([[0], np.cumsum([len(unit.texts) for unit in block])])
        texts = arrow_strings([text for unit in block for text in unit.texts])
        yield UnitTexts([unit.unit_id for unit in block], rows, texts)
