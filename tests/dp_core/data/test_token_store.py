"""The token store gives back what was written, by unit, and is whole or not there."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dp_core.data.token_store import TokenStore, TokenStoreWriter
from dp_core.errors import BadInput

ROWS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), max_size=4)


def write(folder: Path, units: dict[str, list[list[int]]], vocabulary: int = 100) -> TokenStore:
    writer = TokenStoreWriter(folder, 6, vocabulary, key=b"k")
    for unit_id, rows in units.items():
        writer.add_unit(unit_id, rows)
    return writer.finish()


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(max_size=4), ROWS, min_size=1, max_size=6))
def test_random_access_by_unit(
    tmp_path_factory: pytest.TempPathFactory, units: dict[str, list[list[int]]]
) -> None:
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


def test_digest_is_of_the_content(tmp_path: Path) -> None:
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


def test_unit_keys_follow_the_unit_not_its_place(tmp_path: Path) -> None:
    one = write(tmp_path / "1", {"a": [[1]], "b": [[2]]})
    two = write(tmp_path / "2", {"b": [[2]]})
    assert one.unit_keys[1] == two.unit_keys[0] != one.unit_keys[0]


def test_large_vocabularies_get_wide_ids(tmp_path: Path) -> None:
    assert write(tmp_path / "1", {"a": [[65_535]]}, 65_536).tokens.dtype == np.uint16
    store = write(tmp_path / "2", {"a": [[70_000]]}, 70_001)
    assert store.tokens.dtype == np.uint32
    assert store.tokens[0, 0] == 70_000


def test_an_unfinished_store_is_none(tmp_path: Path) -> None:
    write(tmp_path, {"a": [[1]]})
    TokenStoreWriter(tmp_path, 6, 100).add_unit("b", [[2]])
    with pytest.raises(BadInput, match="not a finished token store"):
        TokenStore.open(tmp_path)


def test_a_cut_file_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, {"a": [[1], [2]]})
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(BadInput, match="not a finished token store"):
        TokenStore.open(tmp_path)


@pytest.mark.parametrize("row", [[], [1] * 7, [100], [-1]])
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, row: list[int]) -> None:
    with pytest.raises(BadInput):
        TokenStoreWriter(tmp_path, 6, 100).add_unit("a", [row])


def test_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no text"):
        write(tmp_path, {"a": []})
