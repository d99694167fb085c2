"""Entity scores as seqeval's strict mode gives them for IOB2: exact boundaries, exact type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
    correct: dict[str, int] = {}
    found: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for right, guess in zip(expected, predicted, strict=True):
        if len(right) != len(guess):
            raise ValueError(f"{len(right)} tags are expected, {len(guess)} were predicted")
        right_set, guess_set = set(entities(right)), set(entities(guess))
        for counter, members in (
            (wanted, right_set),
            (found, guess_set),
            (correct, right_set & guess_set),
        ):
            for kind, _, _ in members:
                counter[kind] = counter.get(kind, 0) + 1
    by_type = {
        kind: Score(correct.get(kind, 0), found.get(kind, 0), wanted.get(kind, 0))
        for kind in sorted(wanted.keys() | found.keys())
    }
    micro = Score(sum(correct.values()), sum(found.values()), sum(wanted.values()))
    return EntityScores(micro, by_type)
