"""Pre-training as a whole: it learns, follows the plan, and survives interruptions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dp_core.errors import BadInput
from dp_core.models.parameters import fresh
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training import loop as module
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.loop import OrdinaryUpdates, PrivateUpdates
from dp_core.training.objectives import mlm_accuracy


def same(a, b):
    return all(np.array_equal(a.parameters[n], b.parameters[n]) for n in a.parameters)


def test_training_without_privacy_learns_the_language(train, store, config_of):
    losses = []
    model = train(
        OrdinaryUpdates(500, 24, seed=1),
        config=config_of(micro_rows=24),
        progress=lambda p: losses.append(p.loss),
    )
    assert losses[-1] < 2.0 < np.log(34)
    # an odd word follows its even word, so a neighbour determines half of the masked words
    assert mlm_accuracy(model, store, seed=0) > 0.35


def test_same_seeds_give_the_same_bits_and_other_noise_gives_others(train, plan_of, tmp_path):
    models = [
        train(
            PrivateUpdates(plan_of(), PrivacySeed.fixed(seed), b"manifest"),
            checkpoints=LocalFolder(tmp_path / str(i)),
        )
        for i, seed in enumerate((4, 4, 5))
    ]
    assert same(models[0], models[1])
    assert not same(models[0], models[2])


def test_failed_and_resumed_run_ends_in_the_same_bits(train, plan_of, config_of, tmp_path):
    plan, every = plan_of(), config_of(checkpoint_every=1)
    whole = train(plan, config=every, checkpoints=LocalFolder(tmp_path / "whole"))

    class Stop(Exception):
        pass

    def stop(progress):
        raise Stop

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
        patch.setattr(module, "REPORT_SECONDS", 0.0)
        train(plan, config=every, progress=stop)
    reports = []
    assert same(whole, train(plan, config=every, progress=reports.append))
    assert reports[-1].update == 4


def test_finished_run_is_not_repeated(train, plan_of):
    first = train(plan_of())
    reports = []
    assert same(first, train(plan_of(), progress=reports.append))
    assert [p.update for p in reports] == [4]  # the run may have ended before its last report


def test_checkpoints_of_another_run_are_refused(train, plan_of, config_of):
    train(plan_of())
    for updates, changes in (
        (PrivateUpdates(plan_of(), PrivacySeed.fixed(4), b"other"), {}),
        (plan_of(noise_multiplier=0.8), {}),
        (plan_of(), {"config": config_of(learning_rate=0.02)}),
        (plan_of(), {"init_seed": 2}),
        (OrdinaryUpdates(4, 18, seed=1), {}),
    ):
        with pytest.raises(BadInput, match="belongs to another run"):
            train(updates, **changes)


def test_empty_batch_makes_a_noised_update(train, plan_of, config):
    """At a rate of 10⁻⁹ no unit is ever drawn, but the noise changes the weights."""
    reports = []
    plan = plan_of(declared_units=10**9, expected_batch=1, delta=1e-10)
    model = train(plan, progress=reports.append)
    assert reports[-1].batch == 0
    assert np.isnan(reports[-1].loss)
    start = fresh(config, 1).parameters
    for name, value in model.parameters.items():
        assert np.isfinite(value).all()
        assert (value != start[name]).mean() > 0.99, name


def test_realised_batch_equals_the_drawn_units(train, plan_of):
    reports = []
    train(plan_of(expected_batch=30, steps=2), progress=reports.append)
    assert reports[-1].batch == 24  # rate 1: all 24 units, though 30 are declared
    assert 0 < reports[-1].clipped <= 1


@pytest.mark.parametrize(
    "declared,changes,message",
    [
        (30, {"vocab_size": 39}, "larger than the model's"),
        (30, {"max_positions": 11}, "the model's 11 positions"),
        (23, {}, "more units than declared"),
    ],
)
def test_inconsistent_arguments_are_refused(train, plan_of, config, declared, changes, message):
    with pytest.raises(BadInput, match=message):
        train(plan_of(declared_units=declared), model=dataclasses.replace(config, **changes))


@pytest.mark.parametrize(("field", "least"), [("updates", 0), ("batch_rows", 1)])
def test_negative_updates_and_empty_batches_are_refused(field, least):
    numbers = {"updates": 1, "batch_rows": 1, "seed": 0}
    assert getattr(OrdinaryUpdates(**numbers | {field: least}), field) == least
    with pytest.raises(BadInput, match=field):
        OrdinaryUpdates(**numbers | {field: least - 1})
