"""Labelled text of any kind: whose it is, in which fold; texts and pairs of texts with a class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dp_core.data.corpus import normalised_id
from dp_core.data.hashing import digest64


class LabelledItem(Protocol):
    """A sentence with entities, or a text with a class: it says whose it is."""

    @property
    def document_id(self) -> str:
        """Where it comes from; empty where the source does not say."""

    @property
    def patient_id(self) -> str:
        """Whose text it is; empty where nobody has said."""


def owner_of(item: LabelledItem) -> str:
    """Return whose an item is: its patient's, or else its document's.

    Items of one owner are in one fold, and are drawn together where a score is resampled.
    """
    return item.patient_id or item.document_id


def fold_of(item: LabelledItem, folds: int) -> int:
    """Return which fold an item is in: that of its patient, or else of its document.

    It is a function of that id alone, so that another document moves nobody from fold to fold: a
    private training on some of the folds is as private as one on all of them. Folds are therefore
    of about the same size, not exactly.

    Args:
        item: with a document id.
        folds: how many, 1 or more.
    """
    return digest64(b"", "fold", owner_of(item)) % folds


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A text with its class, or a pair of texts (does the second follow from the first?).

    Args:
        first: the text.
        second: the other one; empty where there is none.
        label: its class; not looked at where it is to be predicted.
        document_id: where it comes from. Where the source does not say, texts with the same first
            text are one document: the pairs of one premise, the copies of one text.
        patient_id: whose text it is; empty where nobody has said.
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
            own = f"text-{digest64(b'', 'text', self.first):016x}"
            object.__setattr__(self, "document_id", own)


@dataclass(frozen=True)
class ClassScores:
    """What predicted classes are worth.

    Attributes:
        right: how many are right.
        texts: how many there are.
        f1_by_class: of each class that is expected or predicted.
    """

    right: int
    texts: int
    f1_by_class: dict[str, float]

    @property
    def accuracy(self) -> float:
        """Share that is right; 0 if there are none."""
        return self.right / self.texts if self.texts else 0.0

    @property
    def macro_f1(self) -> float:
        """Mean over classes of their F1; 0 if there are none."""
        found = self.f1_by_class.values()
        return sum(found) / len(found) if found else 0.0


def class_scores(expected: Sequence[str], predicted: Sequence[str]) -> ClassScores:
    """Return accuracy, and F1 by class: 2·right / (predicted + expected).

    Args:
        expected: the right class of each text.
        predicted: as many predicted ones.

    Raises:
        ValueError: not as many.
    """
    pairs = list(zip(expected, predicted, strict=True))
    right = Counter(one for one, other in pairs if one == other)
    both = Counter(expected) + Counter(predicted)
    by_class = {name: 2 * right[name] / both[name] for name in sorted(both)}
    return ClassScores(right.total(), len(pairs), by_class)
