"""Sets of items that units hold, bounded before anything is counted; what shards hand over.

Items are words, phrases, or whatever text a unit's content is made of.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dp_core.data.hashing import digest64
from dp_core.data.privacy_units import bounded_sample
from dp_core.data.word_codes import HeldItems, joined_items
from dp_core.errors import BadInput


@dataclass(frozen=True)
class ItemSets:
    """One shard: units' sets of items, bounded, each unit once. Private.

    Attributes:
        items: distinct items, of the shard or of all shards.
        starts: int64 `[units + 1]`; unit u holds the items `members[starts[u]:starts[u + 1]]`.
        members: int32, places among `items`.
        order: uint64 `[units]`, public coins: the order in which a sequential mechanism takes them.
        items_per_unit: N, most distinct items of a unit. declared_units: most units, if checked.
    """

    items: list[str] = field(repr=False)
    starts: NDArray[np.int64] = field(repr=False)
    members: NDArray[np.int32] = field(repr=False)
    order: NDArray[np.uint64] = field(repr=False)
    items_per_unit: int
    declared_units: int | None = None

    @property
    def units(self) -> int:
        """How many units the shard holds. Private."""
        return len(self.order)

    @property
    def owners(self) -> NDArray[np.int64]:
        """The unit of each of `members`."""
        return np.repeat(np.arange(self.units), np.diff(self.starts))


def item_sets(
    units: Iterable[tuple[str, Iterable[str]]],
    items_per_unit: int,
    key: bytes,
    *,
    declared_units: int | None = None,
    exclude: Collection[str] = frozenset(),
) -> ItemSets:
    """Return the units' sets of items, bounded before anything is counted.

    Items of `exclude` are nobody's: they are taken out of a unit before its items are bounded, so
    that all N of them may be others. **This leaves the sensitivity as it is**: for a list that is
    fixed before the private text is read, what a unit brings is still a function of that unit alone
    (its items without the list's, bounded), and still N of them at most. A list that depends on the
    private text would break both, so it is made of public text, and the release's manifest holds
    its digest.

    Args:
        units: (id, items) of every unit of the shard, once.
        items_per_unit: N; where a unit has more distinct items, N of them are drawn uniformly, by
            the unit's own coins.
        key: public coins for that draw, and for the order of units.
        declared_units: the public upper bound on the number of units (of this shard).
        exclude: public items, which need no release: they count nowhere.

    Raises:
        BadInput: more units than declared. (How many there are is private, and not said.)
    """
    return bounded_sets(_held(units), items_per_unit, key, declared_units, exclude)


def bounded_sets(
    blocks: Iterable[HeldItems],
    items_per_unit: int,
    key: bytes,
    declared_units: int | None,
    exclude: Collection[str],
) -> ItemSets:
    """Return the bounded sets of units that come in blocks, each unit whole in one of them.

    The arguments are those of `item_sets`, which says what they mean for privacy.

    Raises:
        BadInput: as `item_sets`.
    """
    if items_per_unit < 1:
        raise BadInput(f"{items_per_unit} is below 1", where="items_per_unit", fix="Use 1 or more.")
    public = pa.array(sorted(exclude), pa.large_string())
    order: list[int] = []

    def bounded() -> Iterator[HeldItems]:
        for block in blocks:
            if declared_units is not None and len(order) + len(block.unit_ids) > declared_units:
                raise BadInput(
                    f"the corpus holds more units than the declared bound of {declared_units}",
                    where="declared_units",
                    fix="Declare a higher bound, from public knowledge.",
                )
            order.extend(digest64(key, "order of units", unit_id) for unit_id in block.unit_ids)
            yield _bounded(_without(block, public), items_per_unit, key)

    held = joined_items(bounded())
    return ItemSets(
        held.items.to_pylist(),
        held.starts,
        held.members,
        np.array(order, np.uint64),
        items_per_unit,
        declared_units,
    )


def _held(units: Iterable[tuple[str, Iterable[str]]]) -> Iterator[HeldItems]:
    """Yield the distinct items of units, a thousand units at a time."""
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
    """Return a block in which the public items are nobody's."""
    if not len(public):
        return block
    private = ~pc.is_in(block.items, value_set=public).to_numpy(zero_copy_only=False)
    kept = private[block.members]
    starts = np.concatenate([[0], np.cumsum(kept)])[block.starts]
    return HeldItems(block.unit_ids, block.items, starts, block.members[kept])


def _bounded(block: HeldItems, items_per_unit: int, key: bytes) -> HeldItems:
    """Return a block in which no unit has more than N items; those beyond lose the others."""
    beyond = np.flatnonzero(np.diff(block.starts) > items_per_unit)
    kept = np.ones(len(block.members), np.bool_)
    # In the order of the items themselves, which is everywhere the same: numbers are not.
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


def all_items(shards: Iterable[ItemSets]) -> set[str]:
    """Return the distinct items of all shards, of which memory holds one at a time."""
    found: set[str] = set()
    for shard in shards:
        found.update(shard.items)
    return found


class SpilledSets(Sequence[ItemSets]):
    """The item sets of shards, in memory up to a limit and beyond it in files; read many times.

    Args:
        folder: for the files, which hold private text: only their owner can read them. They are
            removed on leaving the context.
        limit: bytes in memory.
    """

    def __init__(self, folder: Path, limit: int = 1 << 28) -> None:
        self._folder, self._limit, self._left = folder, limit, limit
        self._sets: list[ItemSets | Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def append(self, sets: ItemSets) -> None:
        """Add the sets of the next shard."""
        self._left -= 64 * len(sets.items) + sets.members.nbytes + 16 * sets.units
        self._sets.append(sets if self._left >= 0 else self._written(sets))

    def clear(self) -> None:
        """Forget everything."""
        for sets in self._sets:
            if isinstance(sets, Path):
                sets.unlink(missing_ok=True)
        self._sets.clear()
        self._left = self._limit

    def _written(self, sets: ItemSets) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._folder / f"items-{len(self._sets):04d}.npz"
        path.unlink(missing_ok=True)  # what a killed attempt left
        items = np.frombuffer(json.dumps(sets.items).encode(), np.uint8)
        bounds = np.array([sets.items_per_unit, sets.declared_units or 0])
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            np.savez(
                file, items=items, starts=sets.starts, members=sets.members, order=sets.order,
                bounds=bounds,
            )  # fmt: skip
        return path

    def __len__(self) -> int:
        return len(self._sets)

    @overload
    def __getitem__(self, index: int) -> ItemSets: ...

    @overload
    def __getitem__(self, index: slice) -> list[ItemSets]: ...

    def __getitem__(self, index: int | slice) -> ItemSets | list[ItemSets]:
        """Return the sets of a shard, by its number."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        sets = self._sets[index]
        if isinstance(sets, ItemSets):
            return sets
        with np.load(sets, allow_pickle=False) as file:
            items_per_unit, declared = file["bounds"].tolist()
            return ItemSets(
                json.loads(file["items"].tobytes()),
                file["starts"],
                file["members"],
                file["order"],
                items_per_unit,
                declared or None,
            )
