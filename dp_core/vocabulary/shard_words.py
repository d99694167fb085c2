"""The words of a corpus, counted or gathered into sets: functions of one shard, and their merge.

A worker receives everything by the fields of the function. It never receives a privacy seed, but
at most a key for sampling the words that count, from which the noise cannot be derived.
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
    """Reads the units of a shard and their words.

    Attributes:
        unit: the privacy unit.
        words_per_unit: the length of a tuple, for the unit `example`.
        subwords: the kind of vocabulary, which defines words.
        holdout: share of units that are left out.
        holdout_key: public coins that choose these units.
    """

    unit: PrivacyUnit
    words_per_unit: int
    subwords: SubwordKind = "wordpiece"
    holdout: float = 0.0
    holdout_key: bytes = b""

    def of(self, shard: Shard) -> Iterator[HeldItems]:
        """Yield the distinct words of the shard's units, in blocks of units."""
        encode = KINDS[self.subwords].encode
        for block in words_of_units(shard, self.unit, self.words_per_unit, encode):
            if not self.holdout:
                yield block
                continue
            kept = [not is_held_out(u, self.holdout, self.holdout_key) for u in block.unit_ids]
            yield block.those(np.array(kept, np.bool_))


@dataclass(frozen=True)
class WordSets:
    """Maps a shard to its units' bounded sets of words; fields as in `item_sets`."""

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
    """Maps a shard to the number of its units that hold each word, without bounds."""

    words: UnitWords

    def __call__(self, shard: Shard) -> tuple[pa.Array, NDArray[np.int64]]:
        """Return words, Arrow strings, and counts."""
        return added_counts(map(_counted, self.words.of(shard)))


def _counted(block: HeldItems) -> tuple[pa.Array, NDArray[np.int64]]:
    held = np.bincount(block.members, minlength=len(block.items))
    present = np.flatnonzero(held)  # drops words that only left-out units have
    return block.items.take(pa.array(present)), held[present]


def word_sets(
    cluster: ShardMap, shards: Sequence[Shard], sets: WordSets, into: GatheredSets
) -> GatheredSets:
    """Gather the sets of all shards, in the order of the shards."""
    for shard_sets in cluster.map(sets, shards):
        into.append(shard_sets)
    return into


def word_counts(cluster: ShardMap, shards: Sequence[Shard], words: UnitWords) -> Counter[str]:
    """Return the number of units that hold each word, without bounds; for public text only."""
    items, counts = added_counts(cluster.map(WordCounts(words), shards))
    return Counter(dict(zip(items.to_pylist(), counts.tolist(), strict=True)))
