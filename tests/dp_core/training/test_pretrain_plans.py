"""What a plan says is what training does: every sampling, growing batches, a learned clip norm."""

from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from dp_core.errors import BadInput, Unfinished
from dp_core.privacy.batch_selection import sampler_for
from dp_core.privacy.execution_plan import (
    AdaptiveClipping,
    BatchPhase,
    FixedSizeSampling,
    PoissonSampling,
    ShuffledSampling,
    TruncatedPoissonSampling,
)
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training import batches as rows
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.config import anil
from dp_core.training.loop import Probe, noised_count, pretrain
from dp_core.training.trainer import Trainer

SEED = PrivacySeed.fixed(4)
ALPHA = 1e-7  # a right σ is rejected this rarely


@pytest.fixture()
def train(store, config, folder):
    def run(plan, training_config, **changes):
        settings = {
            "model": config,
            "store": store,
            "plan": plan,
            "training_config": training_config,
            "seed": None if plan is None else SEED,
            "manifest": b"manifest",
            "init_seed": 1,
            "checkpoints": LocalFolder(folder),
            "device": "cpu",
            "progress": lambda p: None,
        }
        return pretrain(**(settings | changes))

    return run


@pytest.fixture()
def seen(monkeypatch):
    """What the trainer is told, update by update, while it does it."""
    return _record(monkeypatch, Trainer.add, Trainer.move)


@pytest.fixture()
def told(monkeypatch):
    """The same without the arithmetic, where a test asks for nothing but what is told."""
    return _record(monkeypatch, lambda *_: None, lambda *_, **__: None)


def _record(monkeypatch, add, move):
    updates = [SimpleNamespace(batches=[], clips=set())]

    def added(self, batch, clip_norm=None):
        updates[-1].batches.append(batch)
        updates[-1].clips.add(clip_norm)
        return add(self, batch, clip_norm)

    def moved(self, **arguments):
        updates[-1].__dict__.update(arguments)
        updates.append(SimpleNamespace(batches=[], clips=set()))
        return move(self, **arguments)

    monkeypatch.setattr(Trainer, "add", added)
    monkeypatch.setattr(Trainer, "move", moved)
    return updates


def units_of(update):
    return sum(int((batch.shares > 0).any(1).sum()) for batch in update.batches)


def same(a, b):
    return all(np.array_equal(a.parameters[n], b.parameters[n]) for n in a.parameters)


def with_sampling(plan, sampling, batch):
    schedule = (BatchPhase(plan.steps, batch),)
    return dataclasses.replace(plan, sampling=sampling, schedule=schedule)


@pytest.mark.parametrize(
    "sampling,batch,micro_batches",
    [
        (PoissonSampling(), 9, None),
        (TruncatedPoissonSampling(cap=10), 9, 3),
        (FixedSizeSampling(batch=6), 6, 2),
        (ShuffledSampling(batch=6), 6, 2),
    ],
    ids=lambda x: getattr(x, "kind", None),
)
def test_each_sampling_trains_on_just_the_units_it_draws(
    train, plan_of, training_config_of, store, told, sampling, batch, micro_batches
):
    plan = with_sampling(plan_of(), sampling, batch)
    train(plan, training_config_of(batch_size=batch))
    sampler = sampler_for(plan, SEED, store.n_units)
    for t, update in enumerate(told[:-1]):
        assert units_of(update) == len(sampler.batch(t))
        assert update.divisor == batch  # the expected batch, whatever was drawn
        if micro_batches:  # static: padding makes up for what was not drawn
            assert len(update.batches) == micro_batches
        for micro_batch in update.batches:
            assert [a.shape for a in micro_batch.arrays()] == [
                a.shape for a in told[0].batches[0].arrays()
            ]
    assert len(told) == 1 + plan.steps
    assert len({units_of(u) for u in told[:-1]}) > 1 or not isinstance(sampling, PoissonSampling)


def test_a_truncated_batch_never_holds_more_than_its_cap(train, plan_of, training_config_of, told):
    plan = with_sampling(plan_of(steps=12), TruncatedPoissonSampling(cap=5), 20)
    train(plan, training_config_of(batch_size=20, updates=12))
    assert max(units_of(u) for u in told[:-1]) == 5


def test_batches_grow_by_the_plans_schedule(train, plan_of, training_config_of, told):
    phases = (BatchPhase(3, 4), BatchPhase(3, 20))
    plan = dataclasses.replace(plan_of(), schedule=phases)
    training_config = training_config_of(batch_size=20, updates=6, schedule=phases)
    train(plan, training_config)
    assert [u.divisor for u in told[:-1]] == [4] * 3 + [20] * 3
    assert max(units_of(u) for u in told[:3]) < min(units_of(u) for u in told[3:6])
    assert plan.event().phases == ((4 / 30, 0.7, 3), (20 / 30, 0.7, 3))


def test_batches_grow_without_a_plan_too(train, training_config_of, told):
    phases = (BatchPhase(2, 3), BatchPhase(2, 7))
    train(None, training_config_of(batch_size=7, schedule=phases, micro_rows=6))
    assert [u.divisor for u in told[:-1]] == [6, 6, 14, 14]
    assert [units_of(u) for u in told[:-1]] == [6, 6, 14, 14]


def test_a_schedule_that_is_not_the_plans_is_refused(train, plan_of, training_config_of, told):
    phases = (BatchPhase(2, 4), BatchPhase(2, 9))
    with pytest.raises(
        BadInput, match="the plan has 9 units for 4 updates, the training configuration 4 units"
    ):
        train(plan_of(), training_config_of(schedule=phases))
    split = (BatchPhase(1, 9), BatchPhase(3, 9))  # the same, said differently
    train(dataclasses.replace(plan_of(), schedule=split), training_config_of())
    assert [u.divisor for u in told[:-1]] == [9] * 4


def test_the_settings_after_anil_trains(train, plan_of, seen):
    training_config = anil(12, 8, 0.002, examples_per_step=2, micro_rows=8)
    plan = dataclasses.replace(plan_of(), schedule=training_config.phases())
    model = train(plan, training_config)
    assert [u.divisor for u in seen[:-1]] == [3, 5, 8, 12, 12, 12, 12, 12]
    assert all(np.isfinite(a).all() for a in model.parameters.values())


def test_a_batch_a_hundred_times_larger_takes_no_more_memory(
    train, plan_of, training_config_of, monkeypatch
):
    """No more micro-batches exist at once, however many an update has: it is waiting, not room."""
    alive = peak = made = 0
    original = rows.micro_batch

    def died():
        nonlocal alive
        alive -= 1

    def watched(*arguments):
        nonlocal alive, peak, made
        batch = original(*arguments)
        weakref.finalize(batch, died)
        alive, made = alive + 1, made + 1
        peak = max(peak, alive)
        return batch

    monkeypatch.setattr(rows, "micro_batch", watched)
    monkeypatch.setattr(Trainer, "add", lambda *_: None)  # the arithmetic is tested elsewhere
    peaks = []
    for batch in (24, 2400):
        monkeypatch.setattr(
            "dp_core.privacy.batch_selection.PoissonSampler.batch",
            lambda self, t, n=batch // 24: np.tile(np.arange(24), n),
        )
        peak, made = alive, 0
        plan = plan_of(declared_units=2400, expected_batch=batch, steps=1)
        nowhere = SimpleNamespace(names=list, write=lambda *_: None, where="")
        train(
            plan, training_config_of(updates=1, batch_size=batch, micro_rows=2), checkpoints=nowhere
        )
        assert made == batch
        peaks.append(peak)
    assert max(peaks) <= 12


def adaptive_plan(plan_of, **changes):
    adaptive = AdaptiveClipping(quantile=0.5, count_noise=2.0, rate=0.5)
    return plan_of(adaptive=adaptive, clip_norm=0.1, **changes)


def test_a_learned_clip_norm_scales_clipping_and_noise_alike(
    train, plan_of, training_config_of, seen
):
    plan = adaptive_plan(plan_of)
    reported = []
    train(plan, training_config_of(), progress=lambda p: reported.append(p.clip_norm))
    z_delta = plan.gradient_noise_multiplier()
    assert z_delta == pytest.approx((0.7**-2 - 4.0**-2) ** -0.5)
    clips = []
    for update in seen[:-1]:
        [clip] = update.clips
        assert update.noise.noise_multiplier == pytest.approx(z_delta)
        assert update.noise.clip_norm == clip
        clips.append(clip)
    assert clips[0] == 0.1
    assert len(set(clips)) == 4  # every update learned
    assert clips == sorted(clips)  # gradients are larger than 0.1: it rises
    assert reported[-1] > clips[-1]


def test_automatic_clipping_has_no_norm_to_learn(train, plan_of, training_config_of):
    with pytest.raises(BadInput, match="no clip norm to learn"):
        train(adaptive_plan(plan_of), training_config_of(clipping="automatic"))
    train(plan_of(), training_config_of(clipping="automatic"))


@pytest.mark.statistical
def test_the_counts_noise_has_its_sigma():
    sigma = 3.0
    sample = np.array([noised_count(11.5, SEED, b"m", t, sigma) for t in range(400)]) - 11.5

    def p_value(stddev):
        below = stats.chi2.cdf(np.square(sample / stddev).sum(), len(sample))
        return 2 * min(below, 1 - below)

    assert p_value(sigma) > ALPHA
    assert stats.kstest(sample / sigma, "norm").pvalue > ALPHA
    for wrong in (2 / 3, 3 / 2):
        assert p_value(wrong * sigma) < ALPHA
    assert noised_count(11.5, SEED, b"n", 0, sigma) != 11.5 + sample[0]


def test_a_time_boxed_run_ends_in_the_same_bits(train, plan_of, training_config_of, tmp_path):
    """With a learned clip norm, which is state as well; housekeeping may change on the way."""
    plan = adaptive_plan(plan_of, steps=3)
    training_config = training_config_of(updates=3)
    whole = train(plan, training_config, checkpoints=LocalFolder(tmp_path / "whole"))
    boxed = training_config_of(updates=3, stop_after_seconds=1e-9)
    for done in (1, 2):  # always one update, or it would never end
        with pytest.raises(Unfinished, match=f"time is up after {done} of 3 updates") as stopped:
            train(plan, boxed)
        assert stopped.value.exit_code == 75
    last = training_config_of(
        updates=3, checkpoint_every=2, keep_checkpoints=5, stop_after_seconds=1e9
    )
    assert same(whole, train(plan, last))


def test_what_is_looked_at_on_the_way_is_kept_first(train, training_config_of, tmp_path):
    """A run that goes on passes through every state that somebody has seen a score of."""
    place, there = LocalFolder(tmp_path / "kept"), {}

    def look(done, weights):
        there[done] = len(place.names())

    training_config = training_config_of(updates=5, checkpoint_every=100, keep_checkpoints=9)
    train(None, training_config, checkpoints=place, probe=Probe(frozenset({2, 4}), look))
    assert there == {2: 1, 4: 2}


def test_whole_words_need_to_know_what_a_word_is(train, training_config_of, store):
    training_config = training_config_of(whole_words=True)
    with pytest.raises(BadInput, match="continuation pieces"):
        train(None, training_config)
    with pytest.raises(BadInput, match="continuation pieces"):
        train(None, training_config, continuation=np.zeros(3, bool))


@pytest.mark.parametrize("private", [True, False])
def test_whole_words_are_masked_together_in_what_is_trained(
    train, plan_of, training_config_of, store, told, private
):
    """In this language every odd piece goes on with the even one before it."""
    odd = np.arange(store.vocabulary_size) % 2 == 1
    odd[:6] = False
    training_config = training_config_of(whole_words=True, updates=10)
    train(plan_of(steps=10) if private else None, training_config, continuation=odd)
    whole = cut = 0
    for update in told[:-1]:
        for batch in update.batches:
            for positions, weights in zip(
                batch.positions.reshape(-1, batch.positions.shape[-1]),
                batch.weights.reshape(-1, batch.weights.shape[-1]),
                strict=True,
            ):
                chosen = set(positions[weights > 0].tolist())
                words = {(p - 1) // 2 for p in chosen}  # position 0 is [CLS]
                full = sum({2 * w + 1, 2 * w + 2} <= chosen for w in words)
                whole += full
                cut += len(words) - full
                assert len(words) - full == 0 or len(chosen) == 1  # a quota of one cuts its word
    assert whole > 20
    assert cut > 20  # and both cases were there
