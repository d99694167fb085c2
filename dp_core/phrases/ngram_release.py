"""Differentially private n-gram extraction in rounds (DPNE: Kim et al. 2021, arXiv:2108.02831).

A phrase is a run of n words of one text, as BERT splits words (punctuation marks are words). In the
first round every word of a candidate must be known from an earlier release; in each later round
every shorter phrase within a candidate must have been released in the round before. So what may be
counted follows from released values alone. A unit counts towards at most N candidates a round:
those first whose rarest part has the highest released count; equals are drawn by its own coins.

*Theorem.* Given the earlier rounds' outputs, a round is a thresholded histogram in which one unit
moves at most N counts, each by 1: whatever those outputs were, its privacy loss is dominated by
that of `ThresholdedHistogram`. So all rounds together are dominated by the composition (adaptive
composition of dominating pairs: Zhu, Dong and Wang 2022, arXiv:2106.08567, Theorem 10).

A round is a function of one shard of the units (`count_shard`) and a sum (`merged`); noise is drawn
once, after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dp_core.data.hashing import generator
from dp_core.data.privacy_units import Unit
from dp_core.data.tokens import split_words
from dp_core.errors import PlanError
from dp_core.vocabulary.dp_histogram import SetCounts, release

if TYPE_CHECKING:
    from dp_core.phrases.calibration import PhrasePlan
    from dp_core.privacy.seed_store import PrivacySeed

Counts = Mapping[str, int]  # a phrase, its words joined by single spaces -> noised count


@dataclass(frozen=True)
class Candidates:
    """What may be counted in a round: phrases all of whose parts were released before.

    Attributes:
        length: words of a phrase.
        part_length: words of a part: 1 in the first round, else those of the round before.
        parts: released parts and their noised counts (or another public or released weight).
    """

    length: int
    part_length: int
    parts: Counts

    def of(self, texts: Iterable[str]) -> dict[str, int]:
        """Return a unit's candidates, each with the least count among its parts."""
        found: dict[str, int] = {}
        size, parts = self.part_length, self.parts
        for text in texts:
            words = split_words(text)
            counts = [
                parts.get(" ".join(words[i : i + size]), -1) for i in range(len(words) - size + 1)
            ]
            inner = self.length - size + 1  # parts within a phrase
            for start in range(len(words) - self.length + 1):
                least = min(counts[start : start + inner])
                if least >= 0:
                    found[" ".join(words[start : start + self.length])] = least
        return found


def contribution(found: Mapping[str, int], per_unit: int, unit_id: str, key: bytes) -> list[str]:
    """Return the phrases that a unit counts towards: N at most, by their parts' released counts.

    Args:
        found: the unit's candidates and the least count among the parts of each.
        per_unit: N.
        unit_id: whose candidates these are.
        key: coins for equals, which depend on the unit alone.
    """
    phrases = sorted(found)  # the order of what was found says where it stood
    if len(phrases) > per_unit:
        generator(key, "phrases", unit_id).shuffle(phrases)
        phrases.sort(key=lambda phrase: -found[phrase])
    return phrases[:per_unit]


def count_shard(
    units: Iterable[Unit], candidates: Candidates, per_unit: int, key: bytes
) -> SetCounts:
    """Return how many units of a shard count towards each candidate. Private."""
    return aggregate(
        (contribution(candidates.of(u.texts), per_unit, u.unit_id, key) for u in units), per_unit
    )


def aggregate(items: Iterable[Collection[str]], per_unit: int) -> SetCounts:
    """Return how many units hold each item, of units that hold at most N, each once. Private.

    Raises:
        PlanError: a unit has more items, or one of them twice: σ is not for it.
    """
    counts = SetCounts()
    counts.words_per_unit = per_unit
    for held in items:
        if len(held) > per_unit or len(set(held)) < len(held):
            raise PlanError("a unit's phrases were not bounded", where="phrase counts")
        counts.update(held)
    return counts


def merged(shards: Iterable[SetCounts]) -> SetCounts:
    """Return the sum of the shards' counts: each unit stands in one shard.

    Raises:
        PlanError: there is none, or they were bounded unlike.
    """
    shards = list(shards)
    bounds = {shard.words_per_unit for shard in shards}
    if len(bounds) != 1:
        raise PlanError("the shards have no one bound", where="phrase counts")
    total = SetCounts()
    (total.words_per_unit,) = bounds
    for shard in shards:
        total.update(shard)
    return total


def release_phrases(
    shards: Callable[[], Iterable[Iterable[Unit]]],
    plan: PhrasePlan,
    words: Counts,
    seed: PrivacySeed,
    context: bytes,
) -> dict[int, dict[str, int]]:
    """Return the noised counts of each round that reach the threshold, by length of phrase.

    Only this result is released; its privacy is `plan`'s. The same seed and context give the same
    noise, so that a retry of the same release reveals nothing more.

    Args:
        shards: gives all units anew in every round, each unit once, in any number of shards.
        plan: rounds, noise and threshold.
        words: words that may stand in a phrase, with a weight each; a release or public. They
            must not come from private text in any other way.
        seed: the privacy seed of this reservation.
        context: what the noise is bound to (a digest of data and plan).
    """
    key = seed.derive("contribution bounding")
    released: dict[int, dict[str, int]] = {}
    parts, part_length = words, 1
    for length in plan.lengths:
        candidates = Candidates(length, part_length, parts)
        counts = merged(count_shard(shard, candidates, plan.per_unit, key) for shard in shards())
        bound_to = context + f" phrases of {length} words".encode()
        released[length] = release(counts, plan.round_plan(), seed, bound_to)
        parts, part_length = released[length], length
    return released
