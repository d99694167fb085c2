"""Averages of the iterates: by hand, on several devices, after stops, and in the release."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file

from dp_core.config.training import TrainingConfig
from dp_core.errors import Unfinished
from dp_core.models.parameters import fresh
from dp_core.privacy.execution_plan import AdaptiveClipping, Clipper
from dp_core.training.checkpoints import LocalFolder
from dp_core.training.devices import strategy_for
from dp_core.training.loop import EvaluationHook
from dp_core.training.trainer import AdamW, Trainer


def averaging(kind, share):
    return TrainingConfig(averaging=kind, average_share=share)


def average_of(config, iterates, start):
    """Return the average in float64 by its recursion."""
    average = start
    for t, weights in enumerate(iterates):
        newest = config.newest_share(t, len(iterates))
        average = (1 - newest) * average + newest * weights
    return average


def test_exponential_average_has_a_warm_start():
    """De et al. 2022: a ← d·a + (1 − d)·w with d = min(decay, (1 + t)/(10 + t)) after t updates."""
    config = averaging("exponential", 0.05)
    shares = [config.newest_share(step, 1000) for step in range(1000)]
    expected = [1 - min(1 - 1 / 50, (1 + t) / (10 + t)) for t in range(1, 1001)]
    np.testing.assert_allclose(shares, expected, rtol=1e-12)
    assert shares[0] == pytest.approx(9 / 11)
    assert shares[-1] == pytest.approx(0.02)


def test_tail_average_is_the_mean_of_the_last_iterates():
    iterates = np.random.default_rng(0).standard_normal((20, 3))
    for share, last in ((0.25, 5), (1.0, 20), (0.001, 1)):
        found = average_of(averaging("tail", share), iterates, np.full(3, 1e3))
        np.testing.assert_allclose(found, iterates[-last:].mean(0), rtol=1e-12)


@pytest.mark.parametrize("field,value", [("average_share", 0.0), ("average_share", 1.1),
                                         ("averaging", "last"), ("noise_floor", -0.1)])  # fmt: skip
def test_impossible_averages_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        TrainingConfig.model_validate({field: value})


@pytest.mark.parametrize("device", ["cpu", "mock-tpu:2"])
def test_trainer_averages_the_weights_after_each_update(config, device):
    rng = np.random.default_rng(0)
    start = fresh(config, 0).parameters
    trainer = Trainer(
        strategy_for(device), config, start, AdamW(0.9, 0.98, 0.01), Clipper(1.0), averages=True
    )
    name = "layer_0/output/kernel"
    average = start[name].astype(np.float64)
    for step, newest in enumerate((0.8, 1.0, 0.3, 0.25)):
        gradient = rng.standard_normal(average.shape).astype(np.float32)
        trainer._sums[name].assign(gradient / trainer.devices)
        trainer.apply_update(step=step, learning_rate=0.05, divisor=1.0, noise=None)
        trainer.average(newest)
        average = (1 - newest) * average + newest * trainer.weights()[name]
        np.testing.assert_allclose(trainer.released()[name], average, atol=1e-6)
    assert np.abs(trainer.released()[name] - trainer.weights()[name]).max() > 1e-3


def test_training_without_average_releases_the_weights(config):
    trainer = Trainer(
        strategy_for("cpu"), config, fresh(config, 0).parameters, AdamW(0.9, 0.98, 0.01), None
    )
    for name, value in trainer.released().items():
        np.testing.assert_array_equal(value, trainer.weights()[name])
    assert not any(name.startswith("average/") for name in trainer.state())


@pytest.mark.parametrize("kind", ["exponential", "tail"])
def test_average_of_iterates_is_released_and_evaluated(
    train, plan_of, config_of, config, kind, folder
):
    averaged = config_of(averaging=kind, average_share=0.6, keep_checkpoints=9, checkpoint_every=1)
    seen, name = {}, "embeddings/word"
    hook = EvaluationHook(frozenset({4, 5}), lambda done, w: seen.update({done: w[name]}))
    model = train(plan_of(steps=5), config=averaged, hook=hook)
    files = (folder / f"update-{update:010d}.safetensors" for update in range(1, 6))
    iterates = [load_file(file)[name].astype(np.float64) for file in files]
    expected = average_of(averaged, iterates, fresh(config, 1).parameters[name])
    np.testing.assert_allclose(model.parameters[name], expected, atol=1e-6)
    np.testing.assert_array_equal(seen[5], model.parameters[name])
    assert np.abs(seen[4] - iterates[3]).max() > 1e-4
    if kind == "tail":
        np.testing.assert_allclose(model.parameters[name], np.mean(iterates[2:], 0), atol=1e-6)


def test_averaging_stopped_after_every_update_ends_in_the_same_bits(
    train, plan_of, config_of, tmp_path
):
    """With a learned clip norm and noise correction, which are part of the state."""
    plan = plan_of(steps=3, adaptive=AdaptiveClipping(0.5, 2.0, 0.5))
    settings = {"averaging": "exponential", "average_share": 0.9, "noise_floor": 0.5}
    whole = train(plan, config=config_of(**settings), checkpoints=LocalFolder(tmp_path / "whole"))
    for _ in range(2):
        with pytest.raises(Unfinished):
            train(plan, config=config_of(**settings, time_box_minutes=1e-9))
    stopped = train(plan, config=config_of(**settings))
    for name, value in whole.parameters.items():
        np.testing.assert_array_equal(stopped.parameters[name], value)


def test_averaging_is_part_of_a_runs_identity(config_of):
    usual = config_of().identity()
    for change in ({"averaging": "tail"}, {"average_share": 0.5}, {"noise_floor": 0.1}):
        assert config_of(**change).identity() != usual
