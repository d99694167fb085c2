"""The chain of hosts, without any training: what is added up, who is told, what ends all."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from host_threads import Cast, close_links

from dp_core.errors import BadInput, ConfideError
from dp_core.privacy.batch_selection import (
    CyclicPoissonSampling,
    PoissonSampling,
    TruncatedPoissonSampling,
)
from dp_core.privacy.execution_plan import BatchPhase, ExecutionPlan
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.batches import (
    OrdinaryBatches,
    PrivateBatches,
    UnitBatches,
    batches_of,
    masked_examples,
)
from dp_core.training.hosts import rows_digest, share
from dp_core.training.loop import stream

SOON = 5.0  # seconds
BIG = (3, 200_000)  # more than travels in one piece


@pytest.fixture(autouse=True)
def _closed():
    yield
    close_links()


# --- who owns what


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("n_units", [1, 5, 24, 1000])
def test_every_unit_is_in_one_share_and_shares_are_even(count, n_units):
    shares = [share(number, count, n_units) for number in range(count)]
    assert [unit for one in shares for unit in one] == list(range(n_units))
    sizes = {len(one) for one in shares}
    assert max(sizes) - min(sizes) <= 1


LAWS = [PoissonSampling(), TruncatedPoissonSampling(cap=6), CyclicPoissonSampling(parts=2)]


def units_in(batches):
    """Return what a batch consists of, unit by unit, without padding."""
    units = []
    for batch in batches:
        for i in np.flatnonzero(batch.shares.sum(1) > 0):
            units.append(tuple(array[i].tobytes() for array in batch.arrays()))
    return units


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.kind)
@pytest.mark.parametrize("rows,maskings", [(1, 1), (2, 2)])
def test_the_union_over_hosts_is_the_batch_of_one_host(store, law, rows, maskings):
    plan = ExecutionPlan(
        unit=PrivacyUnit.PATIENT, declared_units=30, sampling=law, clip_norm=0.5,
        noise_multiplier=1.0, schedule=(BatchPhase(12, 9),), delta=1e-4, examples_per_step=rows,
        maskings_per_example=maskings,
    )  # fmt: skip
    seed = PrivacySeed.fixed(9)
    sizes = set()
    for count in (1, 2, 3, 4):
        source = PrivateBatches.of_plan(
            plan, seed, store, micro_rows=8, devices=1, examples=masked_examples, hosts=count
        )
        # What a helper makes of a draw, by what it is told alone.
        helped = batches_of(source.settings(), store, masked_examples)
        for step in range(plan.steps):
            drawn = source.draw(step)
            assert (
                drawn.tolist()
                == law.draw(seed, store.n_units, plan.sampling_rate(step), step).tolist()
            )
            parts = [
                units_in(helped.made(step, helped.of_units(drawn, share(k, count, store.n_units))))
                for k in range(count)
            ]
            whole = units_in(UnitBatches.made(source, step, drawn))
            assert [unit for part in parts for unit in part] == whole
            assert len(whole) == len(drawn)
            sizes.add(len(drawn))
    assert len(sizes) > 1
    if law.kind == "truncated-poisson":
        assert max(sizes) == law.cap  # of the whole batch: it was cut, and not by share
        assert sum(size == law.cap for size in sizes) == 1


@pytest.mark.parametrize("count", [2, 3])
def test_the_union_over_hosts_is_the_batch_of_one_host_in_epochs_too(store, count):
    source = OrdinaryBatches(store, seed=1, units=4, batch_rows=23)
    helped = batches_of(source.settings(), store, masked_examples)
    for step in range(4):  # past the end of the first epoch
        drawn = source.draw(step)
        parts = [
            units_in(helped.made(step, helped.of_units(drawn, share(k, count, store.n_units))))
            for k in range(count)
        ]
        whole = units_in(source.micro_batches(step))
        assert sorted(unit for part in parts for unit in part) == sorted(whole)
        assert len(whole) == 23


def test_a_host_reads_no_other_s_rows(store):
    """The memory map of a share's rows is all that is touched."""

    class Watched:
        def __init__(self, array):
            self.array, self.read = array, set()

        def __getitem__(self, rows):
            self.read |= set(np.asarray(rows).ravel().tolist())
            return self.array[rows]

    source = PrivateBatches(store, None, 1, 4, 2)
    own = share(1, 3, store.n_units)
    watched = Watched(store.tokens)
    object.__setattr__(store, "tokens", watched)
    try:
        for step in range(6):
            list(source.made(step, source.of_units(np.arange(store.n_units), own)))
    finally:
        object.__setattr__(store, "tokens", watched.array)
    first, last = store.unit_rows[own.start], store.unit_rows[own.stop]
    assert watched.read == set(range(int(first), int(last)))


def test_the_chief_tells_every_draw_whole_and_takes_its_own_part(store):
    told = {}

    class Told:
        count = 3

        def tell_drawn(self, step, drawn):
            told[step] = drawn.tolist()

    class Draws:
        def batch(self, step):
            return np.array([0, 7, 8, 23])[: 4 - step]

    source = PrivateBatches(store, Draws(), 1, 2, 1)
    items = list(stream(source, store, 0, 2, Told()))
    assert told == {0: [0, 7, 8, 23], 1: [0, 7, 8]}
    assert [step for step, batch in items if batch is None] == [0, 1]
    own = [units_in([batch]) for _, batch in items if batch is not None]
    assert sum(map(len, own)) == 4  # units 0 and 7 of each


def test_a_share_s_digest_sees_its_rows_and_no_others(store):
    whole = [rows_digest(store, share(k, 2, store.n_units)) for k in range(2)]
    changed = store.tokens.copy()
    changed[-1, 1] += 1
    kept = store.tokens
    object.__setattr__(store, "tokens", changed)
    try:
        again = [rows_digest(store, share(k, 2, store.n_units)) for k in range(2)]
    finally:
        object.__setattr__(store, "tokens", kept)
    assert whole[0] == again[0]
    assert whole[1] != again[1]


# --- sums


def arrays_of(number):
    rng = np.random.default_rng(number)
    return [rng.standard_normal(shape).astype(np.float32) for shape in (BIG, (7,), (2, 3))]


def counts_of(number):
    return np.array([0.5 * number, 3, number, -0.5])


def answer(helper, open_rows):
    """Answer each draw with the host's own arrays, like a training."""
    for step, drawn in helper.drawn():
        told = helper.weights(step)
        if told is None:
            return
        clip_norm, weights = told
        assert clip_norm == 0.25
        np.testing.assert_array_equal(weights[0], arrays_of(99)[0])
        assert drawn.tolist() == [step, 5]
        helper.send_sums(step, arrays_of(helper.number), counts_of(helper.number))


@pytest.mark.parametrize("count", [2, 4])
def test_each_host_is_added_once_in_one_order(count):
    cast = Cast(count, lambda number: None, answer)
    for step in range(2):
        cast.hosts.tell_drawn(step, np.array([step, 5]))
        cast.hosts.start_update(step, 0.25, arrays_of(99))
        totals, counts = cast.hosts.add_up(step, arrays_of(0))
        expected, expected_counts = arrays_of(count - 1), counts_of(count - 1)
        for number in reversed(range(count - 1)):
            expected = [a + b for a, b in zip(arrays_of(number), expected, strict=True)]
            if number:  # the chief's own counts stay with it
                expected_counts = expected_counts + counts_of(number)
        for ours, theirs in zip(totals, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)  # to the bit
        assert counts.tolist() == expected_counts.tolist()
    cast.hosts.end()
    cast.join()
    assert cast.raised == {}  # that it is over is no fault


def test_sums_of_another_update_are_refused():
    cast = Cast(2, lambda number: None, answer)
    cast.hosts.tell_drawn(0, np.array([0, 5]))
    cast.hosts.start_update(0, 0.25, arrays_of(99))
    with pytest.raises(ConfideError, match="update 0 came in place of 1"):
        cast.hosts.add_up(1, arrays_of(0))
    cast.hosts.end()
    cast.join()


# --- faults


@pytest.mark.parametrize("dies", [1, 2, 3])
def test_one_that_dies_ends_all_at_once(dies):
    """Whoever waits, computes or sends: no link, no host."""
    cast = Cast(4, lambda number: None, answer)
    begun = time.monotonic()
    victim = cast.helpers[dies - 1]
    for link in (victim._before, victim._behind):
        if link is not None:
            link.close()
    with pytest.raises(ConfideError, match="gone"):
        while time.monotonic() - begun < SOON:
            cast.hosts.check()
            time.sleep(0.01)
    cast.join()
    assert time.monotonic() - begun < SOON
    assert sorted(cast.raised) == [1, 2, 3]
    with pytest.raises(ConfideError):
        cast.hosts.start_update(0, 0.25, arrays_of(99))


def test_a_chief_that_dies_ends_all_at_once():
    cast = Cast(3, lambda number: None, answer)
    cast.hosts._link.close()
    cast.join()
    assert sorted(cast.raised) == [1, 2]
    assert all(isinstance(error, ConfideError) for error in cast.raised.values())


def test_why_a_host_gives_up_is_told_to_the_chief():
    words = "the rows are not those of the first host"

    def refuse(helper, open_rows):
        if helper.number == 2:
            helper.give_up(BadInput.exit_code, words)
            helper.close()
        else:
            list(helper.drawn())

    cast = Cast(3, lambda number: None, refuse)
    with pytest.raises(BadInput, match=f"host 2: {words}"):
        cast.hosts.add_up(0, arrays_of(0))
    cast.hosts.end()
    cast.join()


def test_who_waits_for_sums_is_woken_by_a_fault():
    ready = threading.Event()

    def die(helper, open_rows):
        ready.wait(5)
        helper.close()

    cast = Cast(2, lambda number: None, die)
    threading.Timer(0.2, ready.set).start()
    begun = time.monotonic()
    with pytest.raises(ConfideError, match="gone"):
        cast.hosts.add_up(0, arrays_of(0))
    assert time.monotonic() - begun < SOON
    cast.join()
