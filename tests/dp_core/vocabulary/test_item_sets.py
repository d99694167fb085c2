"""Sets of items are bounded equally in one process and by shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dp_core.data.corpus import Document, open_corpus, shards_of, write_corpus
from dp_core.data.privacy_units import bounded_sample, units_of
from dp_core.data.tokens import split_words
from dp_core.errors import BadInput
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.vocabulary.item_sets import ItemSets, item_sets
from dp_core.vocabulary.subwords import UnitWords, WordSets


def named(sets: ItemSets) -> list[set[str]]:
    return [
        set(sets.items.take(sets.members[a:b]).to_pylist())
        for a, b in zip(sets.starts, sets.starts[1:], strict=False)
    ]


@pytest.mark.parametrize("unit", PrivacyUnit)
def test_sets_of_a_shard_equal_sets_of_its_units(tmp_path: Path, unit: PrivacyUnit) -> None:
    """Compares with brute force: split, exclude, sample."""
    rng = np.random.default_rng(0)
    notes = (" ".join(f"w{w}" for w in rng.integers(0, 60, 40)) for _ in range(90))
    documents = (Document(str(i), f"p{i % 20}", f"Café {note}.") for i, note in enumerate(notes))
    write_corpus(documents, tmp_path, 3)
    shards = shards_of(tmp_path)
    public = frozenset({"w1", ".", "cafe"})
    of_shard = WordSets(UnitWords(unit, 12), 5, b"key", 500, public)
    found = [s for shard in shards for s in named(of_shard(shard))]
    expected = []
    for one in units_of(open_corpus(tmp_path), unit, 12):
        words = {w for text in one.texts for w in split_words(text)} - public
        expected.append(set(bounded_sample(sorted(words), 5, one.unit_id, b"key")))
    assert found == expected and max(map(len, found)) == 5
    units = sum(of_shard(shard).units for shard in shards)
    too_few = WordSets(UnitWords(unit, 12), 5, b"key", units // 4, public)
    with pytest.raises(BadInput, match="more units than the declared bound") as caught:
        list(map(too_few, shards))
    assert str(units) not in str(caught.value)


def test_items_of_a_unit_are_sorted_for_any_other_units() -> None:
    held = {f"u{i}": [f"w{(i * k) % 23}" for k in range(9, 0, -1)] for i in range(40)}
    for units in (held, dict(reversed(held.items()))):
        sets = item_sets(units.items(), 6, b"k")
        assert sets.items.to_pylist() == sorted(sets.items.to_pylist())
        for a, b in zip(sets.starts, sets.starts[1:], strict=False):
            assert (np.diff(sets.members[a:b]) > 0).all() and b - a <= 6


def test_a_histogram_counts_no_more_units_than_declared() -> None:
    units = [(str(number), ["pain"]) for number in range(21)]
    assert item_sets(units[:-1], 1, b"k", declared_units=20).units == 20
    with pytest.raises(BadInput, match="more units than the declared bound"):
        item_sets(units, 1, b"k", declared_units=20)
