"""Bounded sets of the items that units hold, which shards pass to a mechanism.

Items are words, phrases, or other text in a unit's content.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dp_core.data.hashing import digest64
from dp_core.data.privacy_units import bounded_sample
from dp_core.data.word_codes import HeldItems, joined_items
from dp_core.errors import BadInput, PrivateTextRefusal


@dataclass(frozen=True)
class UnitSets:
    """The items, by number, of each of several units. Private.

    Attributes:
        starts: int64 `[units + 1]`; unit u holds `members[starts[u]:starts[u + 1]]`.
        members: int32, numbers of items; ascending and distinct within a unit.
        order: uint64 `[units]`, public coins that order the units for sequential mechanisms.
    """

    starts: NDArray[np.int64] = field(repr=False)
    members: NDArray[np.int32] = field(repr=False)
    order: NDArray[np.uint64] = field(repr=False)

    @property
    def units(self) -> int:
        """Number of units. Private."""
        return len(self.order)

    @property
    def owners(self) -> NDArray[np.int64]:
        """The unit of each of `members`."""
        return np.repeat(np.arange(self.units), np.diff(self.starts))

    def those(self, chosen: NDArray[np.bool_]) -> UnitSets:
        """Return the chosen units."""
        lengths = np.diff(self.starts)
        starts = np.concatenate([[0], np.cumsum(lengths[chosen])]).astype(np.int64)
        return UnitSets(starts, self.members[np.repeat(chosen, lengths)], self.order[chosen])

    def numbered(self, numbers: NDArray[np.int32]) -> UnitSets:
        """Return the units with their item numbers replaced by other ascending numbers."""
        return UnitSets(self.starts, numbers[self.members], self.order)

    def write(self, file: IO[bytes]) -> None:
        """Append the units to a file at its current position."""
        for array in (self.starts, self.members, self.order):
            np.save(file, array)

    @staticmethod
    def read(file: IO[bytes]) -> UnitSets:
        """Return the units that `write` wrote at the file's current position."""
        return UnitSets(*(np.load(file, allow_pickle=False) for _ in range(3)))


@dataclass(frozen=True)
class ItemSets(UnitSets):
    """Bounded item sets of the units of one shard, each unit once. Private.

    Attributes:
        items: distinct items of the shard in ascending order, Arrow strings; `members` are
            indices of it.
        items_per_unit: N, largest number of distinct items of a unit. declared_units: largest
            number of units, if checked.
    """

    items: pa.Array = field(repr=False)
    items_per_unit: int
    declared_units: int | None = None


def item_sets(
    units: Iterable[tuple[str, Iterable[str]]],
    items_per_unit: int,
    key: bytes,
    *,
    declared_units: int | None = None,
    exclude: Collection[str] = frozenset(),
) -> ItemSets:
    """Return the units' sets of items, bounded before they are counted.

    Public items, `exclude`, are removed from a unit before its items are bounded, so that all N of
    them may be other items. **This does not change the sensitivity**: the list is fixed before the
    private text is read, so a unit's items are still a function of that unit only (its items
    without the list's, bounded), and still at most N. A list that depended on the private text
    would violate both. The list is therefore made of public text, and the release's manifest
    contains its digest.

    Args:
        units: (id, items) of every unit of the shard, once.
        items_per_unit: N. Of a unit with more distinct items, N are sampled uniformly by the unit's
            coins.
        key: public coins for that sample, and for the order of units.
        declared_units: the public upper bound on the number of units (of this shard).
        exclude: public items, which need no release and are not counted.

    Raises:
        BadInput: more units than declared. (The message does not state their private number.)
    """
    return bounded_sets(_held(units), items_per_unit, key, declared_units, exclude)


def bounded_sets(
    blocks: Iterable[HeldItems],
    items_per_unit: int,
    key: bytes,
    declared_units: int | None,
    exclude: Collection[str],
) -> ItemSets:
    """Return the bounded sets of units that arrive in blocks; no unit is split over blocks.

    See `item_sets` for the arguments and their meaning for privacy.

    Raises:
        BadInput: as in `item_sets`.
    """
    if items_per_unit < 1:
        raise BadInput(f"{items_per_unit} is below 1", where="items_per_unit", fix="Use 1 or more.")
    public = pa.array(sorted(exclude), pa.large_string())
    order: list[int] = []

    def bounded() -> Iterator[HeldItems]:
        for block in blocks:
            if declared_units is not None and len(order) + len(block.unit_ids) > declared_units:
                raise PrivateTextRefusal(
                    f"the corpus holds more units than the declared bound of {declared_units}",
                    where="declared_units",
                    fix="Declare a higher bound, from public knowledge.",
                )
            order.extend(digest64(key, "order of units", unit_id) for unit_id in block.unit_ids)
            yield _bounded(_without(block, public), items_per_unit, key)

    held = joined_items(bounded())
    rank = np.empty(len(held.items), np.int64)
    ascending = pc.sort_indices(held.items)
    rank[ascending.to_numpy()] = np.arange(len(rank))
    # Sort within units too, so that rounded sums do not depend on other units of the shard.
    size = max(1, len(rank))
    pairs = np.repeat(np.arange(len(order)), np.diff(held.starts)) * size + rank[held.members]
    pairs.sort()
    return ItemSets(
        held.starts,
        (pairs % size).astype(np.int32),
        np.array(order, np.uint64),
        held.items.take(ascending),
        items_per_unit,
        declared_units,
    )


def _held(units: Iterable[tuple[str, Iterable[str]]]) -> Iterator[HeldItems]:
    """Yield the distinct items of units in blocks of a thousand units."""
    source = iter(units)
    while block := [(unit_id, set(items)) for unit_id, items in itertools.islice(source, 1000)]:
        every = [item for _, items in block for item in items]
        numbered = pa.array(every, pa.large_string()).dictionary_encode()
        yield HeldItems(
            [unit_id for unit_id, _ in block],
            numbered.dictionary,
            np.cumsum([0, *(len(items) for _, items in block)]),
            numbered.indices.to_numpy(),
        )


def _without(block: HeldItems, public: pa.Array) -> HeldItems:
    """Return a block without the public items."""
    if not len(public):
        return block
    private = ~pc.is_in(block.items, value_set=public).to_numpy(zero_copy_only=False)
    kept = private[block.members]
    starts = np.concatenate([[0], np.cumsum(kept)])[block.starts]
    return HeldItems(block.unit_ids, block.items, starts, block.members[kept])


def _bounded(block: HeldItems, items_per_unit: int, key: bytes) -> HeldItems:
    """Return a block in which units with more than N items keep a sample of N."""
    beyond = np.flatnonzero(np.diff(block.starts) > items_per_unit)
    kept = np.ones(len(block.members), np.bool_)
    # Sort by the items' text, which is the same in all shards; their numbers are not.
    rank = np.empty(len(block.items), np.int64)
    if len(beyond):
        rank[pc.sort_indices(block.items).to_numpy()] = np.arange(len(rank))
    for u in beyond.tolist():
        start, end = int(block.starts[u]), int(block.starts[u + 1])
        places = (start + np.argsort(rank[block.members[start:end]])).tolist()
        kept[start:end] = False
        kept[bounded_sample(places, items_per_unit, block.unit_ids[u], key)] = True
    starts = np.concatenate([[0], np.cumsum(kept)])[block.starts]
    used, members = np.unique(block.members[kept], return_inverse=True)
    items = block.items.take(pa.array(used))
    return HeldItems(block.unit_ids, items, starts, members.astype(np.int32))
