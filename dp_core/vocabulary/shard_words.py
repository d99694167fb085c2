"""The words of a corpus, counted or gathered into sets: functions of one shard, and their merge.

A worker that runs one is told everything by its fields. It is never told a privacy seed: of that
comes at most a key for drawing the words that count, which says nothing of the noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dp_core.data.corpus import Shard
from dp_core.data.privacy_units import is_held_out, words_of_units
from dp_core.data.word_codes import HeldItems, added_counts
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.vocabulary.gathered_sets import GatheredSets
from dp_core.vocabulary.item_sets import ItemSets, bounded_sets
from dp_core.vocabulary.subwords import KINDS, SubwordKind

if TYPE_CHECKING:
    from dp_core.cluster.interfaces import ShardMap


@dataclass(frozen=True)
class UnitWords:
    """How the units of a shard and their words are read.

    Attributes:
        unit: what is protected.
        words_per_unit: the length of a tuple, for the unit `example`.
        subwords: the kind of vocabulary, which says what a word is.
        holdout: share of units that are left out.
        holdout_key: public coins that say which.
    """

    unit: PrivacyUnit
    words_per_unit: int
    subwords: SubwordKind = "wordpiece"
    holdout: float = 0.0
    holdout_key: bytes = b""

    def of(self, shard: Shard) -> Iterator[HeldItems]:
        """Yield the distinct words of the shard's units, some units at a time."""
        encode = KINDS[self.subwords].encode
        for block in words_of_units(shard, self.unit, self.words_per_unit, encode):
            if not self.holdout:
                yield block
                continue
            kept = [not is_held_out(u, self.holdout, self.holdout_key) for u in block.unit_ids]
            yield block.those(np.array(kept, np.bool_))


@dataclass(frozen=True)
class WordSets:
    """From a shard to its units' bounded sets of words; the fields are those of `item_sets`."""

    words: UnitWords
    items_per_unit: int
    key: bytes = field(repr=False)
    declared_units: int | None = None
    exclude: frozenset[str] = frozenset()

    def __call__(self, shard: Shard) -> ItemSets:
        """Return the sets of the shard's units."""
        return bounded_sets(
            self.words.of(shard), self.items_per_unit, self.key, self.declared_units, self.exclude
        )


@dataclass(frozen=True)
class WordCounts:
    """From a shard to the number of its units that hold each word, nothing bounded."""

    words: UnitWords

    def __call__(self, shard: Shard) -> tuple[pa.Array, NDArray[np.int64]]:
        """Return words, strings of Arrow, and counts."""
        return added_counts(map(_counted, self.words.of(shard)))


def _counted(block: HeldItems) -> tuple[pa.Array, NDArray[np.int64]]:
    held = np.bincount(block.members, minlength=len(block.items))
    present = np.flatnonzero(held)  # words of units that are left out are not
    return block.items.take(pa.array(present)), held[present]


def word_sets(
    cluster: ShardMap, shards: Sequence[Shard], sets: WordSets, into: GatheredSets
) -> GatheredSets:
    """Gather the sets of all shards, in their order."""
    for found in cluster.map(sets, shards):
        into.append(found)
    return into


def word_counts(cluster: ShardMap, shards: Sequence[Shard], words: UnitWords) -> Counter[str]:
    """Return the number of units that hold each word, nothing bounded: of public text only."""
    items, counts = added_counts(cluster.map(WordCounts(words), shards))
    return Counter(dict(zip(items.to_pylist(), counts.tolist(), strict=True)))
