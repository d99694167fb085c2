import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dp_core.privacy.noise import noise_key
from dp_core.privacy.seeds import PrivacySeed

tf = pytest.importorskip("tensorflow")
from dp_core.privacy.tf_noise import gaussian  # noqa: E402

SEED = PrivacySeed.fixed("tf noise")
MANIFEST = b"manifest"


def draw(
    t: int = 0, variable: str = "kernel", draw: int = 0, stddev: float = 1.0, size: int = 60_000
) -> NDArray[np.float32]:
    key = noise_key(SEED, MANIFEST, t, variable, draw)
    noise: NDArray[np.float32] = gaussian((size,), key, stddev).numpy()
    return noise


def fits(noise: NDArray[np.float32], sigma: float) -> float:
    return float(stats.kstest(noise.ravel(), "norm", (0, sigma)).pvalue)


@pytest.mark.statistical
@pytest.mark.parametrize("stddev", [0.01, 1.0, 37.5])
def test_noise_has_its_scale_and_no_other(stddev: float) -> None:
    noise = draw(stddev=stddev)
    assert noise.dtype == np.float32
    assert fits(noise, stddev) > 1e-4
    assert fits(noise, stddev * 2 / 3) < 1e-9
    assert fits(noise, stddev * 3 / 2) < 1e-9


@pytest.mark.statistical
def test_updates_variables_draws_and_places_are_independent() -> None:
    noises = [draw(t, v, d) for t in (0, 1) for v in ("a", "b") for d in (0, 1)]
    limit = 5 / math.sqrt(60_000)
    for i, one in enumerate(noises):
        for two in noises[i + 1 :]:
            assert abs(np.corrcoef(one, two)[0, 1]) < limit
            assert abs(np.corrcoef(np.abs(one), np.abs(two))[0, 1]) < limit
        # cosine and sine of one Box-Muller pair lie half the array apart
        for lag in (1, 2, 30_000):
            assert abs(np.corrcoef(one[lag:], one[:-lag])[0, 1]) < limit * math.sqrt(2)
            assert abs(np.corrcoef(np.abs(one[lag:]), np.abs(one[:-lag]))[0, 1]) < limit * 1.5


@pytest.mark.statistical
def test_the_draws_of_shards_and_micro_batches_add_up_to_the_effective_scale() -> None:
    draws = 12  # 3 shards of 4 micro-batches, each with σ/√12
    total = sum(draw(draw=d, stddev=2.0 / math.sqrt(draws)) for d in range(draws))
    assert isinstance(total, np.ndarray)
    assert fits(total, 2.0) > 1e-4
    # the paper's trap: the full σ on each
    assert fits(total * math.sqrt(draws), 2.0) < 1e-9


@pytest.mark.statistical
def test_the_tail_is_there() -> None:
    noise = np.abs(draw(size=3_000_000))
    for far in (3.5, 4.0, 4.5):
        expected = len(noise) * 2 * stats.norm.sf(far)
        seen = int(np.sum(noise > far))
        assert stats.poisson.sf(seen - 1, expected) > 1e-4
        assert stats.poisson.cdf(seen, expected) > 1e-4


def test_the_tail_reaches_beyond_what_one_kernel_draw_can(monkeypatch: pytest.MonkeyPatch) -> None:
    # The smallest uniform a draw can meet; a clipped one would stop at 5.68 σ.
    monkeypatch.setattr(
        tf.random, "stateless_uniform", lambda shape, *_, dtype, **__: tf.zeros(shape, dtype)
    )
    assert float(tf.reduce_max(gaussian((4,), [0, 0], 1.0))) > 13.0


def test_the_extreme_uniforms_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tf.random,
        "stateless_uniform",
        lambda shape, *_, dtype, **__: tf.fill(shape, tf.constant(dtype.max, dtype)),
    )
    assert np.all(np.isfinite(gaussian((5,), [0, 0], 1.0).numpy()))


def test_the_same_noise_whatever_compiles_or_cuts_it() -> None:
    key = tf.constant(noise_key(SEED, MANIFEST, 5, "kernel"))
    eager = gaussian((333, 3), key, 2.0).numpy()

    @tf.function
    def traced(key: tf.Tensor) -> tf.Tensor:
        return gaussian((333, 3), key, 2.0)

    @tf.function(jit_compile=True)
    def compiled(key: tf.Tensor) -> tf.Tensor:
        return gaussian((333, 3), key, 2.0)

    # the bits are the same; logarithm and cosine may round differently in the last place
    assert np.allclose(eager, traced(key).numpy(), rtol=0, atol=1e-5)
    assert np.allclose(eager, compiled(key).numpy(), rtol=0, atol=1e-5)
    assert np.array_equal(eager.ravel(), gaussian((999,), key, 2.0).numpy())


def test_the_key_is_not_written_into_the_graph() -> None:
    @tf.function
    def traced(key: tf.Tensor) -> tf.Tensor:
        return gaussian((8,), key, 1.0)

    key = tf.constant(noise_key(SEED, MANIFEST, 6, "kernel"))
    other = tf.constant(noise_key(SEED, MANIFEST, 7, "kernel"))
    first, second = traced(key).numpy(), traced(other).numpy()
    assert not np.array_equal(first, second)
    assert traced.experimental_get_tracing_count() == 1
    graph = traced.get_concrete_function(key).graph.as_graph_def().SerializeToString()
    assert key.numpy().tobytes() not in graph
    assert key.numpy()[:1].tobytes() not in graph


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5), (2, 2, 2)])
def test_noise_has_the_shape_of_its_variable(shape: tuple[int, ...]) -> None:
    assert gaussian(shape, noise_key(SEED, MANIFEST, 0, "v"), 1.0).shape == shape
