from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from noised_updates import Recorder, assert_gaussian, flat

from benchmarks.clipping_reference import ReferenceClipper
from dp_core.errors import BadInput
from dp_core.models.parameters import fresh
from dp_core.privacy.execution_plan import Clipper
from dp_core.privacy.noise_addition import UpdateNoise
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.training.batches import Batches, ShuffledRows, SingleRows
from dp_core.training.devices import strategy_for
from dp_core.training.trainer import AdamW, Tallies, Trainer

ADAMW = AdamW(0.9, 0.999, 0.01)
SEED = PrivacySeed.fixed(0)


def trainer_of(config, *, device="cpu", optimizer=ADAMW, clipper=None):
    return Trainer(strategy_for(device), config, fresh(config, 0).parameters, optimizer, clipper)


def batches_of(store, updates=3):
    source = Batches(store, ShuffledRows(store.n_rows, 0, 6), SingleRows(0, 6))
    return [batch for t in range(updates) for batch in source.micro_batches(t)]


def recorded(
    config, *, device="cpu", clipper, sigma=None, batches=(), divisor=1.0, precision="float32"
):
    start, recorder = fresh(config, 0).parameters, Recorder(0, 0, 0)
    trainer = Trainer(strategy_for(device), config, start, recorder, clipper, precision=precision)
    noise = sigma and UpdateNoise(SEED, b"m", 0, sigma, clipper.clip_norm)
    for batch in batches:
        trainer.add(batch)
    trainer.apply_update(step=0, learning_rate=0.1, divisor=divisor, noise=noise)
    return flat(trainer.weights())


@pytest.mark.statistical
@pytest.mark.parametrize("device", ["cpu", "mock-tpu:2"])
def test_noise_in_updates_has_the_variance_of_the_plan(config, device):
    clip, sigma, divisor = 0.5, 1.7, 9.0
    noise = recorded(
        config,
        device=device,
        clipper=Clipper(clip),
        sigma=sigma,
        divisor=divisor,
    )
    right = sigma * clip / divisor
    assert len(noise) > 3000
    assert_gaussian(noise, right)


def test_noise_is_added_to_the_clipped_sum_and_is_the_same_on_two_devices(config, store):
    clipper = Clipper(0.5)
    batches = batches_of(store)
    one = recorded(config, clipper=clipper, sigma=1.6, batches=batches)
    two = recorded(config, device="mock-tpu:2", clipper=clipper, sigma=1.6, batches=batches)
    silent = recorded(config, clipper=clipper, batches=batches)
    noise = recorded(config, clipper=clipper, sigma=1.6)
    noise_on_two = recorded(config, device="mock-tpu:2", clipper=clipper, sigma=1.6)
    np.testing.assert_array_equal(noise, noise_on_two)
    np.testing.assert_allclose(one, two, atol=2e-6)
    np.testing.assert_allclose(one, silent + noise, atol=2e-6)
    assert np.linalg.norm(silent) > 1


def test_two_devices_train_the_same_as_one(config, store):
    results = []
    for device in ("cpu", "mock-tpu:2"):
        trainer = trainer_of(config, device=device, clipper=Clipper(0.5))
        for batch in batches_of(store):
            trainer.add(batch)
        trainer.apply_update(step=0, learning_rate=0.01, divisor=18.0, noise=None)
        tallies = trainer.read_tallies()
        results.append((flat(trainer.state()), tallies.units, tallies.clipped, tallies.loss))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-3)
    assert results[0][1:3] == results[1][1:3]
    assert results[0][1] == 18
    assert results[0][3] == pytest.approx(results[1][3], rel=1e-5)


def test_update_resets_the_accumulators(config, store):
    trainer = trainer_of(config, optimizer=Recorder(0, 0, 0), clipper=Clipper(0.5))
    trainer.add(batches_of(store)[0])
    trainer.apply_update(step=0, learning_rate=0.1, divisor=1.0, noise=None)
    trainer.apply_update(step=1, learning_rate=0.1, divisor=1.0, noise=None)
    assert not flat(trainer.weights()).any()
    assert trainer.read_tallies().units == 6
    assert trainer.read_tallies().units == 0


@pytest.mark.parametrize("loudness", [1.0, 7.0])
def test_adamw_equals_the_published_rule(config, loudness):
    """Loshchilov and Hutter, Algorithm 2, in float64, on gradients that change.

    Correlated noise increases the step, but not the decay.
    """
    rng = np.random.default_rng(0)
    trainer = trainer_of(config)
    start = fresh(config, 0).parameters
    for name in ("layer_0/output/kernel", "layer_0/output/bias"):
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
        trainer = trainer_of(config)


def sums_of(config, store, device="cpu", **options):
    settings = {"clipper": Clipper(0.5), "batches": batches_of(store, updates=1)}
    return recorded(config, device=device, **(settings | options))


WITHOUT_TOOLBOX = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_privacy") is None,
    reason="tensorflow-privacy is not installed: it knows no TensorFlow after 2.15",
)


@pytest.mark.parametrize(
    "device,engine",
    [
        ("cpu", "naive"),
        ("mock-tpu:2", "naive"),
        pytest.param("cpu", "tensorflow-privacy", marks=WITHOUT_TOOLBOX),
    ],
)
def test_all_clipping_engines_train_the_same(config, store, device, engine):
    fast = sums_of(config, store)
    assert np.linalg.norm(fast) > 0.5
    np.testing.assert_allclose(
        sums_of(config, store, device, clipper=ReferenceClipper(0.5, engine)), fast, atol=2e-5
    )


@pytest.mark.parametrize("clipper", [None, Clipper(0.5)], ids=["ordinary", "private"])
def test_bfloat16_products_train_nearly_the_same_on_any_layout(config, store, clipper):
    exact = sums_of(config, store, clipper=clipper)
    rough = sums_of(config, store, clipper=clipper, precision="bfloat16")
    dealt = sums_of(config, store, "mock-tpu:2", clipper=clipper, precision="bfloat16")
    size = np.linalg.norm(exact)
    assert 1e-6 * size < np.linalg.norm(rough - exact) < 0.05 * size
    assert np.linalg.norm(dealt - rough) < 0.01 * size


def test_unknown_precision_is_refused_in_one_line(config, store):
    with pytest.raises(BadInput, match="not a precision"):
        sums_of(config, store, precision="float16")


def test_changing_clip_norm_and_noise_does_not_recompile(config, store):
    optimizer = Recorder(0, 0, 0)
    trainer = trainer_of(config, optimizer=optimizer, clipper=Clipper(0.5))
    sizes, scales = [], []
    for t, clip in enumerate((0.01, 0.02)):
        trainer.clipper.clip_norm = clip
        trainer.add(batches_of(store, updates=1)[0])
        trainer.apply_update(step=t, learning_rate=0.1, divisor=1.0, noise=None)
        sizes.append(np.linalg.norm(flat(trainer.weights())))
        noise = UpdateNoise(SEED, b"m", t, 10.0, clip)
        trainer.apply_update(step=t, learning_rate=0.1, divisor=1.0, noise=noise)
        scales.append(np.std(flat(trainer.weights())))
    assert sizes[1] > 1.5 * sizes[0]  # the weights have changed, so not exactly twice
    assert sizes[1] <= 6 * 0.02 * (1 + 1e-5)
    np.testing.assert_allclose(scales, [0.1, 0.2], rtol=0.05)
    trainer.read_tallies()
    functions = (trainer._add, trainer._totals, trainer._update, trainer._read)
    assert [f.experimental_get_tracing_count() for f in functions] == [1] * 4


def test_padding_is_not_counted_within_the_clip_norm(config, store):
    trainer = trainer_of(config, clipper=Clipper(1e6))
    batches = Batches(store, ShuffledRows(store.n_rows, 0, 4), SingleRows(0, 6))
    (batch,) = batches.micro_batches(0)
    assert (batch.shares.sum(1) > 0).sum() == 4
    for clip, share in ((1e6, 0.5), (1e-6, -0.5)):
        trainer.clipper.clip_norm = clip
        trainer.add(batch)
        assert trainer.take_count_within() == 4 * share
    assert trainer.take_count_within() == 0.0


@pytest.mark.parametrize("sigma", [1.7, None])
def test_loaded_sums_are_noised_and_divided_once(config, sigma):
    def weights(value):
        trainer = Trainer(
            strategy_for("cpu"), config, fresh(config, 0).parameters, Recorder(0, 0, 0),
            Clipper(0.5),
        )  # fmt: skip
        loaded = [np.full_like(array, value) for array in trainer.trained_weights()]
        for _ in range(2):  # if an update is loaded twice, only the second load counts
            trainer.load(loaded, np.zeros(4))
        noise = sigma and UpdateNoise(SEED, b"m", 0, sigma, 0.5)
        trainer.apply_update(step=0, learning_rate=0.1, divisor=8.0, noise=noise)
        return flat(trainer.weights())

    alone = weights(0.0)
    assert (np.std(alone) > 0.05) == bool(sigma)
    np.testing.assert_allclose(weights(1.0) - alone, 1 / 8, atol=1e-6)


def test_loaded_counts_are_read_once(config):
    trainer = trainer_of(config, clipper=Clipper(1e6))
    zeros = [np.zeros_like(array) for array in trainer.trained_weights()]
    for _ in range(2):
        trainer.load(zeros, np.array([2.5, 3.0, 2.0, -0.5]))
        trainer.apply_update(step=0, learning_rate=0.1, divisor=1.0, noise=None)
    assert trainer.take_count_within() == -1.0
    assert trainer.take_count_within() == 0.0
    assert trainer.read_tallies() == Tallies(5.0, 6, 4)
    assert trainer.read_tallies() == Tallies(0.0, 0, 0)


def test_sums_taken_and_loaded_into_another_trainer_make_the_same_update(config, store):
    """The sums that a host takes and the step loads equal the sums of a single process."""
    (first, *_) = batches_of(store)
    here, host, step = (trainer_of(config, clipper=Clipper(0.5)) for _ in range(3))
    host.add(first)
    host.clear()  # an interrupted call
    for trainer in (here, host):
        trainer.add(first)
    step.load(*host.take())
    for trainer in (here, step):
        trainer.apply_update(step=0, learning_rate=0.1, divisor=1.0, noise=None)
    np.testing.assert_array_equal(flat(step.weights()), flat(here.weights()))
    assert step.read_tallies() == here.read_tallies()
    assert host.read_tallies() == Tallies(0.0, 0, 0)
