import dataclasses
from functools import cache

import numpy as np
import pytest
import tensorflow as tf
from noised_updates import ADAMW, ALL, RECORDER, assert_gaussian, flat, trainer_of
from scipy import stats

from benchmarks.clipping_reference import ReferenceClipper
from dp_core.errors import BadInput
from dp_core.models.parameters import fresh
from dp_core.privacy.execution_plan import AdaptiveClipping, BatchPhase, Clipper
from dp_core.privacy.noise_addition import UpdateNoise
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.batches import Batches, ShuffledRows, SingleRows
from dp_core.training.devices import strategy_for
from dp_core.training.trainer import AdamW, Trainer

SEED, CLIPPED = PrivacySeed.fixed(0), Clipper(0.5)


def batches_of(store, updates=3, rows=6):
    source = Batches(store, ShuffledRows(store.n_rows, 0, rows), SingleRows(0, 6))
    return [batch for t in range(updates) for batch in source.micro_batches(t)]


def update(trainer, *, t=0, sigma=None, batches=(), divisor=1.0, rate=0.1):
    """Make one update of micro-batches; return the trained weights."""
    noise = sigma and UpdateNoise(SEED, b"m", t, sigma, trainer.clip_norm)
    for batch in batches:
        trainer.add(batch)
    trainer.apply_update(step=t, learning_rate=rate, divisor=divisor, noise=noise)
    weights = trainer.weights()
    return flat({name: weights[name] for name in trainer.names})


@cache
def _recorder(config, clipper, device, precision):
    """Return a trainer and its initial weights; tests share its compiled functions."""
    trainer = trainer_of(config, RECORDER, clipper, device=device, precision=precision)
    return trainer, trainer.trained_weights()


def recorded(config, clipper=None, *, device="cpu", precision="float32", **changes):
    """Return the gradient that reaches the optimizer."""
    trainer, weights = _recorder(config, clipper, device, precision)
    trainer.clear()
    trainer.set_weights(weights)
    return update(trainer, **changes)


@pytest.mark.statistical
@pytest.mark.parametrize(
    "device,kind",
    [("cpu", "all"), *(("mock-tpu:2", kind) for kind in ("all", "lora", "biases-and-norms"))],
)
def test_noise_is_only_on_trained_parameters_with_the_variance_of_the_plan(config, device, kind):
    clip, sigma, divisor = 0.5, 1.7, 9.0
    adapters = ALL.model_copy(update={"trained_parameters": kind})
    trainer = trainer_of(config, RECORDER, Clipper(clip), device=device, adapters=adapters)
    before = trainer.weights()
    sample = np.concatenate(
        [
            update(trainer, t=t, sigma=sigma, divisor=divisor)
            for t in range(6 if kind == "biases-and-norms" else 1)
        ]
    )
    after = trainer.weights()
    for name in before.keys() - set(trainer.names):
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    assert len(sample) > 1000
    assert len(np.unique(sample)) > 0.9 * len(sample)
    assert_gaussian(sample, sigma * clip / divisor)


def test_noise_is_added_to_the_clipped_sum_and_is_the_same_on_two_devices(config, store):
    batches = batches_of(store)
    (one, noise), (two, noise_on_two) = (
        [recorded(config, CLIPPED, device=device, sigma=1.6, batches=b) for b in (batches, ())]
        for device in ("cpu", "mock-tpu:2")
    )
    silent = recorded(config, CLIPPED, batches=batches)
    np.testing.assert_array_equal(noise, noise_on_two)
    np.testing.assert_allclose(one, two, atol=2e-6)
    np.testing.assert_allclose(one, silent + noise, atol=2e-6)
    assert np.linalg.norm(silent) > 1


def test_two_devices_train_the_same_as_one(config, store):
    results = []
    for device in ("cpu", "mock-tpu:2"):
        trainer = trainer_of(config, clipper=Clipper(0.5), device=device)
        update(trainer, batches=batches_of(store), divisor=18.0, rate=0.01)
        results.append((flat(trainer.state()), *trainer.read_tallies()))
    (state, loss, *counts), (state_of_two, loss_of_two, *counts_of_two) = results
    np.testing.assert_allclose(state, state_of_two, atol=1e-3)
    assert counts == counts_of_two and counts[0] == 18
    assert loss == pytest.approx(loss_of_two, rel=1e-5)


def test_update_resets_the_accumulators(config, store):
    trainer = trainer_of(config, RECORDER, Clipper(0.5))
    update(trainer, batches=batches_of(store, updates=1))
    assert not update(trainer, t=1).any()
    assert [trainer.read_tallies()[1] for _ in range(2)] == [6, 0]


@pytest.mark.parametrize("loudness", [1.0, 7.0])
def test_adamw_equals_the_published_rule(config, loudness):
    """Loshchilov and Hutter, Algorithm 2, in float64, on gradients that change.

    Correlated noise increases the step, but not the decay.
    """
    rng = np.random.default_rng(0)
    start = fresh(config, 0).parameters
    for name in ("layer_0/output/kernel", "layer_0/output/bias"):
        trainer = trainer_of(config)
        w, m, v = start[name].astype(np.float64), 0.0, 0.0
        for t in range(1, 6):
            g = rng.standard_normal(w.shape).astype(np.float32)
            trainer._sums[name].assign(g)
            arguments = {"learning_rate": 0.05, "divisor": 1.0, "loudness": loudness}
            trainer.apply_update(step=t - 1, noise=None, **arguments)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.astype(np.float64) ** 2
            step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
            w = w - 0.05 * (loudness * step + (0.01 * w if name.endswith("kernel") else 0))
        np.testing.assert_allclose(trainer.weights()[name], w, atol=1e-5 * loudness)


@pytest.mark.cases
def test_all_clipping_engines_train_the_same(config, store, device, engine):
    batches = batches_of(store, updates=1)
    fast = recorded(config, CLIPPED, batches=batches)
    assert np.linalg.norm(fast) > 0.5
    slow = recorded(config, ReferenceClipper(0.5, engine), device=device, batches=batches)
    np.testing.assert_allclose(slow, fast, atol=2e-5)


@pytest.mark.parametrize("clipper", [None, CLIPPED], ids=["ordinary", "private"])
def test_bfloat16_products_train_nearly_the_same_on_any_layout(config, store, clipper):
    batches = batches_of(store, updates=1)
    exact, rough, dealt = (
        recorded(config, clipper, device=device, precision=precision, batches=batches)
        for device, precision in (
            ("cpu", "float32"), ("cpu", "bfloat16"), ("mock-tpu:2", "bfloat16")
        )
    )  # fmt: skip
    size = np.linalg.norm(exact)
    assert 1e-6 * size < np.linalg.norm(rough - exact) < 0.05 * size
    assert np.linalg.norm(dealt - rough) < 0.01 * size


def test_unknown_precision_is_refused_in_one_line(config, store):
    with pytest.raises(BadInput, match="not a precision"):
        recorded(config, precision="float16", batches=batches_of(store, updates=1))


def test_changing_clip_norm_and_noise_does_not_recompile(config, store):
    trainer = trainer_of(config, RECORDER, Clipper(0.5))
    sizes, scales = [], []
    for t, clip in enumerate((0.01, 0.02)):
        trainer.clipper.clip_norm = clip
        sizes.append(np.linalg.norm(update(trainer, t=t, batches=batches_of(store, updates=1))))
        scales.append(np.std(update(trainer, t=t, sigma=10.0)))
    assert sizes[1] > 1.5 * sizes[0]  # the weights have changed, so not exactly twice
    assert sizes[1] <= 6 * 0.02 * (1 + 1e-5)
    np.testing.assert_allclose(scales, [0.1, 0.2], rtol=0.05)
    trainer.read_tallies()
    functions = (trainer._add, trainer._totals, trainer._update, trainer._read)
    assert [f.experimental_get_tracing_count() for f in functions] == [1] * 4


def test_padding_is_not_counted_within_the_clip_norm(config, store):
    trainer = trainer_of(config, clipper=Clipper(1e6))
    (batch,) = batches_of(store, updates=1, rows=4)
    assert (batch.shares.sum(1) > 0).sum() == 4
    for clip, share in ((1e6, 0.5), (1e-6, -0.5)):
        trainer.clipper.clip_norm = clip
        trainer.add(batch)
        assert trainer.take_count_within() == 4 * share
    assert trainer.take_count_within() == 0.0


@pytest.mark.parametrize("sigma", [1.7, None])
def test_loaded_sums_are_noised_and_divided_once(config, sigma):
    def weights(value):
        trainer = trainer_of(config, RECORDER, Clipper(0.5))
        loaded = [np.full_like(array, value) for array in trainer.trained_weights()]
        for _ in range(2):  # if an update is loaded twice, only the second load counts
            trainer.load(loaded, np.zeros(4))
        return update(trainer, sigma=sigma, divisor=8.0)

    alone = weights(0.0)
    assert (np.std(alone) > 0.05) == bool(sigma)
    np.testing.assert_allclose(weights(1.0) - alone, 1 / 8, atol=1e-6)


def test_loaded_counts_are_read_once(config):
    trainer = trainer_of(config, clipper=Clipper(1e6))
    zeros = [np.zeros_like(array) for array in trainer.trained_weights()]
    for _ in range(2):
        trainer.load(zeros, np.array([2.5, 3.0, 2.0, -0.5]))
        update(trainer)
    assert [trainer.take_count_within() for _ in range(2)] == [-1.0, 0.0]
    assert [trainer.read_tallies().tolist() for _ in range(2)] == [[5.0, 6, 4], [0.0, 0, 0]]


def test_sums_taken_and_loaded_into_another_trainer_make_the_same_update(config, store):
    """The sums that a host takes and the step loads equal the sums of a single process."""
    (first, *_) = batches_of(store)
    here, host, step = (trainer_of(config, clipper=Clipper(0.5)) for _ in range(3))
    host.add(first)
    host.clear()  # an interrupted call
    host.add(first)
    step.load(*host.take())
    np.testing.assert_array_equal(update(step), update(here, batches=[first]))
    assert step.read_tallies().tolist() == here.read_tallies().tolist()
    assert not host.read_tallies().any()


def test_model_without_trained_parameters_is_refused(config):
    start = fresh(config, 0).parameters
    with pytest.raises(BadInput, match="none of the model's parameters"):
        Trainer(strategy_for("cpu"), config, start, ADAMW, None, trained=())


# --- correction of the second moment for the noise

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
