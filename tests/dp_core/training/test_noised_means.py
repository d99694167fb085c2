import itertools

import numpy as np
import pytest
import tensorflow as tf
from noised_updates import flat
from scipy import stats

from dp_core.privacy import noise_addition
from dp_core.privacy import noise_addition as module
from dp_core.privacy.seed_store import PrivacySeed

SEED = PrivacySeed.fixed(2)
SHAPES = {"b": (70,), "a": (11, 130), "c": (2, 3, 5), "d": (1201,)}
SMALL = ("b", "c")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 500)
    monkeypatch.setattr(module, "_FEW", 100)


def zeros(shapes=SHAPES):
    return {name: tf.zeros(shape) for name, shape in shapes.items()}


def drawn(*, seed=SEED, manifest=b"m", t=3, sigma=1.0, clip=1.0, totals=None, divisor=1.0):
    noise = noise_addition.UpdateNoise(seed, manifest, t, sigma, clip)
    means = noise_addition.noised_means(totals or zeros(), noise, divisor)
    return {name: mean.numpy() for name, mean in means.items()}


VALUES = sum(np.prod(shape) for shape in SHAPES.values())


def expected(name, sizes, sigma=1.0):
    key = noise_addition.noise_key(SEED, b"m", 3, name)
    noise = np.concatenate([noise_addition.lattice_noise(key, n, j) for j, n in enumerate(sizes)])
    return (noise / noise_addition.lattice_scale(sigma, 1.0, VALUES)).astype(np.float32)


def test_noise_has_the_parameters_shapes_and_differs_between_blocks():
    noise = drawn()
    assert {n: v.shape for n, v in noise.items()} == SHAPES
    assert list(noise) == list(SHAPES)
    a, b, c, d = (noise[name].ravel() for name in sorted(SHAPES))
    blocks = [a[:500], a[500:1000], a[1000:], d[:500], d[500:1000], d[1000:], b, c]
    for one, two in itertools.combinations(blocks, 2):
        both = min(one.size, two.size)
        assert not np.any(one[:both] == two[:both])


def test_large_parameters_have_separate_keys_and_small_ones_share_a_stream_by_name():
    noise = drawn(sigma=0.3)
    together = np.concatenate([noise[name].ravel() for name in SMALL])
    for values, name, blocks in (
        (noise["a"].ravel(), "a", (500, 500, 430)),
        (noise["d"], "d", (500, 500, 201)),
        (together, module._TOGETHER, (100,)),
    ):
        np.testing.assert_allclose(values, expected(name, blocks, 0.3), rtol=1e-6)


def test_noise_does_not_depend_on_the_number_of_threads_or_the_order_of_parameters(monkeypatch):
    before = flat(drawn())
    for cores in (1, 2, 7, None):
        monkeypatch.setattr(module.os, "cpu_count", lambda cores=cores: cores)
        np.testing.assert_array_equal(flat(drawn()), before)
    other = drawn(totals=zeros(dict(sorted(SHAPES.items()))))
    np.testing.assert_array_equal(flat(other), before)


def test_models_with_only_small_or_only_large_parameters_are_noised():
    for names in (("a", "d"), SMALL):
        means = drawn(totals=zeros({name: SHAPES[name] for name in names}))
        for name in names:  # fewer values have a slightly finer lattice
            np.testing.assert_allclose(means[name], drawn()[name], rtol=1e-6)


def test_noise_differs_between_updates_manifests_and_seeds():
    others = [drawn(), drawn(t=4), drawn(manifest=b"n"), drawn(seed=PrivacySeed.fixed(1))]
    assert len({flat(noise).tobytes() for noise in others}) == len(others)
    assert np.abs(np.corrcoef([flat(noise) for noise in others]) - np.eye(4)).max() < 0.1


@pytest.mark.statistical
def test_noise_of_the_mean_has_the_stated_scale():
    totals = {"w": tf.random.stateless_normal((123, 456), (1, 2)), "v": tf.ones((60,))}
    means = drawn(totals=totals, sigma=0.6, clip=0.5, divisor=5.0)
    noise = np.concatenate([(5 * means[n] - totals[n].numpy()).ravel() for n in totals])
    right = 0.6 * 0.5
    assert stats.kstest(noise / right, "norm").pvalue > 1e-4
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(noise / (right * wrong), "norm").pvalue < 1e-9


def test_lattice_bound_covers_all_values_of_the_model(monkeypatch):
    """The effect of rounding on the sensitivity grows with the whole model, not with a block."""
    asked = []
    exact = module.lattice_scale

    def scale_of(sigma, clip, values, strategy):
        asked.append((sigma, clip, values))
        return exact(sigma, clip, values, strategy)

    monkeypatch.setattr(module, "lattice_scale", scale_of)
    drawn(sigma=0.7, clip=0.2)
    assert asked == [(0.7, 0.2, VALUES)]


def test_sums_and_earlier_means_are_not_overwritten():
    totals = {"w": tf.range(1000.0), "v": tf.range(10.0)}
    first = noise_addition.noised_means(
        totals, noise_addition.UpdateNoise(SEED, b"m", 0, 1.0, 1.0), 1.0
    )
    before = {name: mean.numpy().copy() for name, mean in first.items()}
    noise_addition.noised_means(totals, noise_addition.UpdateNoise(SEED, b"m", 1, 1.0, 1.0), 1.0)
    for name, mean in first.items():
        np.testing.assert_array_equal(mean, before[name])
        np.testing.assert_array_equal(totals[name], np.arange(len(mean)))


def test_error_in_a_noise_thread_is_raised(monkeypatch):
    monkeypatch.setattr(module, "noised_mean", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drawn()


def test_printed_noise_does_not_contain_its_secret():
    shown = repr(noise_addition.UpdateNoise(SEED, b"m", 0, 1.5, 0.1))
    assert shown == "UpdateNoise(t=0, noise_multiplier=1.5, clip_norm=0.1, " + (
        "strategy=ToeplitzStrategy(coefficients=(65536,)))"
    )
