"""The heads of a fine-tuning step: selection of texts and labels, predictions, scores, errors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer

from dp_core.data.hashing import digest64
from dp_core.data.labelled_text import LabelledItem, LabelledText, class_scores, owner_of
from dp_core.data.ner import (
    Entity,
    Sentence,
    joined,
    label_set,
    score,
    tagging_errors,
    tags_of_types,
    with_types,
)
from dp_core.models.parameters import Bert
from dp_core.training import finetune
from dp_core.training.bootstrap import Replicate, mean_f1
from dp_core.training.classification import ClassHead, classes_of
from dp_core.training.tagging import TaggingHead, tag
from tasks.protocol import FinetuneSpec
from tasks.report.results import EXPECTED_ENTITIES
from tasks.steps.entities_step import read_part, read_text_part

_AROUND = 8  # number of words shown on each side of an error


@dataclass(frozen=True)
class Scores:
    """The scores of predictions.

    Attributes:
        headline: the measure that models are compared by, `f1` or `accuracy`.
        values: score by name; they include the headline unless it is undefined.
        f1_by_label: F1 by entity type or class.
        counts: (right, predicted, expected) by the hash of the name of the patient or document; for
            accuracy, which equals micro F1 here, predicted equals expected.
    """

    headline: str
    values: Mapping[str, float]
    f1_by_label: Mapping[str, float]
    counts: Mapping[str, tuple[int, int, int]]

    @property
    def interval(self) -> tuple[float, float] | None:
        """The headline's 95% bootstrap interval over patients or documents; None for too few."""
        if self.headline not in self.values:
            return None
        return mean_f1([Replicate("", 0, self.counts)]).interval


class HeadOfStep(Protocol):
    """The interface of a head in a fine-tuning step."""

    def read(self, folder: Any, part: str) -> list[Any]:
        """Return the labelled texts that the entities step wrote."""

    def learned(self, items: Sequence[Any]) -> list[Any]:
        """Return the texts of a part that are learned and scored."""

    def labels(self, train: Sequence[Any]) -> tuple[str, ...]:
        """Return the entity types or classes: those in the settings, or else all in the texts."""

    def head(self, labels: Sequence[str]) -> finetune.Head[Any, Any]:
        """Return the head that learns these labels."""

    def predict(self, model: Bert, items: Sequence[Any], tokenizer: Tokenizer) -> list[Any]:
        """Return the model's prediction for each text, without reading the text's labels."""

    def scores(self, items: Sequence[Any], predicted: Sequence[Any]) -> Scores:
        """Return the scores of the predictions."""

    def errors(self, items: Sequence[Any], predicted: Sequence[Any]) -> dict[str, Any]:
        """Return every wrong prediction by the number of its text, and counts; no word of a text.

        The label is `operator`, because the labels of private texts are private too.
        """

    def in_words(self, items: Sequence[Any], error: Mapping[str, Any]) -> dict[str, str]:
        """Return one of these errors with the words around it."""


def head_of(spec: FinetuneSpec) -> HeadOfStep:
    """Return the head that the spec names."""
    return Tagging(spec) if spec.head == "entities" else Classifying(spec)


@dataclass(frozen=True)
class Tagging:
    """Entity recognition: tags of words, scored by strict F1."""

    spec: FinetuneSpec

    def read(self, folder: Any, part: str) -> list[Sentence]:
        """As in `HeadOfStep`."""
        return read_part(folder, part)

    def learned(self, items: Sequence[Sentence]) -> list[Sentence]:
        """Return the sentences, or whole documents, with the entities of the configured types."""
        types = self.spec.entity_types
        chosen = with_types(items, types) if types else list(items)
        return joined(chosen) if self.spec.tagging_context == "document" else chosen

    def labels(self, train: Sequence[Sentence]) -> tuple[str, ...]:
        """As in `HeadOfStep`."""
        if self.spec.entity_types:
            return self.spec.entity_types
        return tuple(dict.fromkeys(tag[2:] for tag in label_set(train)[1:]))

    def head(self, labels: Sequence[str]) -> TaggingHead:
        """As in `HeadOfStep`."""
        return TaggingHead(tags_of_types(labels), self.spec.crf, self.spec.window_overlap)

    def predict(
        self, model: Bert, items: Sequence[Sentence], tokenizer: Tokenizer
    ) -> list[tuple[str, ...]]:
        """As in `HeadOfStep`."""
        return tag(
            model,
            items,
            tokenizer,
            max_length=self.spec.sequence_length,
            overlap=self.spec.window_overlap,
            device=self.spec.device,
        )

    def scores(self, items: Sequence[Sentence], predicted: Sequence[tuple[str, ...]]) -> Scores:
        """As in `HeadOfStep`."""
        found = score(items, predicted)
        micro = found.micro
        counts = {}
        for owner, own in _by_owner(items).items():
            one = score([items[i] for i in own], [predicted[i] for i in own]).micro
            counts[owner] = (one.correct, one.predicted, one.expected)
        values: dict[str, float] = {EXPECTED_ENTITIES: micro.expected}
        if micro.expected:  # F1 is undefined, not 0, if the text has no entity.
            values |= {"f1": micro.f1, "precision": micro.precision, "recall": micro.recall}
        return Scores(
            "f1",
            values,
            {kind: of_type.f1 for kind, of_type in found.by_type.items() if of_type.expected},
            counts,
        )

    def errors(
        self, items: Sequence[Sentence], predicted: Sequence[tuple[str, ...]]
    ) -> dict[str, Any]:
        """As in `HeadOfStep`; counts are by type, for a spurious entity by its predicted type."""
        listed: list[dict[str, Any]] = []
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for number, (item, guess) in enumerate(zip(items, predicted, strict=True)):
            for error in tagging_errors(item, guess):
                kind = (error.expected or error.predicted or ("",))[0]
                counts[kind][error.kind] += 1
                own = {"expected": error.expected, "predicted": error.predicted}
                listed.append({"item": number, "error": error.kind} | own)
        by_type = {kind: dict(sorted(own.items())) for kind, own in sorted(counts.items())}
        return {"counts": by_type, "errors": listed}

    def in_words(self, items: Sequence[Sentence], error: Mapping[str, Any]) -> dict[str, str]:
        """As in `HeadOfStep`; eight words are shown on each side."""
        item, wanted, found = items[error["item"]], error["expected"], error["predicted"]
        spans = [(begin, end) for _, begin, end in (e for e in (wanted, found) if e is not None)]
        first = max(0, min(begin for begin, _ in spans) - _AROUND)
        last = max(end for _, end in spans) + _AROUND
        return {
            "document": item.document_id,
            "error": error["error"],
            "expected": _shown(item, wanted),
            "predicted": _shown(item, found),
            "context": " ".join(item.tokens[first:last]),
        }


@dataclass(frozen=True)
class Classifying:
    """Classification of texts or of pairs of texts, scored by accuracy."""

    spec: FinetuneSpec

    def read(self, folder: Any, part: str) -> list[LabelledText]:
        """As in `HeadOfStep`."""
        return read_text_part(folder, part)

    def learned(self, items: Sequence[LabelledText]) -> list[LabelledText]:
        """Return the texts of the configured classes."""
        told = self.spec.class_names
        return [text for text in items if not told or text.label in told]

    def labels(self, train: Sequence[LabelledText]) -> tuple[str, ...]:
        """As in `HeadOfStep`."""
        return self.spec.class_names or tuple(sorted({text.label for text in train}))

    def head(self, labels: Sequence[str]) -> ClassHead:
        """As in `HeadOfStep`."""
        return ClassHead(tuple(labels))

    def predict(
        self, model: Bert, items: Sequence[LabelledText], tokenizer: Tokenizer
    ) -> list[str]:
        """As in `HeadOfStep`."""
        return classes_of(
            model,
            items,
            tokenizer,
            max_length=self.spec.sequence_length,
            device=self.spec.device,
        )

    def scores(self, items: Sequence[LabelledText], predicted: Sequence[str]) -> Scores:
        """As in `HeadOfStep`."""
        found = class_scores([text.label for text in items], predicted)
        counts = {}
        for owner, own in _by_owner(items).items():
            right = sum(items[i].label == predicted[i] for i in own)
            counts[owner] = (right, len(own), len(own))
        return Scores(
            "accuracy",
            {"accuracy": found.accuracy, "f1_macro": found.macro_f1},
            found.f1_by_class,
            counts,
        )

    def errors(self, items: Sequence[LabelledText], predicted: Sequence[str]) -> dict[str, Any]:
        """As in `HeadOfStep`; counts are by expected class and predicted class."""
        listed = []
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for number, (item, guess) in enumerate(zip(items, predicted, strict=True)):
            if guess != item.label:
                counts[item.label][guess] += 1
                own = {"expected": item.label, "predicted": guess}
                listed.append({"item": number, "error": "wrong class"} | own)
        by_class = {label: dict(sorted(own.items())) for label, own in sorted(counts.items())}
        return {"counts": by_class, "errors": listed}

    def in_words(self, items: Sequence[LabelledText], error: Mapping[str, Any]) -> dict[str, str]:
        """As in `HeadOfStep`; the whole text or pair is shown."""
        item = items[error["item"]]
        told = {name: error[name] for name in ("error", "expected", "predicted")}
        context = " ⏎ ".join(text for text in (item.first, item.second) if text)
        return {"document": item.document_id, **told, "context": context}


def _shown(item: Sentence, entity: Entity | None) -> str:
    if entity is None:
        return "–"
    kind, begin, end = entity
    return f"{kind}: {' '.join(item.tokens[begin:end])}"


def _by_owner(items: Iterable[LabelledItem]) -> dict[str, list[int]]:
    """Return the numbers of the items of each patient or document, by the hash of its name."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        found[f"{digest64(b'', 'document', owner_of(item)):016x}"].append(number)
    return dict(sorted(found.items()))
