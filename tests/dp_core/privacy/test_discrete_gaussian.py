import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dp_core.errors import BadInput
from dp_core.privacy.discrete_gaussian import (
    WordStream,
    bernoulli,
    bernoulli_exp_minus,
    discrete_gaussian,
    uniform_below,
)
from dp_core.privacy.seed_store import PrivacySeed

WORD = 1 << 64


class Dictated(WordStream):
    """A stream whose words the test chooses."""

    def __init__(self, *words: int) -> None:
        super().__init__(b"")
        self._queue = list(words)

    def words(self, count: int) -> NDArray[np.uint64]:
        taken, self._queue = self._queue[:count], self._queue[count:]
        assert len(taken) == count
        return np.array(taken, dtype=np.uint64)


def coin(p: Fraction, *words: int) -> bool:
    stream = Dictated(*words)
    tossed = bool(bernoulli([p.numerator], p.denominator, np.zeros(1, np.int64), stream)[0])
    assert stream._queue == []
    return tossed


def test_the_stream_is_shake_256_in_blocks_however_it_is_read():
    whole = WordStream(b"key").words(300_000)
    stream = WordStream(b"key")
    parts = np.concatenate([stream.words(n) for n in (1, 0, 131_071, 7, 168_921)])
    assert np.array_equal(whole, parts)
    first = hashlib.shake_256(b"key" + bytes(8)).digest(1 << 20)
    assert whole[:131_072].tobytes() == np.frombuffer(first, "<u8").tobytes()
    assert not np.array_equal(whole[:100], WordStream(b"kez").words(100))


def test_a_coin_compares_all_the_bits_of_its_probability():
    third = WORD // 3
    assert coin(Fraction(1, 3), third - 1)
    assert not coin(Fraction(1, 3), third + 1)
    # The first word ties, and the second word of 1/3 has the same digits.
    assert coin(Fraction(1, 3), third, third - 1)
    assert not coin(Fraction(1, 3), third, third, third + 1)
    # 1/2 has no digits after the first word.
    assert coin(Fraction(1, 2), WORD // 2 - 1)
    assert not coin(Fraction(1, 2), WORD // 2)
    # 53 or 64 bits would round this probability to 0.
    tiny = Fraction(1, 1 << 100)
    assert not coin(tiny, 1)
    assert not coin(tiny, 0, 1 << 28)
    assert coin(tiny, 0, (1 << 28) - 1)
    assert coin(Fraction(1), WORD - 1)
    assert not coin(Fraction(0), 0)


def test_uniform_integers_reject_the_words_that_would_favour_small_ones() -> None:
    # Because 2⁶⁴ ≡ 1 (mod 3), the last word must be rejected.
    assert list(uniform_below(3, 2, Dictated(WORD - 1, 4, 5))) == [2, 1]
    assert list(uniform_below(4, 1, Dictated(WORD - 1))) == [3]
    assert list(uniform_below(1, 2, Dictated(7, WORD - 1))) == [0, 0]


@pytest.mark.statistical
@pytest.mark.parametrize("bound", [2, 7, 1001])
def test_uniform_integers_are_uniform(bound):
    counts = np.bincount(uniform_below(bound, 200_000, WordStream(b"uniform")), minlength=bound)
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.statistical
def test_exp_minus_coins_have_their_probability():
    gammas = [Fraction(x) for x in ("0", "1/7", "1/2", "1", "3/2", "2", "9/2", "7")]
    n = 100_000
    index = np.repeat(np.arange(len(gammas)), n)
    fourteenths = [int(14 * gamma) for gamma in gammas]
    coins = bernoulli_exp_minus(fourteenths, 14, index, WordStream(b"exp"))
    for number, gamma in enumerate(gammas):
        heads = int(coins[index == number].sum())
        p = math.exp(-gamma)
        assert stats.binomtest(heads, n, p).pvalue > 1e-4
        if 0 < gamma < 7:
            assert stats.binomtest(heads, n, math.exp(-gamma * 1.1)).pvalue < 1e-6


SEED = PrivacySeed.fixed("discrete gaussian")
SIGMAS = [0.4, 1.0, math.sqrt(2), 10.7, 166.0, 1000.0]


def fits(draws: NDArray[np.int64], sigma: float) -> float:
    """Return the p-value of a chi-square test against the exact pmf.

    Values are binned outwards from 0, and both tails are merged into bins that expect 10 draws.
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
def test_draws_follow_the_exact_pmf_and_no_other(sigma):
    draws = discrete_gaussian(sigma, 100_000, SEED, b"pmf")
    assert draws.dtype == np.int64
    assert draws.shape == (100_000,)
    assert fits(draws, sigma) > 1e-4
    assert fits(draws, sigma * 2 / 3) < 1e-9
    assert fits(draws, sigma * 3 / 2) < 1e-9


@pytest.mark.statistical
def test_draws_are_symmetric_and_independent():
    draws = discrete_gaussian(10.0, 100_000, SEED, b"independent").astype(float)
    root = math.sqrt(len(draws))
    assert abs(draws.mean()) < 4 * 10 / root
    assert abs(stats.skew(draws)) < 4 * math.sqrt(6) / root
    for lag in (1, 2, 3, 1000):
        assert abs(np.corrcoef(draws[lag:], draws[:-lag])[0, 1]) < 4 / root
        assert abs(np.corrcoef(np.abs(draws[lag:]), np.abs(draws[:-lag]))[0, 1]) < 4 / root


@pytest.mark.statistical
def test_noise_is_bound_to_seed_and_context():
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


def test_zero_draws_give_an_empty_array():
    assert len(discrete_gaussian(1.0, 0, SEED, b"none")) == 0


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf, 2.0**32])
def test_impossible_scales_and_noise_without_context_are_refused(sigma):
    with pytest.raises(BadInput, match="σ"):
        discrete_gaussian(sigma, 1, SEED, b"x")
    with pytest.raises(BadInput, match="context is empty"):
        discrete_gaussian(1.0, 1, SEED, b"")


def test_the_largest_scale_does_not_overflow():
    draws = discrete_gaussian(2.0**31, 2000, SEED, b"large").astype(float)
    assert 0.9 < draws.std() / 2.0**31 < 1.1
