"""The item sets of all shards together: on disk beyond a limit, with one order of all items.

The sets are merged like sorted runs. One range of items after the other is read from every shard,
its distinct items are numbered consecutively, and only these numbers stay in memory. The rounds of
a mechanism then read numbers, one shard after the other. Only released items are read as text
again.
"""

from __future__ import annotations

import itertools
import os
import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dp_core.data.word_codes import ranges
from dp_core.errors import PlanError
from dp_core.vocabulary.item_sets import ItemSets, UnitSets

_LIMIT = 1 << 26  # bytes in memory
_TOGETHER = 1 << 17  # approximate number of items of all shards in one merge
_BATCH = 1 << 10  # items of a shard in one batch, whose first item is kept in memory
_MEMBERS = 1 << 22  # approximate number of members in one sort
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
        self._left -= sets.items.nbytes + sets.members.nbytes + 16 * sets.units
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

    def by_order(self) -> Iterator[UnitSets]:
        """Yield all units in the order of their coins, in parts.

        Units with equal coins keep the order of the shards.
        """
        bits = (sum(run.members for run in self._runs) // _MEMBERS).bit_length()
        bits = bits if self._spills else 0
        if not bits:
            yield _sorted_by_order([*self])
            return
        files = [self._file(f"order-{part:06d}") for part in range(1 << bits)]
        for shard in self:
            parts = shard.order >> np.uint64(64 - bits)
            for part in np.unique(parts).tolist():
                with _opened(files[part], "ab") as file:
                    shard.those(parts == part).write(file)
        for path in files:
            yield _sorted_by_order([*_read_all(path)])
            path.unlink(missing_ok=True)

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
        members: total number of members of its units.
    """

    def __init__(self, sets: ItemSets) -> None:
        self.items = _Items(sets.items)
        self.members = len(sets.members)
        self._units: UnitSets | Path = UnitSets(sets.starts, sets.members, sets.order)
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


def _sorted_by_order(shards: list[UnitSets]) -> UnitSets:
    """Return the units of several shards in the order of their coins."""
    order = np.concatenate([np.zeros(0, np.uint64), *(s.order for s in shards)])
    lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(s.starts) for s in shards)])
    members = np.concatenate([np.zeros(0, np.int32), *(s.members for s in shards)])
    turn = np.argsort(order, kind="stable")
    begins = (np.cumsum(lengths) - lengths)[turn]
    lengths = lengths[turn]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return UnitSets(starts, members[ranges(begins, lengths)], order[turn])


def _read_all(path: Path) -> Iterator[UnitSets]:
    if path.exists():
        size = path.stat().st_size
        with path.open("rb") as file:
            while file.tell() < size:
                yield UnitSets.read(file)


def _opened(path: Path, mode: Literal["xb", "ab"]) -> IO[bytes]:
    """Open a file that only its owner can read, because it holds private text."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))
