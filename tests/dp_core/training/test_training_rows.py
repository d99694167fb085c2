"""Rows and masks of drawn units, epochs, and batches that are made ahead."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from child_processes import wait_for

from dp_core.training.batches import (
    Batches,
    ShuffledRows,
    SingleRows,
    UnitRows,
    choose_rows,
    predictions_per_row,
    prefetch,
    row_keys,
)


class Draws:
    """A sampler with given draws."""

    def __init__(self, *draws):
        self._draws = draws

    def batch(self, t):
        return np.array(self._draws[t], np.int64)


def test_update_chooses_distinct_rows_of_a_unit(store):
    units = np.arange(store.n_units)
    seen = [set() for _ in units]
    for t in range(40):
        rows, real = choose_rows(store, units, 2, coins=5, step=t)
        for u in units:
            chosen = rows[u][real[u]].tolist()
            assert len(chosen) == len(set(chosen)) == min(2, len(store.rows_of(u)))
            assert set(chosen) <= set(store.rows_of(u))
            seen[u] |= set(chosen)
    assert all(seen[u] == set(store.rows_of(u)) for u in units)  # every row is chosen at some time


def test_rows_of_a_unit_are_chosen_uniformly(store):
    unit = np.array([3])  # unit 3 has four rows
    counts = np.zeros(4)
    for t in range(2000):
        rows, _ = choose_rows(store, unit, 2, coins=5, step=t)
        counts[rows[0] - store.rows_of(3)[0]] += 1
    assert np.abs(counts - 1000).max() < 130  # 5.8 standard deviations of √(2000/4)


def test_rows_and_masks_of_a_unit_do_not_depend_on_other_drawn_units(store):
    (alone,), (among,) = (
        Batches(store, Draws(drawn), UnitRows(1, 8, 2)).micro_batches(0)
        for drawn in ([7, 11], [0, 3, 7, 9, 11, 20])
    )
    for place, other in ((0, 2), (1, 4)):
        for a, b in zip(alone.arrays(), among.arrays(), strict=True):
            np.testing.assert_array_equal(a[place], b[other])


def test_masks_differ_between_updates_rows_and_secrets(store):
    def ids(coins, t):
        (batch,) = Batches(store, Draws([3], [3]), UnitRows(coins, 1, 4)).micro_batches(t)
        order = np.argsort(batch.labels.sum((0, 2)), kind="stable")
        return batch.positions, order

    assert not np.array_equal(ids(1, 0)[0], ids(1, 1)[0])
    assert not np.array_equal(ids(1, 0)[0], ids(2, 0)[0])


def test_micro_batches_have_one_shape_and_contain_every_drawn_unit(store):
    units = [0, 1, 2, 5, 6, 9, 11, 13, 17, 20, 23]
    batches = list(Batches(store, Draws(units), UnitRows(1, 4, 2)).micro_batches(0))
    k = predictions_per_row(store.sequence_length)
    assert [b.ids.shape for b in batches] == [(4, 2, store.sequence_length)] * 3
    assert [b.positions.shape for b in batches] == [(4, 2, k)] * 3
    shares = np.concatenate([b.shares for b in batches])
    assert (shares.sum(1) > 0).sum() == len(units)
    np.testing.assert_allclose(shares.sum(1)[: len(units)], 1)
    assert not shares[len(units) :].any()
    weights = np.concatenate([b.weights for b in batches])
    assert not weights[shares == 0].any()
    assert weights[shares > 0].any(1).all()


def test_empty_draw_makes_no_micro_batch(store):
    assert list(Batches(store, Draws([]), UnitRows(1, 4, 2)).micro_batches(0)) == []


def test_ordinary_epochs_read_every_row_once(store):
    size = 7
    batches = Batches(store, ShuffledRows(store.n_rows, 1, size), SingleRows(1, 3))
    rows = []
    for t in range(2 * -(-store.n_rows // size)):
        for batch in batches.micro_batches(t):
            real = batch.shares[:, 0] > 0
            plain = batch.ids[:, 0].copy()
            for m, (places, labels, weights) in enumerate(
                zip(batch.positions[:, 0], batch.labels[:, 0], batch.weights[:, 0], strict=True)
            ):
                plain[m][places[weights > 0]] = labels[weights > 0]
            rows += [bytes(r) for r in plain[real]]
    everything = sorted(bytes(r) for r in store.tokens.astype(np.int32))
    assert sorted(rows[: store.n_rows]) == everything
    assert sorted(rows[store.n_rows : 2 * store.n_rows]) == everything
    assert rows[: store.n_rows] != rows[store.n_rows : 2 * store.n_rows]


def test_updates_can_be_drawn_in_any_order(store):
    fresh, used = (
        Batches(store, ShuffledRows(store.n_rows, 1, 7), SingleRows(1, 3)) for _ in range(2)
    )
    for t in range(20):
        list(used.micro_batches(t))
    for a, b in zip(fresh.micro_batches(19), used.micro_batches(19), strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)


def test_every_update_masks_a_row_anew(store):
    units, rows = np.arange(4), store.unit_rows[:4, None]
    first, second = (row_keys(store, units, rows, 7, t) for t in (0, 1))
    assert not np.any(first == second)


def test_prefetch_keeps_the_order():
    assert list(prefetch(range(50), 3)) == list(range(50))


def test_error_in_the_thread_is_raised_after_finished_items():
    def broken():
        yield 1
        raise ValueError("broken")

    made = []
    with pytest.raises(ValueError, match="broken"):
        for item in prefetch(broken(), 2):
            made.append(item)
    assert made == [1]


def test_leaving_prefetch_early_ends_its_thread():
    before = threading.active_count()
    stream = prefetch(iter(int, 1), 2)  # an infinite stream of zeros
    assert next(stream) == 0
    stream.close()
    wait_for(lambda: threading.active_count() == before, 5)


def test_prefetch_makes_at_most_depth_items_ahead():
    made = []

    def items():
        for i in range(100):
            made.append(i)
            yield i

    stream = prefetch(items(), 3)
    next(stream)
    time.sleep(0.3)
    assert len(made) <= 1 + 3 + 1  # read, waiting, and in progress
    stream.close()
