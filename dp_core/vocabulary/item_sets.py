"""Bounded sets of the items that units hold: of one shard, and of all shards together.

Items are words, phrases, or other text in a unit's content. A worker makes the bounded sets of a
shard (`bounded_sets`). `GatheredSets` holds the sets of all shards, on disk beyond a limit, with
one order of all items. The sets are merged like sorted runs: one range of items after the other is
read from every shard, its distinct items are numbered consecutively, and only these numbers stay in
memory. The rounds of a mechanism then read numbers, one shard after the other. Only released items
are read as text again.
"""

from __future__ import annotations

import itertools
import os
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, Self

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

    def numbered(self, numbers: NDArray[np.int32]) -> UnitSets:
        """Return the units with their item numbers replaced by other ascending numbers."""
        return UnitSets(self.starts, numbers[self.members])

    def write(self, file: IO[bytes]) -> None:
        """Append the units to a file at its current position."""
        for array in (self.starts, self.members):
            np.save(file, array)

    @staticmethod
    def read(file: IO[bytes]) -> UnitSets:
        """Return the units that `write` wrote at the file's current position."""
        return UnitSets(*(np.load(file, allow_pickle=False) for _ in range(2)))


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


def bounded_sets(
    blocks: Iterable[HeldItems],
    items_per_unit: int,
    key: bytes,
    declared_units: int | None,
    exclude: Collection[str],
) -> ItemSets:
    """Return the units' sets of items, bounded before they are counted.

    Public items, `exclude`, are removed from a unit before its items are bounded, so that all N of
    them may be other items. **This does not change the sensitivity**: the list is fixed before the
    private text is read, so a unit's items are still a function of that unit only (its items
    without the list's, bounded), and still at most N. A list that depended on the private text
    would violate both. The list is therefore made of public text, and the release's manifest
    contains its digest.

    Args:
        blocks: the units of the shard, each once and in one block.
        items_per_unit: N. Of a unit with more distinct items, N are sampled uniformly by the unit's
            coins.
        key: public coins for that sample.
        declared_units: the public upper bound on the number of units (of this shard), if checked.
        exclude: public items, which need no release and are not counted.

    Raises:
        BadInput: more units than declared. (The message does not state their private number.)
    """
    if items_per_unit < 1:
        raise BadInput(f"{items_per_unit} is below 1", where="items_per_unit", fix="Use 1 or more.")
    public = pa.array(sorted(exclude), pa.large_string())
    units = 0

    def bounded() -> Iterator[HeldItems]:
        nonlocal units
        for block in blocks:
            units += len(block.unit_ids)
            if declared_units is not None:
                refuse_more_than_declared(units, declared_units)
            yield _bounded(_without(block, public), items_per_unit, key)

    held = joined_items(bounded())
    rank = np.empty(len(held.items), np.int64)
    ascending = pc.sort_indices(held.items)
    rank[ascending.to_numpy()] = np.arange(len(rank))
    # Sort within units too, so that rounded sums do not depend on other units of the shard.
    size = max(1, len(rank))
    pairs = np.repeat(np.arange(units), np.diff(held.starts)) * size + rank[held.members]
    pairs.sort()
    return ItemSets(
        held.starts,
        (pairs % size).astype(np.int32),
        held.items.take(ascending),
        items_per_unit,
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


_LIMIT = 1 << 26  # bytes in memory
_TOGETHER = 1 << 17  # approximate number of items of all shards in one merge
_BATCH = 1 << 10  # items of a shard in one batch, whose first item is kept in memory
_TEXT = pa.large_string()


class GatheredSets:
    """The item sets of shards, which are appended and then read many times by number.

    Items of all shards are numbered in ascending order (of code points) at the first read. After
    that no shard can be appended.

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
        for shard in shards:
            gathered.append(shard)
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
        self._runs: list[_Run] = []
        self._items: list[_Items] | None = None  # of all shards, by range

    def append(self, sets: ItemSets) -> None:
        """Add the sets of the next shard.

        Raises:
            PlanError: the units are not bounded.
        """
        if self._items is not None:
            raise ValueError("no shard can be appended after the items were numbered")
        if sets.items_per_unit < 1:
            raise PlanError(
                f"the counts allow {sets.items_per_unit} items per unit",
                where="items_per_unit",
                fix="Count and calibrate with the same bound.",
            )
        self.units += sets.units
        self.items_per_unit = max(self.items_per_unit, sets.items_per_unit)
        self._left -= sets.items.nbytes + sets.members.nbytes + sets.starts.nbytes
        run = _Run(sets)
        if self._spills:
            run.write(self._file(f"shard-{len(self._runs):06d}"))
        self._runs.append(run)

    @property
    def distinct(self) -> int:
        """Number of distinct items. Private."""
        return sum(items.count for items in self._numbered())

    def named(self, numbers: NDArray[np.int64]) -> list[str]:
        """Return the items with the given ascending numbers."""
        names: list[str] = []
        first = 0
        for items in self._numbered():
            begin, end = np.searchsorted(numbers, [first, first + items.count])
            if begin < end:
                names.extend(items.all().take(pa.array(numbers[begin:end] - first)).to_pylist())
            first += items.count
        return names

    def __iter__(self) -> Iterator[UnitSets]:
        """Yield the units of each shard, with the numbers of their items."""
        self._numbered()
        for run in self._runs:
            yield run.read()

    # --- numbering

    def _numbered(self) -> list[_Items]:
        if self._items is None:
            self._items = []
            first = 0
            for low, high in itertools.pairwise(self._bounds()):
                some = [run.items.between(low, high) for run in self._runs]
                merged = pa.concat_arrays([pa.array([], _TEXT), *some]).dictionary_encode()
                order = pc.sort_indices(merged.dictionary).to_numpy()
                numbers = np.empty(len(order), np.int32)
                numbers[order] = np.arange(first, first + len(order), dtype=np.int32)
                every = numbers[merged.indices.to_numpy()]
                ends = itertools.accumulate(map(len, some))
                for run, items, end in zip(self._runs, some, ends, strict=True):
                    run.add_numbers(every[end - len(items) : end])
                self._items.append(_Items(merged.dictionary.take(pa.array(order))))
                if self._spills:
                    self._items[-1].write(self._file(f"items-{len(self._items):06d}"))
                first += len(order)
            for run in self._runs:
                run.renumber()
        return self._items

    def _bounds(self) -> list[str | None]:
        """Return bounds of item ranges with few items each; None: no bound."""
        # Each of these represents one batch of one shard.
        firsts = sorted(itertools.chain.from_iterable(run.items.firsts for run in self._runs))
        inner = sorted(set(firsts[_TOGETHER // _BATCH :: _TOGETHER // _BATCH]))
        return [None, *inner, None]

    @property
    def _spills(self) -> bool:
        return self._left < 0

    def _file(self, name: str) -> Path:
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True, mode=0o700)
        path = self._folder / name
        path.unlink(missing_ok=True)  # remains of a killed attempt
        return path


class _Items:
    """Items in ascending order, in memory or in a file.

    Attributes:
        count: number of items.
        firsts: the first item of each batch.
    """

    def __init__(self, items: pa.Array) -> None:
        self._at: pa.Array | Path = items
        self.count = len(items)
        self.firsts: list[str] = items[::_BATCH].to_pylist()

    def write(self, path: Path) -> None:
        """Move the items to a file."""
        table = pa.table({"items": self._at})
        with _opened(path, "xb") as file, pa.ipc.new_file(file, table.schema) as out:
            out.write_table(table, max_chunksize=_BATCH)
        self._at = path

    def all(self) -> pa.Array:
        """Return all items."""
        return self._batches(0, len(self.firsts))

    def between(self, low: str | None, high: str | None) -> pa.Array:
        """Return the items from `low` to below `high`; None is no bound."""
        begin = 0 if low is None else max(0, bisect_right(self.firsts, low) - 1)
        end = len(self.firsts) if high is None else bisect_left(self.firsts, high)
        items = self._batches(begin, end)
        for bound, holds in ((low, pc.greater_equal), (high, pc.less)):
            if bound is not None:
                items = items.filter(holds(items, pa.scalar(bound, _TEXT)))
        return items

    def _batches(self, begin: int, end: int) -> pa.Array:
        if not isinstance(self._at, Path):
            return self._at[begin * _BATCH : max(begin, end) * _BATCH]
        with self._at.open("rb") as file:
            batches = pa.ipc.open_file(file)
            columns = [batches.get_batch(i).column(0) for i in range(begin, end)]
        return pa.concat_arrays([pa.array([], _TEXT), *columns])

    def remove(self) -> None:
        """Remove the items."""
        if isinstance(self._at, Path):
            self._at.unlink()
        self._at = pa.array([], _TEXT)


class _Run:
    """One shard with its items and units, either in memory or in files.

    Attributes:
        items: items of the shard, until they are numbered.
    """

    def __init__(self, sets: ItemSets) -> None:
        self.items = _Items(sets.items)
        self._units: UnitSets | Path = UnitSets(sets.starts, sets.members)
        self._numbers: list[NDArray[np.int32]] = []

    def write(self, path: Path) -> None:
        """Move the shard to files."""
        self.items.write(path.with_suffix(".items"))
        self._write_units(path, self.read())

    def read(self) -> UnitSets:
        """Return the units."""
        if isinstance(self._units, UnitSets):
            return self._units
        with self._units.open("rb") as file:
            return UnitSets.read(file)

    def add_numbers(self, numbers: NDArray[np.int32]) -> None:
        """Append the numbers of the shard's next items in the order of all shards."""
        if isinstance(self._units, UnitSets):
            self._numbers.append(numbers)
        else:
            with _opened(self._units.with_suffix(".numbers"), "ab") as file:
                numbers.tofile(file)

    def renumber(self) -> None:
        """Replace the members by the numbers of their items, and remove the items' text."""
        self.items.remove()
        units = self.read()
        if isinstance(self._units, UnitSets):
            self._units = units.numbered(np.concatenate([np.zeros(0, np.int32), *self._numbers]))
            self._numbers = []
        else:
            file = self._units.with_suffix(".numbers")
            numbers = np.fromfile(file, np.int32)
            file.unlink()
            self._units.unlink()
            self._write_units(self._units, units.numbered(numbers))

    def _write_units(self, path: Path, units: UnitSets) -> None:
        with _opened(path, "xb") as file:
            units.write(file)
        self._units = path


def _opened(path: Path, mode: Literal["xb", "ab"]) -> IO[bytes]:
    """Open a file that only its owner can read, because it holds private text."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))
