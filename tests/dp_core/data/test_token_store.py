import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_core.data import token_store
from dp_core.data.corpus import Document, open_corpus, shards_of, write_corpus
from dp_core.data.hashing import digest64
from dp_core.data.privacy_units import Unit, is_held_out, units_of
from dp_core.data.token_store import ShardRows, TokenStore, TokenStoreWriter, divided, rows_of_units
from dp_core.errors import BadInput
from dp_core.privacy import batch_selection as sampling
from dp_core.privacy.batch_selection import BatchSampler, PoissonSampling
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.batches import Batches, ShuffledRows, SingleRows, UnitRows
from dp_core.vocabulary import subwords

ROWS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), max_size=4)


def write(folder: Path, units: dict[str, list[list[int]]], vocabulary: int = 100) -> TokenStore:
    writer = TokenStoreWriter(folder, 6, vocabulary, key=b"k")
    for unit_id, rows in units.items():
        writer.add_unit(unit_id, rows)
    return writer.finish()


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(max_size=4), ROWS, min_size=1, max_size=6))
def test_random_access_by_unit(tmp_path_factory, units):
    units["sure"] = [[1, 2]]
    folder = tmp_path_factory.mktemp("store")
    write(folder, units)
    store = TokenStore.open(folder)
    kept = [rows for rows in units.values() if rows]
    assert (store.n_units, store.n_rows) == (len(kept), sum(map(len, kept)))
    for u, rows in enumerate(kept):
        for r, row in zip(store.rows_of(u), rows, strict=True):
            assert store.tokens[r].tolist() == row + [0] * (6 - len(row))
            assert store.lengths[r] == len(row)
    assert store.content_digest() == store.digest


def test_digest_is_of_the_content(tmp_path):
    units = {"a": [[1, 2], [3]], "b": [[4]]}
    digest = write(tmp_path / "1", units).digest
    assert write(tmp_path / "2", units).digest == digest
    variants: list[dict[str, list[list[int]]]] = [
        {"a": [[1, 2], [5]], "b": [[4]]},  # another token
        {"a": [[1, 2]], "b": [[3], [4]]},  # the same rows, of other units
        {"b": [[1, 2], [3]], "a": [[4]]},  # other owners
        {"a": [[1, 2], [3, 0]], "b": [[4]]},  # another length
    ]
    digests = {write(tmp_path / f"v{i}", v).digest for i, v in enumerate(variants)}
    assert len(digests | {digest}) == 5


def test_development_and_test_parts_are_disjoint_and_depend_on_each_unit_alone(tmp_path):
    def parts(units: dict[str, list[list[int]]]) -> list[dict[int, list[list[int]]]]:
        return [
            {
                int(key): [part.tokens[r, : part.lengths[r]].tolist() for r in part.rows_of(u)]
                for u, key in enumerate(part.unit_keys)
            }
            for part in divided(write(tmp_path / f"{len(units)}", units), 0.4)
        ]

    units = {f"p{n}": [[n % 90 + 5] * (n % 3 + 1)] * (n % 2 + 1) for n in range(200)}
    keys = {unit: digest64(b"k", "unit", unit) for unit in units}
    development, test = parts(units)
    assert 40 < len(development) < 120  # 80 expected
    assert not development.keys() & test.keys()
    assert development | test == {keys[unit]: rows for unit, rows in units.items()}
    for missing in ("p0", "p17", "p199"):
        fewer = parts({unit: rows for unit, rows in units.items() if unit != missing})
        for part, before in zip(fewer, (development, test), strict=True):
            assert part == {key: rows for key, rows in before.items() if key != keys[missing]}


def test_large_vocabularies_get_wide_ids(tmp_path):
    assert write(tmp_path / "1", {"a": [[65_535]]}, 65_536).tokens.dtype == np.uint16
    store = write(tmp_path / "2", {"a": [[70_000]]}, 70_001)
    assert store.tokens.dtype == np.uint32
    assert store.tokens[0, 0] == 70_000


def test_an_unfinished_store_is_refused(tmp_path):
    write(tmp_path, {"a": [[1]]})
    TokenStoreWriter(tmp_path, 6, 100).add_unit("b", [[2]])
    with pytest.raises(BadInput, match="not a finished token store"):
        TokenStore.open(tmp_path)


@pytest.mark.parametrize("name", ["tokens", "lengths", "unit_rows", "unit_keys"])
@pytest.mark.parametrize("missing", [1, 8, 12, 1000])
def test_a_cut_file_is_noticed(tmp_path, name, missing):
    write(tmp_path, {"a": [[1], [2]], "b": [[3]]})
    file = tmp_path / f"{name}.bin"
    file.write_bytes(file.read_bytes()[:-missing])
    with pytest.raises(BadInput, match="not a finished token store"):
        TokenStore.open(tmp_path)


@pytest.mark.parametrize("row", [[], [1] * 7, [100], [-1]])
def test_rows_that_do_not_fit_and_stores_without_rows_are_refused(tmp_path, row):
    with pytest.raises(BadInput, match=r"1 to 6 ids|outside the vocabulary of 100"):
        write(tmp_path, {"a": [row]})
    with pytest.raises(BadInput, match="no text"):
        write(tmp_path, {"a": []})


TOKENIZER = subwords.learn(
    dict.fromkeys(
        ["the", "patient", "has", "pain", "in", "left", "knee", ".", "[", "]", "mask"], 500
    ),
    200,
)


def rows_made(units: list[Unit], length: int = 8, limit: int = 100) -> dict[str, list[list[int]]]:
    made = rows_of_units(
        units, TOKENIZER, sequence_length=length, max_examples_per_unit=limit, key=b"k"
    )
    return {unit.unit_id: [row for _, row in rows] for unit, rows in made}


@given(
    st.lists(
        st.lists(st.sampled_from(["the", "patient", "has", "pain", "."]), max_size=30), max_size=4
    ),
    st.integers(3, 12),
)
def test_rows_hold_the_text_once_and_fit(texts, length):
    made = rows_made([Unit("u", [" ".join(t) for t in texts])], length)["u"]
    assert all(r[0] == 2 and r[-1] == 3 and 3 <= len(r) <= length for r in made)
    pieces = [i for r in made for i in r[1:-1]]
    whole = [TOKENIZER.encode(" ".join(t), add_special_tokens=False).ids for t in texts]
    assert pieces == [i for ids in whole for i in ids]
    room = length - 2
    assert len(made) == sum(-(-len(ids) // room) for ids in whole)  # as few rows as possible


def test_a_units_rows_do_not_depend_on_other_units():
    text = "the patient has pain in the left knee . " * 8
    units = [Unit(str(i), [text, text[: 10 * i]]) for i in range(300)]
    together, alone = rows_made(units, limit=3), rows_made([units[277]], limit=3)
    assert together["277"] == alone["277"]
    assert {len(r) for r in together.values()} == {3}


def test_a_row_needs_room():
    with pytest.raises(BadInput, match="no room"):
        rows_made([Unit("u", ["pain"])], 2)


ROW = [2, 7, 8, 9, 3]


def peak(work) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def fill(folder: Path, units: int) -> None:
    writer = TokenStoreWriter(folder, 16, 40)
    for unit in range(units):
        writer.add_unit(str(unit), [ROW, ROW])
    writer.finish()


def feed(folder: Path, batch: int = 8) -> None:
    store = TokenStore.open(folder)
    law, seed, n = PoissonSampling(), PrivacySeed.fixed(0), store.n_units
    sampler = BatchSampler(law, seed, n, lambda step: batch / n)
    for source in (
        Batches(store, sampler, UnitRows(1, 4, 2)),
        Batches(store, ShuffledRows(store.n_rows, 1, 4), SingleRows(1, 4)),
    ):
        for step in range(3):
            for _ in source.micro_batches(step):
                pass


def test_memory_of_writing_opening_and_feeding_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    fill(tmp_path / "first", 100)
    feed(tmp_path / "first")  # load imports and caches first
    monkeypatch.setattr(token_store, "_FLUSH_BYTES", 1 << 15)
    monkeypatch.setattr(token_store, "_CHECKED", 1 << 9)
    monkeypatch.setattr(sampling, "_CHUNK", 1 << 9)
    for work in (fill, lambda folder, _: feed(folder)):
        small, large = (
            peak(lambda n=n, work=work: work(tmp_path / str(n), n)) for n in (4000, 32_000)
        )
        assert large < 1.2 * small


def test_rows_of_a_shard_equal_the_rows_of_its_units(tmp_path):
    notes = (f"The patient [MASK] has pain in knee {i % 7}." for i in range(120))
    write_corpus(
        (Document(str(i), f"p{i % 30}", t) for i, t in enumerate(notes)), tmp_path / "c", 4
    )
    once = {part: TokenStoreWriter(tmp_path / f"once {part}", 8, 200, key=b"k") for part in "tm"}
    shards = {part: TokenStoreWriter(tmp_path / f"shards {part}", 8, 200) for part in "tm"}
    units = list(units_of(open_corpus(tmp_path / "c"), PrivacyUnit.PATIENT, 1))
    measuring = [unit for unit in units if is_held_out(unit.unit_id, 0.3, b"k")]
    for unit in units:
        rows = rows_made([unit], limit=3)[unit.unit_id]
        once["m" if unit in measuring else "t"].add_unit(unit.unit_id, rows)

    def same(unit_id: str, rows: list[list[int]]) -> list[list[int]]:
        assert unit_id not in {unit.unit_id for unit in measuring}
        return rows

    of_shard = ShardRows(PrivacyUnit.PATIENT, 1, TOKENIZER.to_str(), 8, 3, b"k", 0.3, same, 3)
    cut = [of_shard(shard) for shard in shards_of(tmp_path / "c")]
    for made in cut:
        shards["t"].add_packed(made.train)
        shards["m"].add_packed(made.held_out)
    for part in "tm":
        assert once[part].finish().digest == shards[part].finish().digest
    assert sum(made.units for made in cut) == len(units)
    noted = [texts for made in cut for texts in made.texts]
    assert noted[: len(cut[0].texts)] == [unit.texts for unit in measuring][: len(cut[0].texts)]
    assert all(len(made.texts) <= 3 for made in cut)
    assert 4 not in {int(i) for made in cut for i in np.unique(made.train.tokens)}  # [MASK]
