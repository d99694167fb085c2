import hashlib
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dp_core.errors import BadInput
from dp_core.privacy.discrete_gaussian import discrete_gaussian
from dp_core.privacy.seed_store import PrivacySeed

SEED = PrivacySeed.fixed("discrete gaussian")
SIGMAS = [0.4, 1.0, math.sqrt(2), 10.7, 166.0, 1000.0]


def fits(draws: NDArray[np.int64], sigma: float) -> float:
    """Return the p-value of a chi-square test against the exact pmf.

    Values are taken together, from 0 outwards on either side, until a bin expects 10 draws.
    """
    reach = max(math.ceil(10 * sigma), int(np.abs(draws).max())) + 1
    values = np.arange(-reach, reach + 1)
    mass = np.exp(-(values.astype(float) ** 2) / (2 * sigma**2))
    expected = mass / math.fsum(mass) * len(draws)
    observed = np.bincount(draws + reach, minlength=len(values))
    width = max(1, round(sigma / 5))
    bins = np.sign(values) * (np.abs(values) // width + 1)
    last = max(b for b in range(1, bins.max() + 1) if expected[bins >= b].sum() >= 10)
    bins = np.clip(bins, -last, last) + last
    e, o = np.bincount(bins, expected), np.bincount(bins, observed)
    keep = e > 0
    return float(stats.chisquare(o[keep], e[keep]).pvalue)


@pytest.mark.statistical
@pytest.mark.parametrize("sigma", SIGMAS)
def test_draws_follow_the_exact_pmf_and_no_other(sigma: float) -> None:
    draws = discrete_gaussian(sigma, 100_000, SEED, b"pmf")
    assert draws.dtype == np.int64
    assert draws.shape == (100_000,)
    assert fits(draws, sigma) > 1e-4
    assert fits(draws, sigma * 2 / 3) < 1e-9
    assert fits(draws, sigma * 3 / 2) < 1e-9


@pytest.mark.statistical
def test_it_is_not_a_rounded_continuous_gaussian() -> None:
    # At σ = 0.5 the two differ: Pr[0] is 0.7869 here and 0.6827 after rounding.
    draws = discrete_gaussian(0.5, 100_000, SEED, b"rounded")
    rounded = np.rint(np.random.default_rng(1).normal(0, 0.5, 100_000)).astype(np.int64)
    assert fits(draws, 0.5) > 1e-4
    assert fits(rounded, 0.5) < 1e-9


@pytest.mark.statistical
def test_draws_are_symmetric_and_independent() -> None:
    draws = discrete_gaussian(10.0, 100_000, SEED, b"independent").astype(float)
    root = math.sqrt(len(draws))
    assert abs(draws.mean()) < 4 * 10 / root
    assert abs(stats.skew(draws)) < 4 * math.sqrt(6) / root
    for lag in (1, 2, 3, 1000):
        assert abs(np.corrcoef(draws[lag:], draws[:-lag])[0, 1]) < 4 / root
        assert abs(np.corrcoef(np.abs(draws[lag:]), np.abs(draws[:-lag]))[0, 1]) < 4 / root


@pytest.mark.statistical
def test_noise_is_bound_to_seed_and_context() -> None:
    base = discrete_gaussian(10.0, 20_000, SEED, b"a")
    assert np.array_equal(base, discrete_gaussian(10.0, 20_000, SEED, b"a"))
    for other in (
        discrete_gaussian(10.0, 20_000, SEED, b"b"),
        discrete_gaussian(10.0, 20_000, PrivacySeed.fixed("other"), b"a"),
        discrete_gaussian(10.0, 20_001, SEED, b"a")[:20_000],
        discrete_gaussian(10.000001, 20_000, SEED, b"a"),
    ):
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / math.sqrt(20_000)


def test_noise_does_not_change_between_releases() -> None:
    # Otherwise a retry after an upgrade would publish the same counts with other noise.
    draws = discrete_gaussian(166.0, 1000, SEED, b"golden").astype("<i8")
    assert hashlib.sha256(draws.tobytes()).hexdigest()[:16] == "bbac78ed0f263f21"


def test_nothing_is_drawn_for_nothing() -> None:
    assert len(discrete_gaussian(1.0, 0, SEED, b"none")) == 0


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf, 2.0**32])
def test_impossible_scales_are_refused(sigma: float) -> None:
    with pytest.raises(BadInput, match="σ"):
        discrete_gaussian(sigma, 1, SEED, b"x")


def test_noise_without_context_is_refused() -> None:
    with pytest.raises(BadInput, match="bound"):
        discrete_gaussian(1.0, 1, SEED, b"")


def test_the_largest_scale_does_not_overflow() -> None:
    draws = discrete_gaussian(2.0**31, 2000, SEED, b"large").astype(float)
    assert 0.9 < draws.std() / 2.0**31 < 1.1
