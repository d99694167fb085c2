"""Labelled text of any kind, its units and folds; texts and pairs of texts with a class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dp_core.data.corpus import normalised_id
from dp_core.data.hashing import digest64
from dp_core.data.identity import content_name, document_unit_id, with_copies_numbered
from dp_core.privacy.mechanisms import PrivacyUnit


class LabelledItem(Protocol):
    """A sentence with entities, or a text with a class, with its document and patient."""

    @property
    def document_id(self) -> str:
        """The document; empty where the source names none."""

    @property
    def patient_id(self) -> str:
        """The patient; empty where the source names none."""


def owner_of(item: LabelledItem) -> str:
    """Return the id of the item's patient, or of its document if there is no patient.

    Items of one owner are in the same fold and are resampled together.
    """
    return item.patient_id or item.document_id


def unit_ids(items: Sequence[LabelledItem], unit: PrivacyUnit) -> list[str]:
    """Return the id of the privacy unit of each item.

    The id of a unit is a function of the unit's own content (`identity`). With the unit `example`,
    the unit is the item. Exact copies are separate units, distinguished by the copy's number.
    """
    match unit:
        case PrivacyUnit.PATIENT:
            return [item.patient_id for item in items]
        case PrivacyUnit.DOCUMENT:
            return [document_unit_id(item.patient_id, item.document_id) for item in items]
        case PrivacyUnit.EXAMPLE:
            return with_copies_numbered(content_name("labelled", repr(item)) for item in items)


def fold_of(item: LabelledItem, folds: int) -> int:
    """Return the fold of an item: the fold of its patient, or of its document.

    The fold is a function of that id alone, so adding or removing a document moves no other
    document to another fold, and a private training on some of the folds is as private as a
    training on all of them. Folds are therefore of about the same size, not of exactly the same.

    Args:
        item: an item with a document id.
        folds: the number of folds, 1 or more.
    """
    return digest64(b"", "fold", owner_of(item)) % folds


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A text with its class, or a pair of texts (does the second follow from the first?).

    Args:
        first: the text.
        second: the second text of a pair; otherwise empty.
        label: the class; ignored in texts that are to be classified.
        document_id: the document. Where the source names none, all texts with the same first text
            (pairs with one premise, copies of one text) are one document.
        patient_id: the patient; empty where the source names none.
    """

    first: str
    second: str = ""
    label: str = ""
    document_id: str = ""
    patient_id: str = ""

    def __post_init__(self) -> None:
        for name in ("document_id", "patient_id"):
            object.__setattr__(self, name, normalised_id(getattr(self, name)))
        if not self.document_id:
            object.__setattr__(self, "document_id", content_name("first text", self.first))


@dataclass(frozen=True)
class ClassScores:
    """Scores of predicted classes.

    Attributes:
        right: the number of right predictions.
        texts: the number of texts.
        f1_by_class: the F1 of each class that is expected or predicted.
    """

    right: int
    texts: int
    f1_by_class: dict[str, float]

    @property
    def accuracy(self) -> float:
        """Share of right predictions; 0 without any texts."""
        return self.right / self.texts if self.texts else 0.0

    @property
    def macro_f1(self) -> float:
        """Mean F1 over the classes; 0 without any class."""
        scores = self.f1_by_class.values()
        return sum(scores) / len(scores) if scores else 0.0


def class_scores(expected: Sequence[str], predicted: Sequence[str]) -> ClassScores:
    """Return the accuracy, and each class's F1 as 2·right / (predicted + expected).

    Args:
        expected: the right class of each text.
        predicted: the predicted class of each text.

    Raises:
        ValueError: the two sequences differ in length.
    """
    pairs = list(zip(expected, predicted, strict=True))
    right = Counter(label for label, guess in pairs if label == guess)
    both = Counter(expected) + Counter(predicted)
    by_class = {name: 2 * right[name] / both[name] for name in sorted(both)}
    return ClassScores(right.total(), len(pairs), by_class)
