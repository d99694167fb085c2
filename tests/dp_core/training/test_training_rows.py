import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from child_processes import wait_for
from noised_updates import flat

from benchmarks.clipping_reference import ReferenceClipper
from dp_core.config.training import TrainingConfig
from dp_core.errors import BadInput, PlanError
from dp_core.models.bert import mlm_row_losses
from dp_core.models.config import Gpt2Config
from dp_core.models.parameters import fresh
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training import batches as batches_module
from dp_core.training.batches import (
    Batches,
    ShuffledRows,
    SingleRows,
    UnitRows,
    choose_rows,
    masked_examples,
    predictions_per_row,
    prefetch,
    row_keys,
)
from dp_core.training.gradient_sources import local_gradients
from dp_core.training.loop import PrivateUpdates
from dp_core.training.objectives import UnitBatch, ordinary_sum


class Draws:
    """A sampler with given draws."""

    def __init__(self, *draws):
        self._draws = draws

    def batch(self, t):
        return np.array(self._draws[t], np.int64)


def test_update_chooses_distinct_rows_of_a_unit_uniformly(store):
    units = np.array([0, 1, 2, 3])  # of one to four rows
    counts = np.zeros(store.n_rows)
    for t in range(2000):
        rows, real = choose_rows(store, units, 2, coins=5, step=t)
        for u in units:
            chosen = rows[u][real[u]].tolist()
            assert len(chosen) == len(set(chosen)) == min(2, u + 1)
            assert set(chosen) <= set(store.rows_of(u))
            counts[chosen] += 1
    for u in units:  # 5.8 standard deviations of at most √(2000/4)
        expected = 2000 * min(2, u + 1) / (u + 1)
        assert np.abs(counts[store.rows_of(u)] - expected).max() < 130


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
    assert not list(Batches(store, Draws([]), UnitRows(1, 4, 2)).micro_batches(0))


def texts_of(ids, positions, labels, weights):
    """Return masked rows (n, S) with their predicted tokens put back."""
    plain = ids.copy()
    for row, places, right, weight in zip(plain, positions, labels, weights, strict=True):
        row[places[weight > 0]] = right[weight > 0]
    return [bytes(row) for row in plain]


def test_ordinary_epochs_read_every_row_once(store):
    size = 7
    batches = Batches(store, ShuffledRows(store.n_rows, 1, size), SingleRows(1, 3))
    rows = []
    for t in range(2 * -(-store.n_rows // size)):
        for *masked, shares, _ in batches.micro_batches(t):
            ids, _, *predictions = (array[shares[:, 0] > 0, 0] for array in masked)
            rows += texts_of(ids, *predictions)
    everything = sorted(bytes(r) for r in store.tokens.astype(np.int32))
    assert sorted(rows[: store.n_rows]) == everything
    assert sorted(rows[store.n_rows : 2 * store.n_rows]) == everything
    assert rows[: store.n_rows] != rows[store.n_rows : 2 * store.n_rows]


def test_every_update_masks_a_row_anew(store):
    units, rows = np.arange(4), store.unit_rows[:4, None]
    first, second, other = (row_keys(store, units, rows, *key) for key in ((7, 0), (7, 1), (8, 0)))
    assert not np.any((first == second) | (first == other))  # of another update or secret


def test_keys_of_dropout_differ_by_row_update_secret_and_masking(store):
    keys = []
    for coins, step in ((1, 0), (1, 1), (2, 0)):
        made = UnitRows(coins, 4, 6, 3)
        for batch in Batches(store, Draws([0, 3, 7], [0, 3, 7]), made).micro_batches(step):
            keys.append(batch.keys[batch.shares > 0])
    every = np.concatenate(keys)
    assert len(np.unique(every)) == len(every) > 30


# --- several maskings of a row in one clipped gradient

ENGINES = ["book-keeping", "naive", "tensorflow-privacy"]
CLIP = 0.3


def batches_of(store, units, *, rows=2, maskings=3, at_once=4, coins=1):
    made = UnitRows(coins, at_once, rows * maskings, maskings)
    return list(Batches(store, Draws(units), made).micro_batches(0))


def gradient_of(config, copy):
    """Return the plain gradient of one copy of one row."""
    parameters = {n: tf.constant(a) for n, a in fresh(config, 0).parameters.items()}
    return flat(ordinary_sum(UnitBatch(mlm_row_losses, config, copy), parameters)[0])


def sum_of(config, batches, engine="book-keeping", style="flat"):
    parameters = {n: tf.constant(a) for n, a in fresh(config, 0).parameters.items()}
    clipper, total = ReferenceClipper(CLIP, engine, style), 0.0
    for batch in batches:
        losses = UnitBatch(mlm_row_losses, config, tuple(map(tf.constant, batch)))
        units = len(batch.shares)
        total += flat(clipper.clipped_grad_sum(losses, parameters, units, tf.constant(CLIP)).sums)
    return total


def test_each_masking_of_a_row_has_a_different_key(store):
    batch = batches_of(store, [3], rows=4, maskings=3)[0]  # unit 3 has four rows
    texts = texts_of(batch.ids[0], batch.positions[0], batch.labels[0], batch.weights[0])
    assert texts[:4] == texts[4:8] == texts[8:]
    assert sorted(texts[:4]) == sorted(
        bytes(r) for r in store.tokens[store.rows_of(3)].astype(np.int32)
    )
    seen = {(t, bytes(p)) for t, p in zip(texts, batch.positions[0], strict=True)}
    assert len(seen) > 6  # of 12: rows are short, so some masks are equal
    np.testing.assert_allclose(batch.shares[0], 1 / 12)


def test_first_copies_have_the_masks_of_a_single_masking(store):
    units = np.array([3, 7])
    rows, _ = choose_rows(store, units, 2, 1, 0)
    made = masked_examples(store, rows.ravel(), row_keys(store, units, rows, 1, 0).ravel())
    for maskings in (1, 3):
        (batch,) = batches_of(store, units, maskings=maskings)
        first = batch.ids[:2, :2].reshape(4, -1)
        np.testing.assert_array_equal(first, made.input_ids)


def test_shares_of_a_unit_sum_to_one_for_any_number_of_rows(store):
    batches = batches_of(store, range(9), rows=3, maskings=2, at_once=4)
    shares = np.concatenate([b.shares for b in batches])
    np.testing.assert_allclose(shares.sum(1), [1] * 9 + [0] * 3, atol=1e-6)
    rows = [2 * min(3, len(store.rows_of(u))) for u in range(9)]
    assert (shares > 0).sum(1).tolist() == rows + [0] * 3


@pytest.mark.parametrize("maskings", [1, 3])
def test_rows_and_masks_of_a_unit_do_not_depend_on_other_drawn_units(store, maskings):
    (alone,) = batches_of(store, [7, 11], maskings=maskings, at_once=6)
    (among,) = batches_of(store, [0, 3, 7, 9, 11, 20], maskings=maskings, at_once=6)
    for place, other in ((0, 2), (1, 4)):
        for a, b in zip(alone, among, strict=True):
            np.testing.assert_array_equal(a[place], b[other])


@pytest.mark.parametrize("engine", ENGINES)
def test_sum_equals_averaged_gradients_clipped_unit_by_unit(config, store, engine):
    """Brute force: the gradient of each copy, averaged over the unit's copies, then clipped."""
    units = [1, 3, 6]
    (batch,) = batches_of(store, units, at_once=3)
    expected, norms = 0.0, []
    for unit in range(3):
        copies = []
        for row in np.flatnonzero(batch.shares[unit]):
            *copy, _ = (tf.constant(a[unit : unit + 1, row : row + 1]) for a in batch)
            copies.append(gradient_of(config, (*copy, tf.ones((1, 1)))))
        gradient = np.mean(copies, axis=0)
        norms.append(np.linalg.norm(gradient))
        expected += gradient * min(1, CLIP / norms[-1])
    assert min(norms) > CLIP  # so averaging before clipping differs from averaging after it
    total = sum_of(config, [batch], engine)
    np.testing.assert_allclose(total, expected, atol=1e-5 * np.linalg.norm(expected))


@pytest.mark.parametrize("style", ["flat", "automatic"])
@pytest.mark.parametrize("rows,maskings", [(1, 1), (1, 5), (4, 3)])
def test_one_unit_changes_the_sum_by_at_most_the_clip_norm(config, store, rows, maskings, style):
    units, options = [1, 3, 6, 10], {"rows": rows, "maskings": maskings}
    everyone = sum_of(config, batches_of(store, units, **options), style=style)
    for unit in units:
        others = batches_of(store, [u for u in units if u != unit], **options)
        moved = np.linalg.norm(everyone - sum_of(config, others, style=style))
        assert 0.5 * CLIP < moved <= CLIP * (1 + 1e-5)


@pytest.mark.parametrize("micro_rows,units", [(24, 4), (12, 2), (5, 1)])
def test_micro_batch_rows_stay_bounded_with_maskings(store, plan_of, micro_rows, units):
    plan = plan_of(examples_per_step=2, maskings_per_example=3)
    updates = PrivateUpdates(plan, PrivacySeed.fixed(0), b"m")
    rows = updates.rows(micro_rows, devices=1)
    for batch in Batches(store, updates.sampler(store), rows).micro_batches(0):
        assert batch.ids.shape[:2] == (units, 6)


def test_maskings_are_part_of_the_plan_and_have_no_privacy_cost(plan_of):
    once, thrice = plan_of(), plan_of(maskings_per_example=3)
    assert thrice.to_json()["maskings_per_example"] == 3
    assert once.digest() != thrice.digest()
    assert once.event() == thrice.event()
    with pytest.raises(PlanError, match="maskings_per_example"):
        plan_of(maskings_per_example=0)


def test_several_maskings_of_a_causal_model_are_refused(train, plan_of, config):
    shape = Gpt2Config.of_size(vocab_size=config.vocab_size, hidden=64, layers=1, max_positions=12)
    with pytest.raises(BadInput, match=r"causal-lm has no masks.*Set it to 1"):
        train(plan_of(maskings_per_example=2), model=shape)


# --- batches that are made ahead


def test_memory_does_not_grow_with_the_batch_size(store, monkeypatch):
    made, alive = [], []
    original = batches_module.micro_batch

    def watched(*arguments):
        batch = original(*arguments)
        made.append(weakref.ref(batch.ids))
        alive.append(sum(ids() is not None for ids in made))
        return batch

    monkeypatch.setattr(batches_module, "micro_batch", watched)
    trainer = SimpleNamespace(add=lambda batch: None)
    for repeated in (1, 10):
        drawn = Draws(np.tile(np.arange(24), repeated))
        source = local_gradients(trainer, Batches(store, drawn, UnitRows(1, 1, 2)), 0, 1)
        assert list(source) == [0]
    assert len(made) == 24 * 11
    assert max(alive) <= 12


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


def test_training_reads_as_many_rows_at_a_time_as_its_shape_allows(
    train, plan_of, config, monkeypatch
):
    asked = []
    rows_at_once = lambda _, **shape: asked.append(shape) or 5  # noqa: E731
    monkeypatch.setattr(TrainingConfig, "rows_at_once", rows_at_once)
    monkeypatch.setattr(PrivateUpdates, "rows", lambda _, rows, *__: asked.append(rows) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(plan_of(), config=TrainingConfig(learning_rate=0.01))
    sizes = {"sequence_length": config.max_positions, "vocabulary_size": config.vocab_size}
    assert asked == [{"kind": "bert", "layers": 1, "hidden": 16} | sizes, 5]
