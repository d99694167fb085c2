"""A sentence with entity labels, as every reader yields it: tokens and IOB2 tags."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from dp_core.data.corpus import normalised_id

Entity = tuple[str, int, int]  # type, first token, token after the last


@dataclass(frozen=True, slots=True)
class Sentence:
    """Tokens and their tags, one each.

    Args:
        tokens: the words.
        tags: `O`, `B-type` or `I-type`; strict IOB2: an entity starts with `B-`.
        document_id: where it comes from; empty where the source does not say.
        patient_id: whose text it is; empty where nobody has said. Both ids are normalised
            (`normalised_id`), whoever makes the sentence.
        overlapped: entities that overlap one of the tags' own, which have one entity a token.
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


def annotated(
    tokens: Sequence[str], found: Iterable[Entity], document_id: str = "", patient_id: str = ""
) -> Sentence:
    """Return a sentence with entities that may overlap.

    Of those that overlap, the longest is the one that the tags hold, of equally long ones the
    first; each of the others is in `overlapped`, also what is given again.

    Args:
        tokens: the words.
        found: the entities, in any order, each within the tokens and not empty.
        document_id: as in `Sentence`.
        patient_id: as in `Sentence`.
    """
    tags, overlapped = ["O"] * len(tokens), []
    for kind, begin, end in sorted(found, key=lambda e: (e[1] - e[2], e[1], e[0])):
        if any(tag != "O" for tag in tags[begin:end]):
            overlapped.append((kind, begin, end))
        else:
            tags[begin:end] = [f"B-{kind}", *[f"I-{kind}"] * (end - begin - 1)]
    return Sentence(tuple(tokens), tuple(tags), document_id, patient_id, tuple(overlapped))


def all_entities(sentence: Sentence) -> list[Entity]:
    """Return every entity of a sentence, those that overlap a longer one among them."""
    return [*entities(sentence.tags), *sentence.overlapped]


def with_types(sentences: Iterable[Sentence], types: Iterable[str]) -> list[Sentence]:
    """Return the sentences with the entities of these types alone; what overlapped may now fit."""
    chosen = frozenset(types)
    return [
        annotated(
            s.tokens, [e for e in all_entities(s) if e[0] in chosen], s.document_id, s.patient_id
        )
        for s in sentences
    ]


def joined(sentences: Iterable[Sentence]) -> list[Sentence]:
    """Return each document as one long sentence, in the order of their first sentences.

    What has no document id stays as it is. How a text was cut into sentences then makes no
    difference to what is learned and scored.
    """
    documents: dict[tuple[str, str] | int, list[Sentence]] = {}
    for number, s in enumerate(sentences):
        key = (s.document_id, s.patient_id) if s.document_id else number
        documents.setdefault(key, []).append(s)
    return [_one(own) if len(own) > 1 else own[0] for own in documents.values()]


def _one(sentences: Sequence[Sentence]) -> Sentence:
    tokens: list[str] = []
    tags: list[str] = []
    overlapped: list[Entity] = []
    for s in sentences:
        overlapped += [
            (kind, begin + len(tokens), end + len(tokens)) for kind, begin, end in s.overlapped
        ]
        tokens += s.tokens
        tags += s.tags
    first = sentences[0]
    return Sentence(
        tuple(tokens), tuple(tags), first.document_id, first.patient_id, tuple(overlapped)
    )


def label_set(sentences: Iterable[Sentence]) -> tuple[str, ...]:
    """Return every tag that the entity types of the sentences can need, `O` first, then sorted."""
    return tags_of_types({tag[2:] for s in sentences for tag in s.tags if tag != "O"})


def tags_of_types(types: Iterable[str]) -> tuple[str, ...]:
    """Return every tag that these entity types can need, `O` first, then sorted by type."""
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
        entities: spans that no sentence may cut.
        breaks: offsets at which a sentence begins in any case (the abstract, after the title).
    """
    cuts = {0, len(text), *breaks}
    for match in _END.finditer(text):
        stop = match.start() + 1
        if not _NOT_AN_END.search(text[max(0, stop - 12) : stop]):
            cuts.add(match.end())
    kept = _outside(sorted(cuts), sorted(entities))
    return [(a, b) for a, b in pairwise(kept) if text[a:b].strip()]


def _outside(cuts: list[int], entities: list[tuple[int, int]]) -> list[int]:
    """Return the cuts that lie in no entity; both lists are sorted."""
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

    A token is a run of word characters or one mark; the edges of entities cut tokens.
    """
    edges = sorted({e for span in entities for e in span if begin < e < end} | {begin, end})
    return [m.span() for a, b in pairwise(edges) for m in _TOKEN.finditer(text, a, b)]


@dataclass(frozen=True)
class Score:
    """Counts of entities, and what follows from them.

    Args:
        correct: predicted entities that are right.
        predicted: all predicted ones.
        expected: all right ones.
    """

    correct: int
    predicted: int
    expected: int

    @property
    def precision(self) -> float:
        """Share of the predicted entities that are right; 0 if there are none."""
        return self.correct / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Share of the right entities that were predicted; 0 if there are none."""
        return self.correct / self.expected if self.expected else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall; 0 if nothing is predicted or expected."""
        both = self.predicted + self.expected
        return 2 * self.correct / both if both else 0.0


@dataclass(frozen=True)
class EntityScores:
    """Scores over all entities (micro average), and by type."""

    micro: Score
    by_type: dict[str, Score]


def entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of one sentence's IOB2 tags.

    Strictly: `B-` begins one, directly following `I-` of the same type continue it; any other
    `I-` belongs to none.
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


def score(expected: Iterable[Sentence], predicted: Iterable[Sequence[str]]) -> EntityScores:
    """Return the strict scores of predicted tags.

    An entity is right if its type and both ends are (Uzuner et al. 2011, JAMIA 18:552: the "class
    exact span" of that task's scorer). Every entity of the text is expected, also one that overlaps
    another or is listed again: tags cannot hold both, so that one of the two is then missed.

    Args:
        expected: sentences with their right entities.
        predicted: as many IOB2 tags for as many sentences.

    Raises:
        ValueError: the two do not have the same lengths.
    """
    correct: Counter[str] = Counter()
    guessed: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    for right, guess in zip(expected, predicted, strict=True):
        if len(right.tags) != len(guess):
            raise ValueError(f"{len(right.tags)} tags are expected, {len(guess)} were predicted")
        listed, found = all_entities(right), entities(guess)
        wanted.update(kind for kind, _, _ in listed)
        guessed.update(kind for kind, _, _ in found)
        correct.update(kind for kind, _, _ in set(listed).intersection(found))  # once at most
    return EntityScores(
        Score(correct.total(), guessed.total(), wanted.total()),
        {
            k: Score(correct[k], guessed[k], wanted[k])
            for k in sorted(wanted.keys() | guessed.keys())
        },
    )


Kind = Literal["missed", "spurious", "wrong type", "wrong boundary"]


@dataclass(frozen=True)
class TaggingError:
    """One entity that was not found as it is, or one that is not there.

    Attributes:
        kind: spurious: nothing expected overlaps it; missed: nothing predicted overlaps it; wrong
            type: right ends; wrong boundary: it overlaps what is expected, and its ends are others.
        expected: the right entity; None of a spurious one.
        predicted: what overlaps it, and is wrong; None of a missed one.
    """

    kind: Kind
    expected: Entity | None
    predicted: Entity | None


def tagging_errors(right: Sentence, guess: Sequence[str]) -> list[TaggingError]:
    """Return what is wrong with the predicted tags of a sentence, each entity in one error only.

    Args:
        right: with its right entities.
        guess: predicted IOB2 tags.
    """
    wanted, found = all_entities(right), entities(guess)
    missing = sorted((Counter(wanted) - Counter(found)).elements(), key=lambda e: (*e[1:], e[0]))
    wrong = sorted(set(found) - set(wanted), key=lambda e: (*e[1:], e[0]))
    errors: list[TaggingError] = []
    pairs: tuple[tuple[Kind, Callable[[Entity, Entity], bool]], ...] = (
        ("wrong type", lambda a, b: a[1:] == b[1:]),
        ("wrong boundary", lambda a, b: a[0] == b[0] and a[1] < b[2] and b[1] < a[2]),
        ("wrong boundary", lambda a, b: a[1] < b[2] and b[1] < a[2]),  # and of another type
    )
    for kind, belong in pairs:
        for one in list(missing):
            other = next((e for e in wrong if belong(one, e)), None)
            if other is not None:
                errors.append(TaggingError(kind, one, other))
                missing.remove(one)
                wrong.remove(other)
    errors += [TaggingError("missed", one, None) for one in missing]
    return errors + [TaggingError("spurious", None, one) for one in wrong]
