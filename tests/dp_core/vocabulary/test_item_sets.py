"""Sets of items, spilled and read back; bounded alike in one process and by shards."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest

from dp_core.data.corpus import Document, shards_of, write_corpus
from dp_core.data.privacy_units import bounded_sample, iter_units
from dp_core.data.tokens import split_words
from dp_core.errors import BadInput
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.vocabulary.item_sets import ItemSets, SpilledSets, item_sets
from dp_core.vocabulary.shard_words import UnitWords, WordSets


def sets_of(number: int) -> ItemSets:
    units = ((f"u{number} {i}", {f"é{number}", f"w{i}"}) for i in range(5))
    return item_sets(units, 2, b"k", declared_units=9 if number % 2 else None)


def named(sets: ItemSets) -> list[set[str]]:
    return [
        {sets.items[m] for m in sets.members[a:b]}
        for a, b in zip(sets.starts, sets.starts[1:], strict=False)
    ]


def test_spilled_sets_are_read_back_and_private(tmp_path: Path) -> None:
    made = [sets_of(i) for i in range(4)]
    with SpilledSets(tmp_path / "sets", limit=1500) as spilled:
        for one in made:
            spilled.append(one)
        files = list((tmp_path / "sets").iterdir())
        assert 0 < len(files) < 4
        assert {stat.S_IMODE(f.stat().st_mode) for f in files} == {0o600}
        for _ in range(2):  # read as often as there are rounds
            assert len(spilled) == 4
            for back, one in zip(spilled, made, strict=True):
                assert back.items == one.items and named(back) == named(one)
                assert (back.order == one.order).all()
                assert back.items_per_unit == 2 and back.declared_units == one.declared_units
        assert [len(s.items) for s in spilled[1:3]] == [len(s.items) for s in made[1:3]]
        spilled.clear()
        assert len(spilled) == 0 and not list((tmp_path / "sets").iterdir())
        spilled.append(made[0])
        assert not list((tmp_path / "sets").iterdir())  # there is room again


def test_what_is_spilled_goes_even_where_the_step_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), SpilledSets(tmp_path, limit=0) as spilled:
        spilled.append(sets_of(0))
        assert list(tmp_path.iterdir())
        raise RuntimeError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("unit", PrivacyUnit)
def test_sets_of_a_shard_are_those_of_its_units_one_by_one(
    tmp_path: Path, unit: PrivacyUnit
) -> None:
    """By brute force: split, take out, draw."""
    rng = np.random.default_rng(0)
    notes = (" ".join(f"w{w}" for w in rng.integers(0, 60, 40)) for _ in range(90))
    documents = (Document(str(i), f"p{i % 20}", f"Café {note}.") for i, note in enumerate(notes))
    write_corpus(documents, tmp_path, 3)
    shards = shards_of(tmp_path)
    public = frozenset({"w1", ".", "cafe"})
    of_shard = WordSets(UnitWords(unit, 12), 5, b"key", 500, public)
    found = [s for shard in shards for s in named(of_shard(shard))]
    expected = []
    for one in iter_units(tmp_path, unit, 12):
        words = {w for text in one.texts for w in split_words(text)} - public
        expected.append(set(bounded_sample(sorted(words), 5, one.unit_id, b"key")))
    assert found == expected and max(map(len, found)) == 5
    units = sum(of_shard(shard).units for shard in shards)
    too_few = WordSets(UnitWords(unit, 12), 5, b"key", units // 4, public)
    with pytest.raises(BadInput, match="more units than the declared bound") as caught:
        list(map(too_few, shards))
    assert str(units) not in str(caught.value)
