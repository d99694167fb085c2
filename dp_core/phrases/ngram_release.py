"""Differentially private n-gram extraction in rounds (DPNE: Kim et al. 2021, arXiv:2108.02831).

A phrase is a run of n words of one text, as BERT splits words (punctuation marks are words). In the
first round every word of a candidate must be known from an earlier release; in each later round
every shorter phrase within a candidate must have been released in the round before. So what may be
counted follows from released values alone.

A round is a partition selection (`dp_core.vocabulary.partition_selection`), whose items are the
candidates: a unit brings at most N of them, drawn by its own coins.

*Theorem.* Given the earlier rounds' outputs, which items a unit brings is a function of that unit
alone: whatever those outputs were, the privacy loss of a round is dominated by that of the round's
mechanism. So all rounds together are dominated by the composition (adaptive composition of
dominating pairs: Zhu, Dong and Wang 2022, arXiv:2106.08567, Theorem 10).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dp_core.data.privacy_units import Unit
from dp_core.data.tokens import split_words
from dp_core.vocabulary.partition_selection import ItemSets, item_sets

if TYPE_CHECKING:
    from dp_core.phrases.calibration import PhrasePlan
    from dp_core.privacy.seed_store import PrivacySeed

Counts = Mapping[str, int]  # a phrase, its words joined by single spaces -> estimate of its units


@dataclass(frozen=True)
class Candidates:
    """What may be counted in a round: phrases all of whose parts were released before.

    Attributes:
        length: words of a phrase.
        part_length: words of a part: 1 in the first round, else those of the round before.
        parts: released (or public) parts.
    """

    length: int
    part_length: int
    parts: Collection[str]

    def of(self, texts: Iterable[str]) -> set[str]:
        """Return the candidates that a unit's texts hold."""
        found: set[str] = set()
        size, parts = self.part_length, self.parts
        inner = self.length - size + 1  # parts within a phrase
        for text in texts:
            words = split_words(text)
            run = 0  # released parts in a row, up to here
            for last in range(size, len(words) + 1):
                run = run + 1 if " ".join(words[last - size : last]) in parts else 0
                if run >= inner:
                    found.add(" ".join(words[last - self.length : last]))
        return found


def phrase_sets(
    units: Iterable[Unit],
    candidates: Candidates,
    per_unit: int,
    key: bytes,
    declared_units: int | None = None,
) -> ItemSets:
    """Return the bounded candidates of one shard's units. Private; arguments as of `item_sets`."""
    held = ((unit.unit_id, candidates.of(unit.texts)) for unit in units)
    return item_sets(held, per_unit, key, declared_units=declared_units)


def release_phrases(
    shards: Callable[[], Iterable[Iterable[Unit]]],
    plan: PhrasePlan,
    words: Collection[str],
    seed: PrivacySeed,
    context: bytes,
) -> dict[int, dict[str, int]]:
    """Return the released phrases of each round, by length, with estimates of their units.

    Only this result is released; its privacy is `plan`'s. The same seed and context give the same
    noise, so that a retry of the same release reveals nothing more.

    Args:
        shards: gives all units anew in every round, each unit once, in any number of shards.
        plan: rounds and their mechanism.
        words: words that may stand in a phrase; a release or public. They must not come from
            private text in any other way.
        seed: the privacy seed of this reservation.
        context: what the noise is bound to (a digest of data and plan).

    Raises:
        BadInput: more units than declared. (How many there are is private, and not said.)
    """
    key = seed.derive("contribution bounding")
    each = plan.each_round
    released: dict[int, dict[str, int]] = {}
    parts, part_length = words, 1
    for length in plan.lengths:
        candidates = Candidates(length, part_length, parts)
        sets = [
            phrase_sets(shard, candidates, each.items_per_unit, key, each.declared_units)
            for shard in shards()
        ]
        bound_to = context + f" phrases of {length} words".encode()
        released[length] = each.release(sets, seed, bound_to)
        parts, part_length = released[length], length
    return released
