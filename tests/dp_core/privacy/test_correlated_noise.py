import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import tensorflow as tf
from mechanism_examples import plan_of, power_strategy
from numpy.typing import NDArray
from scipy import stats
from scipy.linalg import toeplitz

from dp_core.privacy import correlated_noise, noise_addition
from dp_core.privacy.accounting.calibration import with_bands
from dp_core.privacy.correlated_noise import PastNoise
from dp_core.privacy.lattice import DEVIATION, PAST_BITS, lattice_scale
from dp_core.privacy.matrix_factorization import (
    INDEPENDENT,
    ToeplitzStrategy,
    Workload,
    least_error_strategy,
)
from dp_core.privacy.noise_addition import UpdateNoise, lattice_noise, noise_key, noised_means
from dp_core.privacy.seed_store import PrivacySeed

SEED = PrivacySeed.fixed("correlated noise")
FOUR = least_error_strategy(4, Workload((1.0,) * 60))
SIGMA, CLIP, DIVISOR = 0.8, 0.5, 10.0
STEP = 1 << PAST_BITS


def exactly(
    strategy: ToeplitzStrategy, drawn: list[list[int]], sums: list[list[int]] | None = None
) -> tuple[list[list[int]], list[list[int]]]:
    """Return y, and M = G − F for releases r = y, computed in rational numbers."""
    c = [Fraction(k, 1 << 16) for k in strategy.coefficients]
    noise: list[list[int]] = []
    centre: list[list[int]] = []
    for t, z in enumerate(drawn):
        row, m = [], []
        for j, value in enumerate(z):
            earlier = range(1, min(t, len(c) - 1) + 1)
            g = [s[j] for s in sums] if sums else [0] * len(drawn)
            past = sum(
                (c[i] * STEP * ((noise[t - i][j] - g[t - i]) // STEP) for i in earlier), Fraction(0)
            )
            row.append(value - math.floor(past + Fraction(1, 2)) if sums is None else value)
            m.append(g[t] - math.floor(past + Fraction(1, 2)))
        noise.append(row)
        centre.append(m)
    return noise, centre


def recursion(strategy: ToeplitzStrategy, updates: int, size: int) -> NDArray[np.float64]:
    block = correlated_noise._Block(strategy, size)
    return np.stack([block.next(noise_key(SEED, b"m", t, "w"), 0) for t in range(updates)])


def drawn_z(updates: int, size: int) -> NDArray[np.int64]:
    return np.stack([lattice_noise(noise_key(SEED, b"m", t, "w"), size) for t in range(updates)])


def noise_of(
    t: int, past: PastNoise | None, strategy: ToeplitzStrategy = FOUR, size: int = 3000
) -> NDArray[np.float32]:
    noise = UpdateNoise(SEED, b"m", t, SIGMA, CLIP, strategy, past)
    return DIVISOR * noised_means({"w": tf.zeros(size)}, noise, DIVISOR)["w"].numpy()


def released(
    updates: int, strategy: ToeplitzStrategy = FOUR, size: int = 3000
) -> NDArray[np.float64]:
    past = PastNoise()
    drawn = [noise_of(t, past, strategy, size) for t in range(updates)]
    return np.stack(drawn).astype(np.float64)


@pytest.mark.parametrize(
    "strategy", [FOUR, power_strategy(2, 0.7), ToeplitzStrategy.of(np.array([1, -0.6, 0.3]))]
)
def test_float64_recursion_equals_recursion_in_rational_numbers(strategy):
    """The float64 recursion has no rounding errors, across chunks and reused buffers."""
    size = 5000
    noise = recursion(strategy, 12, size)
    some = [0, 1, 4095, 4096, 4999]
    expected, _ = exactly(strategy, drawn_z(12, size)[:, some].tolist())
    assert noise[:, some].astype(np.int64).tolist() == expected


def test_it_is_the_dense_inverse_applied_but_for_what_rounding_adds():
    updates, size = 40, 300
    column = np.zeros(updates)
    column[:4] = FOUR.values
    inverse = np.linalg.inv(toeplitz(column, np.zeros(updates)))
    off = recursion(FOUR, updates, size) - inverse @ drawn_z(updates, size)
    assert 0 < np.abs(off).max() < np.abs(inverse[:, 0]).sum() * (STEP * FOUR.values[1:].sum() + 1)
    assert np.abs(off).max() < 1e-6 * DEVIATION


def test_neighbours_centres_differ_by_no_more_than_the_scale_pays_for():
    """For equal releases they differ by CD plus less than 2ᵏ|cᵢ| + 1 per value in later rows."""
    rng = np.random.default_rng(5)
    updates, values = 12, 40
    seen = rng.integers(-(10**9), 10**9, (updates, values)).tolist()
    sums = rng.integers(-(10**8), 10**8, (updates, values))
    moved = sums.copy()
    differ = {t: rng.integers(-(10**6), 10**6, values) for t in (1, 5, 9)}  # 4 updates apart
    for t, difference in differ.items():
        moved[t] += difference
    _, without = exactly(FOUR, seen, sums.tolist())
    _, with_unit = exactly(FOUR, seen, moved.tolist())
    apart = np.array(with_unit) - np.array(without)
    assert not apart[0].any()
    worst = np.zeros(4)
    for t, difference in differ.items():
        for i in range(min(4, updates - t)):
            theta = np.abs(apart[t + i] - FOUR.values[i] * difference)
            worst[i] = max(worst[i], theta.max())
    assert worst[0] == 0
    bound = STEP * np.abs(FOUR.values[1:]) + 1
    assert np.all(worst[1:] < bound)
    assert np.all(worst[1:] > bound / 3)  # the bound is within a factor of 3


@pytest.mark.parametrize("values", [1, 10**6, 10**9])
def test_the_lattice_pays_for_rows_and_rounding(values):
    """The noise is σ times the distance of neighbours, over all rows that one update affects."""
    scale = lattice_scale(SIGMA, CLIP, values, FOUR)
    rows = FOUR.norm * (CLIP * scale + 1.5 * math.sqrt(values))
    rounding = math.sqrt(values * sum((STEP * abs(c) + 1) ** 2 for c in FOUR.values[1:]))
    assert (rows + rounding) * SIGMA == pytest.approx(math.sqrt(DEVIATION**2 - 16), rel=1e-12)
    assert lattice_scale(SIGMA, CLIP, values) == lattice_scale(SIGMA, CLIP, values, INDEPENDENT)


@pytest.mark.statistical
def test_the_noise_has_the_covariance_of_its_strategy_and_no_other():
    """C times the noise is independent, of deviation σ·‖c‖·C; wrong σ or bands are rejected."""
    noise = released(12)
    assert not independent(noise)

    def undone(strategy: ToeplitzStrategy) -> NDArray[np.float64]:
        column = np.zeros(12)
        column[: strategy.bands] = strategy.values
        return np.asarray(toeplitz(column, np.zeros(12)) @ noise)

    z = undone(FOUR)
    right = SIGMA * FOUR.norm * CLIP
    assert independent(z)
    assert stats.kstest(z.ravel() / right, "norm").pvalue > 1e-4
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(z.ravel() / (right * wrong), "norm").pvalue < 1e-9
    for other in (
        least_error_strategy(2, Workload((1.0,) * 60)),
        least_error_strategy(8, Workload((1.0,) * 60)),
    ):
        assert not independent(undone(other))


@pytest.mark.statistical
@pytest.mark.parametrize("strategy", [INDEPENDENT, FOUR])
def test_an_update_knows_how_much_noise_each_value_of_it_has(strategy):
    """The variance that an optimiser subtracts from its second moment is the drawn variance."""
    noise = released(6, strategy, 40_000)
    for t, drawn in enumerate(noise):
        said = UpdateNoise(SEED, b"m", t, SIGMA, CLIP, strategy).deviation
        assert drawn.std() == pytest.approx(said, rel=0.02)


def independent(rows: NDArray[np.float64]) -> bool:
    """Test that no two rows correlate (Bonferroni over all pairs)."""
    pairs = list(itertools.combinations(range(len(rows)), 2))
    r = np.corrcoef(rows)
    limit = stats.norm.isf(1e-5 / len(pairs)) / math.sqrt(rows.shape[1])
    return max(abs(r[i, j]) for i, j in pairs) < limit


def test_resumed_run_recomputes_the_same_noise(monkeypatch):
    monkeypatch.setattr(noise_addition, "_BLOCK", 700)
    onward = [noise_of(t, past) for past in [PastNoise()] for t in range(9)]
    resumed = PastNoise()
    for t in (6, 7, 3, 3, 8):  # forward, back, repeated, across a gap
        np.testing.assert_array_equal(noise_of(t, resumed), onward[t])
    np.testing.assert_array_equal(noise_of(8, None), onward[8])


def test_past_noise_is_reused_only_for_same_seed_manifest_and_strategy():
    past = PastNoise()
    cases = (
        (SEED, b"m", FOUR),
        (PrivacySeed.fixed(2), b"m", FOUR),
        (SEED, b"n", FOUR),
        (SEED, b"m", power_strategy(4, 0.5)),
        (SEED, b"m", power_strategy(3, 0.5)),
    )
    for t, (seed, manifest, strategy) in enumerate(cases, 4):  # each is the next update
        made = []
        for kept in (past, None):
            noise = UpdateNoise(seed, manifest, t, SIGMA, CLIP, strategy, kept)
            made.append(noised_means({"w": tf.zeros(50)}, noise, DIVISOR)["w"].numpy())
        np.testing.assert_array_equal(*made)


def test_correlated_noise_is_added_to_the_rounded_sum():
    past, totals = PastNoise(), np.linspace(-3, 3, 200, dtype=np.float32)
    for t in range(5):
        noise = UpdateNoise(SEED, b"m", t, SIGMA, CLIP, FOUR, past)
        means = noised_means({"w": tf.constant(totals)}, noise, DIVISOR)["w"].numpy()
        np.testing.assert_allclose(DIVISOR * means, totals + noise_of(t, None, size=200), atol=1e-5)


def test_a_plan_makes_noise_by_its_own_strategy():
    alone = plan_of(expected_batch=50, steps=60, noise_multiplier=SIGMA, clip_norm=CLIP)
    plan = with_bands(alone, 4, Workload((1.0,) * 60))
    past = PastNoise()
    made = plan.noise(SEED, b"m", 3, plan.clipper(), past)
    assert made == UpdateNoise(SEED, b"m", 3, SIGMA, CLIP, FOUR)
    assert made.past is past
    assert plan.to_json()["strategy"] == {"coefficients": FOUR.coefficients}
