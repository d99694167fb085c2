"""Samples for membership attacks: units of the training, and units that were held out.

Both sides are drawn from one corpus by a keyed hash of the unit's id. The held-out share was drawn
in the same way, so before training the sides differ only by chance. Rows come from the token stores
themselves, so that members are exactly the rows of the training. Units that carry canaries are left
out: only members carry them, so their random tokens would reveal membership.

Everything here is private: ids of documents, admissions and patients stay in memory.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dp_core.audit.membership import Attack, Scored
from dp_core.data.corpus import Document
from dp_core.data.hashing import coin, digest64, document_unit_id
from dp_core.data.privacy_units import Unit
from dp_core.data.token_store import TokenStore, rows_of_units
from dp_core.errors import BadInput
from dp_core.privacy.mechanisms import PrivacyUnit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

SAMPLE = "sample"  # a row
LEVELS = (SAMPLE, "example", "document", "admission", "patient")
FITTED_SHARE = 0.2  # share of the clusters of both sides on which attacks are fitted
LEAST_GROUPS = 10  # minimum number of groups on each side for a measurement
_NO_GROUP = -1


@dataclass(frozen=True)
class Sample:
    """Rows of members and of others, with the groups of each row.

    Attributes:
        unit: the protected unit of the model's guarantee.
        member_rows: row numbers in the store of the training.
        other_rows: row numbers in the store of held-out units.
        members: (n,) whether each row is a member; members come first.
        groups: level -> (n,) number of the row's group, −1 where the source names none.
        units: (n,) number of the row's unit.
        units_in_group: level above the unit -> (n,) number of the group's units in the corpus.
        clusters: (n,) number of the patient or, where none is named, of the unit.
        fitted: (n,) whether the row's cluster fits the attacks.
        codes: codes of each row's patient or admission; None if no codes are given.
    """

    unit: PrivacyUnit
    member_rows: Ints
    other_rows: Ints
    members: Flags
    groups: dict[str, Ints]
    units: Ints
    units_in_group: dict[str, Ints]
    clusters: Ints
    fitted: Flags
    codes: tuple[frozenset[str], ...] | None = None

    def scored(self, level: str, attack: Attack) -> tuple[Scored, int] | None:
        """Return the attack's scores of all groups of a level, and the largest group's size.

        A group within one unit is entirely a member or not. A group of several units is used if all
        of them are on one side. Such groups are small, and held-out groups are smaller still, so
        the size of a group would reveal its side. Therefore the sample keeps as many members as
        others of each size.

        Returns:
            The scores, and the largest number of units in a group; None with fewer than ten groups
            on a side.
        """
        ids = self.groups[level]
        usable = (ids != _NO_GROUP) & attack.measured
        if level in self.units_in_group:
            usable &= self._whole(ids, self.units_in_group[level])
            if not usable.any():
                return None
        chosen, place = np.unique(ids[usable], return_inverse=True)
        counts = np.bincount(place)
        first = np.unique(place, return_index=True)[1]
        scored = Scored(
            np.bincount(place, attack.scores[usable]) / counts,
            self.members[usable][first],
            self.clusters[usable][first],
        )
        sizes = np.ones(len(chosen), np.int64)
        if level in self.units_in_group:
            sizes = self.units_in_group[level][usable][first]
            kept = _matched(scored.members, sizes)
            sizes = sizes[kept]
            scored = Scored(scored.scores[kept], scored.members[kept], scored.clusters[kept])
        if min(scored.members.sum(), (~scored.members).sum()) < LEAST_GROUPS:
            return None
        return scored, int(sizes.max())

    def profiles(
        self, level: str, attack: Attack, held_by_row: Sequence[frozenset[Hashable]]
    ) -> list[frozenset[Hashable]]:
        """Return the held items of each group that `scored` scores, in the same order.

        Args:
            level: a level at or below the unit.
            attack: the same attack.
            held_by_row: n sets of tokens, or of codes of diseases.
        """
        ids = self.groups[level]
        held: dict[int, set[Hashable]] = {}
        for place in np.flatnonzero((ids != _NO_GROUP) & attack.measured):
            held.setdefault(int(ids[place]), set()).update(held_by_row[place])
        return [frozenset(held[group]) for group in sorted(held)]

    def _whole(self, ids: Ints, in_corpus: Ints) -> Flags:
        """Return the rows of groups whose units are all in the sample, on one side."""
        pairs = np.unique(np.stack([ids, self.units, self.members]), axis=1)
        there = Counter(pairs[0].tolist())
        sides = np.unique(pairs[[0, 2]], axis=1)[0]
        mixed = {group for group, count in Counter(sides.tolist()).items() if count > 1}
        return np.array(
            [
                group not in mixed and there[group] == count
                for group, count in zip(ids.tolist(), in_corpus.tolist(), strict=True)
            ],
            np.bool_,
        )


def _matched(members: Flags, sizes: Ints) -> Ints:
    """Return the places of the first members and others, equally many of each size."""
    kept: list[int] = []
    for size in np.unique(sizes):
        here = sizes == size
        inside, others = np.flatnonzero(here & members), np.flatnonzero(here & ~members)
        both = min(len(inside), len(others))
        kept += [*inside[:both].tolist(), *others[:both].tolist()]
    return np.array(sorted(kept), np.int64)


def levels_above(unit: PrivacyUnit) -> tuple[str, ...]:
    """Return the levels whose groups may hold several units."""
    return LEVELS[LEVELS.index(unit.value) + 1 :]


def draw_sample(
    units: Iterable[Unit],
    *,
    unit: PrivacyUnit,
    train: TokenStore,
    held_out: TokenStore,
    tokenizer: Tokenizer,
    max_examples_per_unit: int,
    carries: Callable[[str], bool],
    most: int,
    key: bytes,
    codes: Callable[[Document], frozenset[str]] | None = None,
) -> Sample:
    """Draw up to `most` units of each side, and look up their rows.

    Args:
        units: all units of the corpus from which both stores were cut.
        unit: the protected unit.
        train: rows of the training.
        held_out: rows of held-out units.
        tokenizer: the tokenizer of both stores.
        max_examples_per_unit: number of rows that were kept of a unit.
        carries: whether the unit with this id would carry a canary in training.
        most: largest number of units of each side.
        key: public coins of the stores.
        codes: codes of the diseases of a document's patient; empty without any.

    Raises:
        BadInput: the stores were cut from another corpus.
    """
    sides = (_Places(train, key), _Places(held_out, key))
    lowest: tuple[list[_Drawn], list[_Drawn]] = ([], [])
    above = levels_above(unit)
    in_corpus: dict[str, Counter[Hashable]] = {level: Counter() for level in above}
    for one in units:
        for level in above:
            in_corpus[level][_group(level, one.documents[0])] += 1
        if carries(one.unit_id):
            continue
        for side, places in enumerate(sides):
            if places.of(one.unit_id) is not None:
                drawn = _Drawn(-digest64(key, "membership", one.unit_id), one)
                push = heapq.heappush if len(lowest[side]) < most else heapq.heappushpop
                push(lowest[side], drawn)
    index = _Index(unit, key, in_corpus, codes)
    rows: list[list[int]] = []
    for side, places in enumerate(sides):
        chosen = [drawn.unit for drawn in sorted(lowest[side], reverse=True)]
        cut = rows_of_units(
            chosen,
            tokenizer,
            sequence_length=places.store.sequence_length,
            max_examples_per_unit=max_examples_per_unit,
            key=key,
        )
        numbers: list[int] = []
        for one, located in cut:
            numbers += places.rows(one.unit_id, [row for _, row in located])
            index.add(one, [one.documents[text] for text, _ in located], member=side == 0)
        rows.append(numbers)
    return index.sample(*(np.array(numbers, np.int64) for numbers in rows))


@dataclass(frozen=True)
class _Drawn:
    """A unit with its coin; a heap of them pops the largest hash first."""

    coin: int
    unit: Unit

    def __lt__(self, other: _Drawn) -> bool:
        return self.coin < other.coin


class _Places:
    """The row numbers of units in a store."""

    def __init__(self, store: TokenStore, key: bytes) -> None:
        self.store, self._key = store, key
        self._order = np.argsort(store.unit_keys)
        self._sorted = store.unit_keys[self._order]

    def of(self, unit_id: str) -> int | None:
        key = np.uint64(digest64(self._key, "unit", unit_id))
        place = int(np.searchsorted(self._sorted, key))
        there = place < len(self._sorted) and self._sorted[place] == key
        return int(self._order[place]) if there else None

    def rows(self, unit_id: str, expected: Sequence[Sequence[int]]) -> list[int]:
        """Return a unit's row numbers after checking that the rows match its text."""
        place = self.of(unit_id)
        assert place is not None  # noqa: S101 - only such units are drawn
        numbers = list(self.store.rows_of(place))
        stored = [self.store.tokens[n, : self.store.lengths[n]].tolist() for n in numbers]
        if stored != [list(row) for row in expected]:
            raise BadInput(
                "its rows differ from the corpus",
                where="private_store_uri, corpus_uri",
                fix="Give the corpus that the rows were cut from, and its seed.",
            )
        return numbers


def _group(level: str, document: Document) -> Hashable:
    """Return the document's group at this level, or None if it has none."""
    if level == "document":
        return document_unit_id(document.patient_id, document.document_id)
    if level == "patient":
        return document.patient_id or None
    return (document.patient_id, document.admission_id) if document.admission_id else None


class _Index:
    """Numbers for the groups of rows, in the order in which they are added."""

    def __init__(
        self,
        unit: PrivacyUnit,
        key: bytes,
        in_corpus: dict[str, Counter[Hashable]],
        codes: Callable[[Document], frozenset[str]] | None,
    ) -> None:
        self._codes_of, self._codes = codes, list[frozenset[str]]()
        self._unit, self._key, self._in_corpus = unit, key, in_corpus
        self._numbers: dict[tuple[str, Hashable], int] = {}
        self._columns: dict[str, list[int]] = {}
        self._levels = [level for level in LEVELS if level not in ("example", SAMPLE)]
        if unit is PrivacyUnit.EXAMPLE:
            self._levels.insert(0, "example")

    def add(self, unit: Unit, documents: Sequence[Document], *, member: bool) -> None:
        """Add a unit's rows, given the document of each row."""
        for document in documents:
            cluster = document.patient_id or unit.unit_id
            row = {
                "member": int(member),
                "unit": self._number("unit", unit.unit_id),
                "cluster": self._number("cluster", (bool(document.patient_id), cluster)),
                "fitted": int(coin(self._key, "membership fit", cluster) < FITTED_SHARE),
            }
            for level in self._levels:
                group = unit.unit_id if level == "example" else _group(level, document)
                row[level] = self._number(level, group)
                if level in self._in_corpus:
                    row[f"units of {level}"] = self._in_corpus[level][group]
            if self._codes_of is not None:
                self._codes.append(self._codes_of(document))
            for name, value in row.items():
                self._columns.setdefault(name, []).append(value)

    def _number(self, level: str, group: Hashable) -> int:
        if group is None:
            return _NO_GROUP
        return self._numbers.setdefault((level, group), len(self._numbers))

    def sample(self, member_rows: Ints, other_rows: Ints) -> Sample:
        """Return the sample of all added rows."""

        columns = {name: np.array(values, np.int64) for name, values in self._columns.items()}
        n = len(member_rows) + len(other_rows)
        none = np.zeros(0, np.int64)
        groups = {level: columns.get(level, none) for level in self._levels}
        return Sample(
            unit=self._unit,
            member_rows=member_rows,
            other_rows=other_rows,
            members=columns.get("member", none) == 1,
            groups={SAMPLE: np.arange(n), **groups},
            units=columns.get("unit", none),
            units_in_group={
                level: columns.get(f"units of {level}", none) for level in self._in_corpus
            },
            clusters=columns.get("cluster", none),
            fitted=columns.get("fitted", none) == 1,
            codes=None if self._codes_of is None else tuple(self._codes),
        )
