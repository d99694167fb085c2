"""Writing, opening and feeding a store takes the same memory however large the corpus is."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from dp_core.data import token_store
from dp_core.data.token_store import GrowingArray, TokenStore, TokenStoreWriter, open_array
from dp_core.privacy import batch_selection as sampling
from dp_core.privacy.batch_selection import PoissonSampler
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.batches import OrdinaryBatches, PrivateBatches

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
    sampler = PoissonSampler(PrivacySeed.fixed(0), store.n_units, lambda t: batch / store.n_units)
    for source in (
        PrivateBatches(store, sampler, 1, 4, 2),
        OrdinaryBatches(store, 1, 4, 4),
    ):
        for t in range(3):
            for _ in source.update(t):
                pass


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Folders of two corpora, one eight times the other, and the memory that writing them took."""
    folder = tmp_path_factory.mktemp("corpora")
    fill(folder / "first", 100)
    feed(folder / "first")  # imports and caches are not the corpus's
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_store, "_FLUSH", 1 << 9)
        patch.setattr(token_store, "_FLUSH_BYTES", 1 << 15)
        patch.setattr(token_store, "_CHECKED", 1 << 9)
        written = [peak(lambda n=n: fill(folder / str(n), n)) for n in (4000, 32_000)]
    return folder, written


def test_writing_takes_no_more_for_a_corpus_eight_times_as_large(corpora):
    small, large = corpora[1]
    assert large < 1.2 * small


def test_opening_and_feeding_take_no_more_for_a_corpus_eight_times_as_large(corpora, monkeypatch):
    monkeypatch.setattr(token_store, "_CHECKED", 1 << 9)
    monkeypatch.setattr(sampling, "_CHUNK", 1 << 9)
    small, large = (peak(lambda n=n: feed(corpora[0] / str(n))) for n in (4000, 32_000))
    assert large < 1.2 * small


def test_an_array_that_grew_is_the_array(tmp_path):
    array = GrowingArray(tmp_path / "a.npy", np.uint64)
    values = np.arange(200_000) * 3
    for start in range(0, len(values), 7000):
        array.extend(values[start : start + 7000].tolist())
    assert len(array) == 200_000
    assert not (tmp_path / "a.npy").exists()
    np.testing.assert_array_equal(array.finish(), values)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy", allow_pickle=False), values)
    assert open_array(tmp_path / "a.npy").dtype == np.uint64
    assert [f.name for f in tmp_path.iterdir()] == ["a.npy"]
