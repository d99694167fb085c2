from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from noised_updates import flat, trainer_of
from scipy import stats

from dp_core.models.parameters import fresh
from dp_core.privacy.execution_plan import AdaptiveClipping, BatchPhase, Clipper
from dp_core.privacy.noise_addition import UpdateNoise
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.trainer import AdamW, Trainer

SEED = PrivacySeed.fixed(0)
NAME = "layer_0/output/kernel"
BETA1, BETA2, FLOOR = 0.9, 0.98, 0.25


class Seen(AdamW):
    """Also keeps the noised gradient in an additional weight."""

    gradients: dict

    def apply(self, name, weight, mean, square, gradient, *others, **named):
        self.gradients[name].assign(gradient)
        super().apply(name, weight, mean, square, gradient, *others, **named)


def test_corrected_updates_equal_the_published_rule_for_changing_clip_norm_and_batch(config):
    """Tang et al. 2023, Algorithm 1, in float64; Φ̂ from (σ, C, B) alone."""
    start = fresh(config, 0).parameters
    optimizer = Seen(BETA1, BETA2, 0.01, FLOOR)
    kept = {n: tf.Variable(np.zeros_like(a)) for n, a in start.items()}
    object.__setattr__(optimizer, "gradients", kept)
    trainer = trainer_of(config, optimizer, Clipper(1.0))
    rng = np.random.default_rng(0)
    w, m, v, noise_variance = start[NAME].astype(np.float64), 0.0, 0.0, 0.0
    at_floor = []
    for t, (sigma, clip, batch) in enumerate(
        ((1.0, 1.0, 8), (1.0, 0.5, 8), (1.0, 0.7, 20), (1.0, 2.0, 20), (1.0, 1.0, 20)), start=1
    ):
        signal = rng.standard_normal(w.shape).astype(np.float32)
        trainer._sums[NAME].assign(signal)
        noise = UpdateNoise(SEED, b"m", t, sigma, clip)
        trainer.apply_update(step=t - 1, learning_rate=0.05, divisor=batch, noise=noise)
        g = kept[NAME].numpy().astype(np.float64)
        assert np.std(g - signal / batch) == pytest.approx(sigma * clip / batch, rel=0.2)
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g**2
        noise_variance = BETA2 * noise_variance + (1 - BETA2) * (sigma * clip / batch) ** 2
        known = noise_variance / (1 - BETA2**t)
        second = v / (1 - BETA2**t) - known
        at_floor.append((second < FLOOR * known).mean())
        step = (m / (1 - BETA1**t)) / np.sqrt(np.maximum(second, FLOOR * known))
        w = w - 0.05 * (step + 0.01 * w)
        np.testing.assert_allclose(trainer.weights()[NAME], w, atol=2e-5)
    assert 0.05 < np.mean(at_floor) < 0.95  # both sides of the maximum occurred


@pytest.mark.statistical
def test_corrected_second_moment_of_pure_noise_is_centred_at_zero(config):
    """The step is then the mean over √(γΦ̂), because the divisor is at the floor."""
    sigma, batch, updates = 1.3, 7.0, 40
    trainer = trainer_of(config, AdamW(0.0, 0.999, 0.0, 1e6))  # a floor that is never exceeded
    for t in range(updates):
        before = flat(trainer.weights())
        noise = UpdateNoise(SEED, b"m", t, sigma, 1.0)
        trainer.apply_update(step=t, learning_rate=1.0, divisor=batch, noise=noise)
    second = flat(trainer._squares) / (1 - 0.999**updates)
    known, d = (sigma / batch) ** 2, len(second)
    # v̂ is nearly a mean of 40 squares of normal numbers: of variance 2·known²/40, d of them.
    limit = known * np.sqrt(2 / updates / d) * 1.01
    assert abs((second - known).mean()) < stats.norm.isf(1e-7) * limit
    for wrong in (2 / 3, 3 / 2):  # of σ
        assert abs((second - wrong**2 * known).mean()) > stats.norm.isf(1e-7) * limit
    step = before - flat(trainer.weights())
    assert np.std(step) == pytest.approx(1 / 1e3, rel=0.05)  # noise over √(10⁶·known)


def test_correction_without_noise_equals_adamw(config):
    rng, trainers = np.random.default_rng(0), []
    gradients = rng.standard_normal((4, *fresh(config, 0).parameters[NAME].shape))
    for floor in (0.0, 0.3):
        trainer = trainer_of(config, AdamW(BETA1, BETA2, 0.01, floor))
        for t, gradient in enumerate(gradients.astype(np.float32)):
            trainer._sums[NAME].assign(gradient)
            trainer.apply_update(step=t, learning_rate=0.01, divisor=1.0, noise=None)
        trainers.append(trainer.weights())
    for name, value in trainers[0].items():
        np.testing.assert_allclose(trainers[1][name], value, atol=1e-6)


def test_training_subtracts_the_noise_variance_of_its_plan(train, plan_of, config_of, monkeypatch):
    """With growing batches and a learned clip norm the variance changes in every update."""
    known, updates_made = [], []
    variance, apply_update = Trainer._known_variance, Trainer.apply_update

    def watched(self, step, deviation):
        known.append(variance(self, step, deviation))
        return known[-1]

    def updated(self, *, noise, divisor, **others):
        updates_made.append((noise.noise_multiplier, noise.clip_norm, divisor))
        return apply_update(self, noise=noise, divisor=divisor, **others)

    monkeypatch.setattr(Trainer, "_known_variance", watched)
    monkeypatch.setattr(Trainer, "apply_update", updated)
    plan = plan_of(adaptive=AdaptiveClipping(0.5, 2.0, 0.5))
    plan = dataclasses.replace(plan, schedule=(BatchPhase(2, 4), BatchPhase(3, 16)))
    train(plan, config=config_of(noise_floor=0.5, beta2=0.9))
    assert len({clip for _, clip, _ in updates_made}) == 5
    assert [batch for _, _, batch in updates_made] == [4, 4, 16, 16, 16]
    weights = 0.9 ** np.arange(5)
    for t in range(5):
        variances = np.array([(s * c / b) ** 2 for s, c, b in updates_made[: t + 1]])[::-1]
        assert known[t] == pytest.approx(
            (weights[: t + 1] * variances).sum() / weights[: t + 1].sum()
        )
