"""A sentence with entity labels, as every reader yields it: tokens and IOB2 tags."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dp_core.data.corpus import normalised_id
from dp_core.data.hashing import digest64


@dataclass(frozen=True, slots=True)
class Sentence:
    """Tokens and their tags, one each.

    Args:
        tokens: the words.
        tags: `O`, `B-type` or `I-type`; strict IOB2: an entity starts with `B-`.
        document_id: where it comes from; empty where the source does not say.
        patient_id: whose text it is; empty where nobody has said. Both ids are normalised
            (`normalised_id`), whoever makes the sentence.
    """

    tokens: tuple[str, ...]
    tags: tuple[str, ...]
    document_id: str = ""
    patient_id: str = ""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.tags):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.tags)} tags")
        for name in ("document_id", "patient_id"):
            object.__setattr__(self, name, normalised_id(getattr(self, name)))


def fold_of(sentence: Sentence, folds: int) -> int:
    """Return which fold a sentence is in: that of its patient, or else of its document.

    It is a function of that id alone, so that another document moves nobody from fold to fold: a
    private training on some of the folds is as private as one on all of them. Folds are therefore
    of about the same size, not exactly.

    Args:
        sentence: with a document id.
        folds: how many, 1 or more.
    """
    return digest64(b"", "fold", sentence.patient_id or sentence.document_id) % folds


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


Entity = tuple[str, int, int]  # type, first token, token after the last


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


def score(expected: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> EntityScores:
    """Return the scores of predicted tags.

    Args:
        expected: the right IOB2 tags of each sentence.
        predicted: as many tags for as many sentences.

    Raises:
        ValueError: the two do not have the same lengths.
    """
    correct: Counter[str] = Counter()
    guessed: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    for right, guess in zip(expected, predicted, strict=True):
        if len(right) != len(guess):
            raise ValueError(f"{len(right)} tags are expected, {len(guess)} were predicted")
        right_set, guess_set = set(entities(right)), set(entities(guess))
        wanted.update(kind for kind, _, _ in right_set)
        guessed.update(kind for kind, _, _ in guess_set)
        correct.update(kind for kind, _, _ in right_set & guess_set)
    return EntityScores(
        Score(correct.total(), guessed.total(), wanted.total()),
        {
            k: Score(correct[k], guessed[k], wanted[k])
            for k in sorted(wanted.keys() | guessed.keys())
        },
    )
