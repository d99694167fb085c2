"""Labelled text: sentences with entities, and texts or pairs of texts with a class.

Every reader yields a `Sentence` (tokens and IOB2 tags) or a `LabelledText`. Both belong to a
privacy unit and to a fold, and have scores.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Literal

from dp_core.data.corpus import normalised_id
from dp_core.data.hashing import content_name, digest64, document_unit_id, with_copies_numbered
from dp_core.privacy.mechanisms import PrivacyUnit


def owner_of(item: LabelledItem) -> str:
    """Return the id of the item's patient, or of its document if there is no patient.

    Items of one owner are in the same fold and are resampled together.
    """
    return item.patient_id or item.document_id


def unit_ids(items: Sequence[LabelledItem], unit: PrivacyUnit) -> list[str]:
    """Return the id of the privacy unit of each item.

    The id of a unit is a function of the unit's own content (`hashing`). With the unit `example`,
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


Entity = tuple[str, int, int]  # type, first token, token after the last


@dataclass(frozen=True, slots=True)
class Sentence:
    """The tokens of a sentence with one tag each.

    Args:
        tokens: the words.
        tags: `O`, `B-type` or `I-type` in strict IOB2: an entity starts with `B-`.
        document_id: the document; empty where the source names none.
        patient_id: the patient; empty where the source names none. The constructor normalises
            both ids (`normalised_id`).
        overlapped: entities that overlap an entity of the tags, which cannot hold both.
    """

    tokens: tuple[str, ...]
    tags: tuple[str, ...]
    document_id: str = ""
    patient_id: str = ""
    overlapped: tuple[Entity, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.tags):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.tags)} tags")
        for name in ("document_id", "patient_id"):
            object.__setattr__(self, name, normalised_id(getattr(self, name)))


LabelledItem = Sentence | LabelledText


def annotated(
    tokens: Sequence[str], listed: Iterable[Entity], document_id: str = "", patient_id: str = ""
) -> Sentence:
    """Return a sentence with entities that may overlap.

    The tags hold the longest of overlapping entities, and the first of equally long ones. All
    other entities, including repetitions of an entity, are in `overlapped`.

    Args:
        tokens: the words.
        listed: the entities, in any order, each not empty and within the tokens.
        document_id: as in `Sentence`.
        patient_id: as in `Sentence`.
    """
    tags, overlapped = ["O"] * len(tokens), []
    for kind, begin, end in sorted(listed, key=lambda e: (e[1] - e[2], e[1], e[0])):
        if any(tag != "O" for tag in tags[begin:end]):
            overlapped.append((kind, begin, end))
        else:
            tags[begin:end] = [f"B-{kind}", *[f"I-{kind}"] * (end - begin - 1)]
    return Sentence(tuple(tokens), tuple(tags), document_id, patient_id, tuple(overlapped))


def all_entities(sentence: Sentence) -> list[Entity]:
    """Return every entity of a sentence, including entities that overlap a longer one."""
    return [*entities(sentence.tags), *sentence.overlapped]


def with_types(sentences: Iterable[Sentence], types: Iterable[str]) -> list[Sentence]:
    """Return the sentences with only the entities of these types.

    An entity of `overlapped` enters the tags if the entity that it overlaps is removed.
    """
    chosen = frozenset(types)
    return [
        annotated(
            s.tokens, [e for e in all_entities(s) if e[0] in chosen], s.document_id, s.patient_id
        )
        for s in sentences
    ]


def joined(sentences: Iterable[Sentence]) -> list[Sentence]:
    """Return each document as one long sentence, in the order of the documents' first sentences.

    A sentence without a document id is returned unchanged. Joined documents make training and
    scores independent of the sentence splitter.
    """
    documents: dict[tuple[str, str] | int, list[Sentence]] = {}
    for number, s in enumerate(sentences):
        key = (s.document_id, s.patient_id) if s.document_id else number
        documents.setdefault(key, []).append(s)
    return [_concatenated(group) if len(group) > 1 else group[0] for group in documents.values()]


def _concatenated(sentences: Sequence[Sentence]) -> Sentence:
    starts = accumulate((len(s.tokens) for s in sentences), initial=0)
    return replace(
        sentences[0],
        tokens=tuple(chain.from_iterable(s.tokens for s in sentences)),
        tags=tuple(chain.from_iterable(s.tags for s in sentences)),
        overlapped=tuple(
            (kind, start + begin, start + end)
            for start, s in zip(starts, sentences, strict=False)
            for kind, begin, end in s.overlapped
        ),
    )


def label_set(sentences: Iterable[Sentence]) -> tuple[str, ...]:
    """Return every tag of the sentences' entity types, `O` first, then sorted by type."""
    return tags_of_types({tag[2:] for s in sentences for tag in s.tags if tag != "O"})


def tags_of_types(types: Iterable[str]) -> tuple[str, ...]:
    """Return every tag of these entity types, `O` first, then sorted by type."""
    return ("O", *(f"{p}-{t}" for t in sorted(set(types)) for p in "BI"))


_END = re.compile(r"[.!?][\"')\]]*\s+(?=[A-Z0-9\"'(\[])")
_NOT_AN_END = re.compile(
    r"(?:\b(?:[A-Z]|vs|Dr|Mr|Mrs|Ms|Prof|St|al|e\.g|i\.e|cf|approx|Fig|No|resp|ca|etc|sp|spp))\.$"
)
_TOKEN = re.compile(r"\w+|[^\w\s]")


def sentence_spans(
    text: str, entities: Sequence[tuple[int, int]], breaks: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """Return the (start, end) of each sentence.

    Args:
        text: running text.
        entities: spans that no sentence boundary may cut.
        breaks: offsets at which a sentence always begins (the abstract, after the title).
    """
    cuts = {0, len(text), *breaks}
    for match in _END.finditer(text):
        stop = match.start() + 1
        if not _NOT_AN_END.search(text[max(0, stop - 12) : stop]):
            cuts.add(match.end())
    kept = _outside(sorted(cuts), sorted(entities))
    return [(a, b) for a, b in pairwise(kept) if text[a:b].strip()]


def _outside(cuts: list[int], entities: list[tuple[int, int]]) -> list[int]:
    """Return the cuts that lie inside no entity; both lists are sorted."""
    kept = []
    number = reach = 0
    for cut in cuts:
        while number < len(entities) and entities[number][0] < cut:
            reach = max(reach, entities[number][1])
            number += 1
        if reach <= cut:
            kept.append(cut)
    return kept


def token_spans(
    text: str, begin: int, end: int, entities: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the (start, end) of each token between two offsets.

    A token is a run of word characters or a single punctuation mark; entity edges cut tokens.
    """
    edges = sorted({e for span in entities for e in span if begin < e < end} | {begin, end})
    return [m.span() for a, b in pairwise(edges) for m in _TOKEN.finditer(text, a, b)]


@dataclass(frozen=True)
class Score:
    """Counts of entities or classes, with the precision, recall and F1 that they give.

    Args:
        correct: number of right predictions.
        predicted: number of predictions.
        expected: number of entities in the text, or of texts.
    """

    correct: int
    predicted: int
    expected: int

    @property
    def precision(self) -> float:
        """Share of the predictions that are right; 0 if there are none."""
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Share of the expected entities or texts that were predicted; 0 if there are none."""
        return self.correct / self.expected if self.expected else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall; 0 if nothing is predicted or expected."""
        both = self.predicted + self.expected
        return 2 * self.correct / both if both else 0.0


@dataclass(frozen=True)
class TaskScores:
    """Scores over all entities or texts (micro average), and by entity type or class.

    Of texts, each with one predicted and one expected class, `micro.recall` is the accuracy.
    """

    micro: Score
    by_type: dict[str, Score]

    @classmethod
    def of(
        cls, correct: Counter[str], predicted: Counter[str], expected: Counter[str]
    ) -> TaskScores:
        """Return the scores, given the counts by type."""
        return cls(
            Score(correct.total(), predicted.total(), expected.total()),
            {
                kind: Score(correct[kind], predicted[kind], expected[kind])
                for kind in sorted(expected.keys() | predicted.keys())
            },
        )

    @property
    def macro_f1(self) -> float:
        """Mean F1 over the types; 0 without any type."""
        scores = [of_type.f1 for of_type in self.by_type.values()]
        return sum(scores) / len(scores) if scores else 0.0


def class_scores(expected: Sequence[str], predicted: Sequence[str]) -> TaskScores:
    """Return the scores of predicted classes.

    Args:
        expected: the right class of each text.
        predicted: the predicted class of each text.

    Raises:
        ValueError: the two sequences differ in length.
    """
    pairs = zip(expected, predicted, strict=True)
    right = Counter(label for label, guess in pairs if label == guess)
    return TaskScores.of(right, Counter(predicted), Counter(expected))


def entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of one sentence's IOB2 tags.

    `B-` begins an entity, and directly following `I-` of the same type continue it. Any other `I-`
    belongs to no entity.
    """
    out: list[Entity] = []
    open_type = ""
    for i, tag in enumerate(tags):
        prefix, _, kind = tag.partition("-")
        if prefix == "B":
            out.append((kind, i, i + 1))
            open_type = kind
        elif prefix == "I" and kind == open_type:
            out[-1] = (kind, out[-1][1], i + 1)
        else:
            open_type = ""
    return out


def score(expected: Iterable[Sentence], predicted: Iterable[Sequence[str]]) -> TaskScores:
    """Return the strict scores of predicted tags.

    A predicted entity is right if its type and both ends are right (Uzuner et al. 2011, JAMIA
    18:552: the "class exact span" of that task's scorer). Every entity of the text is expected,
    including entities that overlap another entity or repeat it. Since tags cannot hold two
    overlapping entities, one of them is then counted as missed.

    Args:
        expected: sentences with their right entities.
        predicted: IOB2 tags for each of the sentences.

    Raises:
        ValueError: the two sequences, or the tags of a sentence, differ in length.
    """
    correct: Counter[str] = Counter()
    guessed: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    for right, guess in zip(expected, predicted, strict=True):
        if len(right.tags) != len(guess):
            raise ValueError(f"{len(right.tags)} tags are expected, {len(guess)} were predicted")
        listed, tagged = all_entities(right), entities(guess)
        wanted.update(kind for kind, _, _ in listed)
        guessed.update(kind for kind, _, _ in tagged)
        correct.update(kind for kind, _, _ in set(listed).intersection(tagged))  # repetitions once
    return TaskScores.of(correct, guessed, wanted)


Kind = Literal["missed", "spurious", "wrong type", "wrong boundary"]


@dataclass(frozen=True)
class TaggingError:
    """An entity with a missed, wrong or spurious prediction.

    Attributes:
        kind: spurious: the predicted entity overlaps no expected one; missed: the expected entity
            overlaps no predicted one; wrong type: both ends are right; wrong boundary: the two
            entities overlap but differ in their ends.
        expected: the right entity; None for a spurious one.
        predicted: the wrong entity; None for a missed one.
    """

    kind: Kind
    expected: Entity | None
    predicted: Entity | None


def tagging_errors(right: Sentence, guess: Sequence[str]) -> list[TaggingError]:
    """Return the errors in the predicted tags of a sentence, each entity in one error at most.

    Args:
        right: the sentence with its right entities.
        guess: predicted IOB2 tags.
    """
    wanted, tagged = all_entities(right), entities(guess)
    missing = sorted((Counter(wanted) - Counter(tagged)).elements(), key=lambda e: (*e[1:], e[0]))
    wrong = sorted(set(tagged) - set(wanted), key=lambda e: (*e[1:], e[0]))
    errors: list[TaggingError] = []
    pairs: tuple[tuple[Kind, Callable[[Entity, Entity], bool]], ...] = (
        ("wrong type", lambda a, b: a[1:] == b[1:]),
        ("wrong boundary", lambda a, b: a[0] == b[0] and a[1] < b[2] and b[1] < a[2]),
        ("wrong boundary", lambda a, b: a[1] < b[2] and b[1] < a[2]),  # and of another type
    )
    for kind, matches in pairs:
        for entity in list(missing):
            other = next((e for e in wrong if matches(entity, e)), None)
            if other is not None:
                errors.append(TaggingError(kind, entity, other))
                missing.remove(entity)
                wrong.remove(other)
    errors += [TaggingError("missed", entity, None) for entity in missing]
    return errors + [TaggingError("spurious", None, entity) for entity in wrong]
