import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dp_core.privacy import gaussian_noise
from dp_core.privacy.gaussian_noise import grid, noise_words, noised_mean, scaled_normals
from dp_core.privacy.noise import noise_key
from dp_core.privacy.seeds import PrivacySeed

SEED = PrivacySeed.fixed("gaussian noise")
MANIFEST = b"manifest"
KEY = noise_key(SEED, MANIFEST, 5, "kernel")


def draw(
    t: int = 0,
    variable: str = "kernel",
    draw: int = 0,
    block: int = 0,
    stddev: float = 1.0,
    size: int = 60_000,
) -> NDArray[np.float32]:
    key = noise_key(SEED, MANIFEST, t, variable, draw)
    return scaled_normals(noise_words(key, size, block), stddev)


def normals(key: NDArray[np.uint8], size: int, stddev: float = 1.0) -> NDArray[np.float32]:
    """Float32 (size,), an even number: the first of all pairs, then the second of all pairs."""
    return scaled_normals(noise_words(key, size), stddev)


def fits(noise: NDArray[np.float32], sigma: float) -> float:
    return float(stats.kstest(noise.ravel(), "norm", (0, sigma)).pvalue)


def noised(
    sums: NDArray[np.float32], words: NDArray[np.int32], stddev: float, divisor: float = 1.0
) -> NDArray[np.float32]:
    mean = np.empty_like(sums)
    noised_mean(sums, [words], stddev, divisor, mean)
    return mean


@pytest.mark.statistical
@pytest.mark.parametrize("stddev", [0.01, 1.0, 37.5])
def test_noise_has_its_scale_and_no_other(stddev: float) -> None:
    noise = draw(stddev=stddev)
    assert noise.dtype == np.float32
    assert fits(noise, stddev) > 1e-4
    assert fits(noise, stddev * 2 / 3) < 1e-9
    assert fits(noise, stddev * 3 / 2) < 1e-9


@pytest.mark.statistical
def test_updates_variables_draws_blocks_and_places_are_independent() -> None:
    numbers = (0, 1)
    noises = [
        draw(t, v, d, b) for t in numbers for v in ("a", "b") for d in numbers for b in numbers
    ]
    limit = 5 / math.sqrt(60_000)
    for i, one in enumerate(noises):
        for two in noises[i + 1 :]:
            assert abs(np.corrcoef(one, two)[0, 1]) < limit
            assert abs(np.corrcoef(np.abs(one), np.abs(two))[0, 1]) < limit
        # cosine and sine of one Box-Muller pair lie 30,000 places apart
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


def fill(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    monkeypatch.setattr(
        gaussian_noise,
        "keystream",
        lambda key, words, block: np.full(words, word, np.int64).astype(np.int32),
    )


def test_the_tail_reaches_beyond_what_one_kernel_draw_can(monkeypatch: pytest.MonkeyPatch) -> None:
    # The smallest uniform a draw can meet; TensorFlow's own would stop at 5.68 σ.
    fill(monkeypatch, 0)
    assert normals(KEY, 4).max() == pytest.approx(9.345, abs=1e-3)


@pytest.mark.parametrize("word", [0, 1, -1, 2**31 - 1, -(2**31)])
def test_the_extreme_words_give_finite_noise(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    fill(monkeypatch, word)
    assert np.all(np.isfinite(normals(KEY, 6)))


def reference(words: NDArray[np.int32]) -> NDArray[np.float64]:
    """Box and Muller in float64, with the library's sines."""
    a, b = (words[i].astype(np.int64) & 0x7FFFFFFF for i in (0, 1))
    radius = np.sqrt(-2 * np.log((a + (b + 0.5) * 2.0**-31) * 2.0**-31))
    angle = (words[2] & 3) * np.pi / 2 + (words[2] >> 2) * (np.pi / 4 * 2.0**-29)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])


def test_the_polynomials_are_sine_and_cosine() -> None:
    words = noise_words(KEY, 400_000)
    drawn = scaled_normals(words, 1.0)
    # a uniform next to 1 is a float32: its radius is off by up to 2⁻²⁴/r
    error = np.abs(drawn - reference(words))
    assert error.max() < 2e-4
    assert np.quantile(error, 0.999) < 1e-6


@pytest.mark.statistical
def test_the_angle_is_uniform_and_independent_of_the_radius() -> None:
    x, y = np.split(normals(KEY, 200_000), 2)
    turn = np.arctan2(y, x) / (2 * np.pi) + 0.5
    assert stats.kstest(turn, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(np.hypot(x, y), turn)[0, 1]) < 5 / math.sqrt(len(x))


@pytest.mark.statistical
@pytest.mark.parametrize("sum_", [0.0, 0.3, 1e4, 3e7])
def test_a_noised_sum_is_on_a_grid_that_only_the_scale_decides(sum_: float) -> None:
    stddev, size = 0.7, 100_000
    words = noise_words(KEY, size)
    sums = np.full(size, sum_, np.float32)
    found = noised(sums, words, stddev).astype(np.float64)
    step = grid(stddev)
    assert step == 0.5 / 2048
    assert np.array_equal(found, np.round(found / step) * step)
    spacing = max(step, float(np.spacing(sums[0])))  # of what there is to round to
    drawn = found - float(sums[0])
    exact = reference(words) * stddev
    assert np.abs(drawn - exact).max() < spacing * 0.51 + 2e-4
    if spacing < stddev / 100:
        assert fits(drawn, stddev) > 1e-4
        for wrong in (2 / 3, 3 / 2):
            assert fits(drawn, stddev * wrong) < 1e-9


def test_a_sum_between_two_places_of_the_grid_reaches_the_same_places() -> None:
    """Without rounding, a sum's last bits are those of every noised value of it."""
    words = noise_words(KEY, 200_000)
    places = []
    for sum_ in (0.0, 1 / 3000):
        sums = np.full(200_000, sum_, np.float32)
        places.append({float(v) for v in noised(sums, words, 1.0) if abs(v) < 1})
    assert places[0] == places[1]
    assert len(places[0]) == 2 * 2048 - 1


def test_a_noised_sum_is_divided_after_the_rounding() -> None:
    words = noise_words(KEY, 10)
    sums = np.linspace(-1, 1, 10).astype(np.float32)
    means = noised(sums, words, 1.0, 3.0)
    step = grid(1.0)
    exact = (sums + scaled_normals(words, 1.0)) / step
    assert np.array_equal(means, np.round(exact) * np.float32(step / 3))


@pytest.mark.parametrize("size", [1, 2, 999, 1000])
@pytest.mark.parametrize("draws", [1, 2, 5])
def test_the_noise_is_the_sum_of_its_draws(size: int, draws: int) -> None:
    """In floats, added up before they meet the sum: a rounding knows of no part of the noise."""
    words = [noise_words(KEY, size, block) for block in range(draws)]
    sums = np.linspace(-3, 3, size).astype(np.float32)
    mean = np.empty_like(sums)
    noised_mean(sums, iter(words), 0.7, 2.0, mean)
    noise = sum(scaled_normals(w, 0.7).astype(np.float64) for w in words)
    assert isinstance(noise, np.ndarray)
    exact = (sums + noise[:size]) / grid(0.7)
    error = mean * 2.0 / grid(0.7) - exact
    assert np.abs(error).max() < 0.501
    places = mean * 2.0 / grid(0.7)
    assert np.array_equal(places, np.round(places))


def test_a_grid_is_a_power_of_two_below_the_noise() -> None:
    for stddev in (1e-6, 0.99, 1.0, 1.01, 37.5):
        assert 2**11 <= stddev / grid(stddev) < 2**12
        assert math.frexp(grid(stddev))[0] == 0.5


def test_the_noise_does_not_change_between_releases() -> None:
    # Other noise for the same key would be a second noise for the same charge, were the digest of
    # the code not in what the key is made of.
    assert normals(np.arange(32, dtype=np.uint8), 4) == pytest.approx(
        [-0.676877, 1.159819, -0.379817, 0.346991], abs=2e-5
    )
