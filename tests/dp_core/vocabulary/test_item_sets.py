import stat
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.vocabulary_corpora import item_sets
from dp_core.data.corpus import Document, open_corpus, shards_of, write_corpus
from dp_core.data.privacy_units import bounded_sample, units_of
from dp_core.data.tokens import split_words
from dp_core.errors import BadInput, PlanError
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.vocabulary import item_sets as item_sets_module
from dp_core.vocabulary.item_sets import BoundedSets, GatheredSets, ItemSets, UnitSets
from dp_core.vocabulary.subwords import UnitWords


def named(sets: UnitSets, items: list[str]) -> list[set[str]]:
    return [{items[m] for m in sets.members[a:b]} for a, b in pairwise(sets.starts)]


@pytest.mark.parametrize("unit", PrivacyUnit)
def test_sets_of_a_shard_equal_sets_of_its_units(tmp_path, unit):
    rng = np.random.default_rng(0)
    notes = (" ".join(f"w{w}" for w in rng.integers(0, 60, 40)) for _ in range(90))
    documents = (Document(str(i), f"p{i % 20}", f"Café {note}.") for i, note in enumerate(notes))
    write_corpus(documents, tmp_path, 3)
    shards = shards_of(tmp_path)
    public = frozenset({"w1", ".", "cafe"})
    of_shard = BoundedSets(UnitWords(unit, 12), 5, b"key", 500, public)
    bounded = [s for sets in map(of_shard, shards) for s in named(sets, sets.items.to_pylist())]
    expected = []
    for u in units_of(open_corpus(tmp_path), unit, 12):
        words = {w for text in u.texts for w in split_words(text)} - public
        expected.append(set(bounded_sample(sorted(words), 5, u.unit_id, b"key")))
    assert bounded == expected and max(map(len, bounded)) == 5
    units = sum(of_shard(shard).units for shard in shards)
    too_few = BoundedSets(UnitWords(unit, 12), 5, b"key", units // 4, public)
    with pytest.raises(BadInput, match="more units than the declared bound") as caught:
        list(map(too_few, shards))
    assert str(units) not in str(caught.value)


def test_items_of_a_unit_are_sorted_for_any_other_units():
    held = {f"u{i}": [f"w{(i * k) % 23}" for k in range(9, 0, -1)] for i in range(40)}
    for units in (held, dict(reversed(held.items()))):
        sets = item_sets(units.items(), 6, b"k")
        assert sets.items.to_pylist() == sorted(sets.items.to_pylist())
        for a, b in pairwise(sets.starts):
            assert (np.diff(sets.members[a:b]) > 0).all() and b - a <= 6


# Includes items that code points and UTF-16 order differently, and an item that is a prefix.
ITEMS = [*"abcdefgh", "a b", "é", "ﬀ", "\U0001f600", "zz"]
SHARDS = st.lists(st.lists(st.sets(st.sampled_from(ITEMS), max_size=6), max_size=5), max_size=6)


def sets_of_shards(held: list[list[set[str]]]) -> list[ItemSets]:
    return [
        item_sets(((f"u{s} {u}", items) for u, items in enumerate(units)), 6, b"k")
        for s, units in enumerate(held)
    ]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(SHARDS, st.sampled_from([0, 300, 1 << 20]))
def test_gathered_shards_equal_brute_force(tmp_path_factory, monkeypatch, held, limit):
    monkeypatch.setattr(item_sets_module, "_BATCH", 2)  # so that everything is split
    monkeypatch.setattr(item_sets_module, "_TOGETHER", 4)
    folder = tmp_path_factory.mktemp("sets") / "gathered"
    shards = sets_of_shards(held)
    every = sorted({item for units in held for items in units for item in items})
    with GatheredSets(folder, limit) as gathered:
        gathered.extend(shards)
        assert gathered.units == sum(map(len, held))
        for _ in range(2):  # rounds read repeatedly
            assert gathered.distinct == len(every)
            assert gathered.named(np.arange(len(every))) == every
            assert gathered.named(np.arange(1, len(every), 2)) == every[1::2]
            assert [named(sets, every) for sets in gathered] == held
            assert all(
                (np.diff(s.members[a:b]) > 0).all() for s in gathered for a, b in pairwise(s.starts)
            )
    assert not folder.exists()


def test_spilled_files_are_private_and_removed(tmp_path):
    folder = tmp_path / "gathered"
    shards = sets_of_shards([[{"a", "b"}, {"b"}], [{"c"}], [{"a"}]])
    first = sum(getattr(shards[0], name).nbytes for name in ("items", "members", "starts"))
    with GatheredSets(folder, limit=first) as gathered:
        gathered.extend([shards[0]])
        assert not folder.exists(), "the first one has room in memory"
        gathered.extend(shards[1:])
        assert gathered.distinct == 3
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not list(folder.iterdir()), "a killed step leaves no named file"
        with pytest.raises(ValueError, match="numbered"):
            gathered.extend([shards[0]])
        gathered.clear()
        assert not folder.exists() and gathered.units == 0
        gathered.extend([shards[0]])
        assert not folder.exists()  # clearing frees the room
        assert gathered.named(np.array([1])) == ["b"]


def test_folder_is_removed_even_if_the_step_fails(tmp_path):
    with pytest.raises(RuntimeError), GatheredSets(tmp_path / "gathered", limit=0) as gathered:
        gathered.extend([sets_of_shards([[{"a"}]])[0]])
        assert list(tmp_path.iterdir())
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_shard_with_unbounded_units_is_refused(tmp_path):
    """Even after a bounded shard: the loosest bound of the two would hide it."""
    bounded, other = sets_of_shards([[{"a"}], [{"b"}]])
    gathered = GatheredSets(tmp_path / "sets")
    gathered.extend([bounded])
    with pytest.raises(PlanError, match="0 items per unit"):
        gathered.extend([replace(other, items_per_unit=0)])
