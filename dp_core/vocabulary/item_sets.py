"""Bounded sets of the items that units hold: of one shard, and of all shards together.

Items are words, phrases, or other text in a unit's content. A worker makes the bounded sets of a
shard (`BoundedSets`). `GatheredSets` holds the sets of all shards, on disk beyond a limit, with
one order of all items. The sets are merged like sorted runs: one range of items after the other is
read from every shard, and its distinct items are numbered consecutively. The rounds of a mechanism
then read numbers, one shard after the other. Only released items are read as text again.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dp_core.data.privacy_units import bounded_sample, refuse_more_than_declared
from dp_core.data.tokens import HeldItems, joined_items
from dp_core.errors import BadInput, PlanError


@dataclass(frozen=True)
class UnitSets:
    """The items, by number, of each of several units. Private.

    Attributes:
        starts: int64 `[units + 1]`; unit u holds `members[starts[u]:starts[u + 1]]`.
        members: int32, numbers of items; ascending and distinct within a unit.
    """

    starts: NDArray[np.int64] = field(repr=False)
    members: NDArray[np.int32] = field(repr=False)

    @property
    def units(self) -> int:
        """Number of units. Private."""
        return len(self.starts) - 1

    @property
    def owners(self) -> NDArray[np.int64]:
        """The unit of each of `members`."""
        return np.repeat(np.arange(self.units), np.diff(self.starts))


@dataclass(frozen=True)
class ItemSets(UnitSets):
    """Bounded item sets of the units of one shard, each unit once. Private.

    Attributes:
        items: distinct items of the shard in ascending order, Arrow strings; `members` are
            indices of it.
        items_per_unit: N, largest number of distinct items of a unit.
    """

    items: pa.Array = field(repr=False)
    items_per_unit: int


@dataclass(frozen=True)
class BoundedSets:
    """Maps a shard to its units' sets of items, bounded before they are counted.

    Public items, `exclude`, are removed from a unit before its items are bounded, so that all N of
    them may be other items. **This does not change the sensitivity**: the list is fixed before the
    private text is read, so a unit's items are still a function of that unit only (its items
    without the list's, bounded), and still at most N. A list that depended on the private text
    would violate both. The list is therefore made of public text, and the release's manifest
    contains its digest.

    Attributes:
        held: yields the distinct items of the shard's units, each unit once and in one block.
        items_per_unit: N. Of a unit with more distinct items, N are sampled uniformly by the unit's
            coins.
        key: public coins for that sample.
        declared_units: the public upper bound on the number of units (of this shard), if checked.
        exclude: public items, which need no release and are not counted.

    Raises:
        BadInput: N is below 1, or (when called) more units than declared. (The message does not
            state their private number.)
    """

    held: Callable[[Any], Iterable[HeldItems]]
    items_per_unit: int
    key: bytes = field(repr=False)
    declared_units: int | None = None
    exclude: Collection[str] = frozenset()

    def __post_init__(self) -> None:
        if self.items_per_unit < 1:
            raise BadInput(
                f"{self.items_per_unit} is below 1", where="items_per_unit", fix="Use 1 or more."
            )

    def __call__(self, shard: Any) -> ItemSets:
        """Return the sets of the shard's units."""
        held = joined_items(self._bounded(self.held(shard)))
        rank = np.empty(len(held.items), np.int64)
        ascending = pc.sort_indices(held.items)
        rank[ascending.to_numpy()] = np.arange(len(rank))
        # Sort within units too, so that rounded sums do not depend on other units of the shard.
        size = max(1, len(rank))
        owners = np.repeat(np.arange(len(held.unit_ids)), np.diff(held.starts))
        pairs = owners * size + rank[held.members]
        pairs.sort()
        members = (pairs % size).astype(np.int32)
        return ItemSets(held.starts, members, held.items.take(ascending), self.items_per_unit)

    def _bounded(self, blocks: Iterable[HeldItems]) -> Iterator[HeldItems]:
        public = pa.array(sorted(self.exclude), pa.large_string())
        units = 0
        for block in blocks:
            units += len(block.unit_ids)
            if self.declared_units is not None:
                refuse_more_than_declared(units, self.declared_units)
            private = ~pc.is_in(block.items, value_set=public).to_numpy(zero_copy_only=False)
            kept = block.keeping(private[block.members])
            yield _bounded(kept, self.items_per_unit, self.key)


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
    held = block.keeping(kept)
    used, members = np.unique(held.members, return_inverse=True)
    items = held.items.take(pa.array(used))
    return HeldItems(held.unit_ids, items, held.starts, members.astype(np.int32))


_LIMIT = 1 << 26  # bytes in memory
_TOGETHER = 1 << 17  # approximate number of items of all shards in one merge
_BATCH = 1 << 10  # items of a shard that one of the possible bounds of a merge represents
_TEXT = pa.large_string()


class GatheredSets:
    """The item sets of shards, which are added and then read many times by number.

    Items of all shards are numbered in ascending order (of code points) at the first read. After
    that no shard can be added. Arrays beyond the limit are memory maps of files without a name,
    which the operating system deletes with the last reference, even if the process is killed.

    Args:
        folder: for files with private text. It is created when needed, readable only by its owner,
            and removed with its content when the context ends.
        limit: bytes of the sets that are held in memory.

    Attributes:
        units: number of units of all shards. Private.
        items_per_unit: the loosest bound of any shard.
    """

    def __init__(self, folder: Path, limit: int = _LIMIT) -> None:
        self._folder, self._limit = folder, limit
        self.clear()

    @classmethod
    def of(cls, shards: Iterable[ItemSets]) -> GatheredSets:
        """Return the sets of shards that are already in memory."""
        gathered = cls(Path(os.devnull), limit=1 << 62)
        gathered.extend(shards)
        return gathered

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def clear(self) -> None:
        """Remove all sets and files."""
        if self._folder.is_dir():
            shutil.rmtree(self._folder)
        self.units, self.items_per_unit = 0, 0
        self._left = self._limit
        self._shards: list[ItemSets] = []  # until the items are numbered
        self._numbered: list[UnitSets] = []
        self._items: list[pa.Array] | None = None  # of all shards, by range

    def extend(self, shards: Iterable[ItemSets]) -> None:
        """Add the sets of the next shards.

        Raises:
            PlanError: the units of a shard are not bounded.
        """
        if self._items is not None:
            raise ValueError("no shard can be added after the items were numbered")
        for sets in shards:
            if sets.items_per_unit < 1:
                raise PlanError(
                    f"the counts allow {sets.items_per_unit} items per unit",
                    where="items_per_unit",
                    fix="Count and calibrate with the same bound.",
                )
            self.units += sets.units
            self.items_per_unit = max(self.items_per_unit, sets.items_per_unit)
            self._left -= sets.items.nbytes + sets.members.nbytes + sets.starts.nbytes
            starts, members = self._stored(sets.starts), self._stored(sets.members)
            items = self._kept(sets.items)
            self._shards.append(ItemSets(starts, members, items, sets.items_per_unit))

    @property
    def distinct(self) -> int:
        """Number of distinct items. Private."""
        return sum(map(len, self._items_by_range()))

    def named(self, numbers: NDArray[np.int64]) -> list[str]:
        """Return the items with the given ascending numbers."""
        names: list[str] = []
        first = 0
        for items in self._items_by_range():
            begin, end = np.searchsorted(numbers, [first, first + len(items)])
            names.extend(items.take(pa.array(numbers[begin:end] - first)).to_pylist())
            first += len(items)
        return names

    def __iter__(self) -> Iterator[UnitSets]:
        """Yield the units of each shard, with the numbers of their items."""
        self._items_by_range()
        yield from self._numbered

    def _items_by_range(self) -> list[pa.Array]:
        """Return the distinct items of all shards; the first call numbers them."""
        if self._items is not None:
            return self._items
        self._items = []
        ends = list(itertools.accumulate((len(shard.items) for shard in self._shards), initial=0))
        numbers = self._empty_numbers(ends[-1])  # of the items of each shard, one after the other
        of_shard = [numbers[a:b] for a, b in itertools.pairwise(ends)]
        begins = [0] * len(self._shards)
        first = 0
        for bound in self._bounds():
            spans = [
                slice(begin, _place(shard.items, bound))
                for begin, shard in zip(begins, self._shards, strict=True)
            ]
            parts = [s.items[span] for s, span in zip(self._shards, spans, strict=True)]
            merged = pa.concat_arrays([pa.array([], _TEXT), *parts]).dictionary_encode()
            order = pc.sort_indices(merged.dictionary).to_numpy()
            rank = np.empty(len(order), np.int32)
            rank[order] = np.arange(first, first + len(order), dtype=np.int32)
            cuts = np.cumsum([len(part) for part in parts])[:-1]
            ranks = np.split(rank[merged.indices.to_numpy()], cuts)
            for shard_numbers, span, part_ranks in zip(of_shard, spans, ranks, strict=False):
                shard_numbers[span] = part_ranks
            self._items.append(self._kept(merged.dictionary.take(pa.array(order))))
            first += len(order)
            begins = [span.stop for span in spans]
        for shard, shard_numbers in zip(self._shards, of_shard, strict=True):
            members = self._stored(shard_numbers[shard.members])
            self._numbered.append(UnitSets(shard.starts, members))
        self._shards = []
        return self._items

    def _bounds(self) -> list[str | None]:
        """Return upper bounds of item ranges with few items each; None: no bound."""
        batches = (shard.items[::_BATCH].to_pylist() for shard in self._shards)
        firsts = sorted(itertools.chain.from_iterable(batches))
        return [*sorted(set(firsts[_TOGETHER // _BATCH :: _TOGETHER // _BATCH])), None]

    def _empty_numbers(self, size: int) -> NDArray[np.int32]:
        if not self._spills or not size:
            return np.empty(size, np.int32)
        with self._file() as file:
            return np.memmap(file, np.int32, "w+", shape=size)

    def _stored(self, array: NDArray[Any]) -> NDArray[Any]:
        stored: NDArray[Any] = self._kept(pa.array(array)).to_numpy()
        return stored

    def _kept(self, array: pa.Array) -> pa.Array:
        """Return the array itself, or a memory map of its content once the limit is exceeded."""
        if not self._spills:
            return array
        batch = pa.record_batch([array], ["kept"])
        with self._file() as file:
            with pa.ipc.new_file(file, batch.schema) as out:
                out.write_batch(batch)
            file.flush()
            with pa.memory_map(file.name) as mapped:
                return pa.ipc.open_file(mapped).get_batch(0).column(0)

    @property
    def _spills(self) -> bool:
        return self._left < 0

    def _file(self) -> IO[bytes]:
        """Open a file that only its owner can read, and whose name is removed when it closes."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return tempfile.NamedTemporaryFile(dir=self._folder)


def _place(items: pa.Array, bound: str | None) -> int:
    """Return the number of ascending items below a bound; None: all of them."""
    if bound is None:
        return len(items)
    return bisect_left(range(len(items)), bound, key=lambda i: items[i].as_py())
