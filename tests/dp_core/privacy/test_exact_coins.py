import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dp_core.privacy.discrete_gaussian import (
    WordStream,
    bernoulli,
    bernoulli_exp_minus,
    uniform_below,
)

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
    tossed = bool(bernoulli([p], np.zeros(1, np.int64), stream)[0])
    assert stream._queue == []
    return tossed


def test_the_stream_is_shake_256_in_blocks_however_it_is_read() -> None:
    whole = WordStream(b"key").words(300_000)
    stream = WordStream(b"key")
    parts = np.concatenate([stream.words(n) for n in (1, 0, 131_071, 7, 168_921)])
    assert np.array_equal(whole, parts)
    first = hashlib.shake_256(b"key" + bytes(8)).digest(1 << 20)
    assert whole[:131_072].tobytes() == np.frombuffer(first, "<u8").tobytes()
    assert not np.array_equal(whole[:100], WordStream(b"kez").words(100))


def test_a_coin_compares_all_the_bits_of_its_probability() -> None:
    third = WORD // 3
    assert coin(Fraction(1, 3), third - 1)
    assert not coin(Fraction(1, 3), third + 1)
    # the first word ties: 1/3 goes on with the same digits
    assert coin(Fraction(1, 3), third, third - 1)
    assert not coin(Fraction(1, 3), third, third, third + 1)
    # 1/2 has no digits after the first word
    assert coin(Fraction(1, 2), WORD // 2 - 1)
    assert not coin(Fraction(1, 2), WORD // 2)
    # what a float of 53 or 64 bits would round to 0
    tiny = Fraction(1, 1 << 100)
    assert not coin(tiny, 1)
    assert not coin(tiny, 0, 1 << 28)
    assert coin(tiny, 0, (1 << 28) - 1)
    assert coin(Fraction(1), WORD - 1)
    assert not coin(Fraction(0), 0)


def test_uniform_integers_reject_the_words_that_would_favour_small_ones() -> None:
    # 2⁶⁴ ≡ 1 (mod 3): the last word is one too many
    assert list(uniform_below(3, 2, Dictated(WORD - 1, 4, 5))) == [2, 1]
    assert list(uniform_below(4, 1, Dictated(WORD - 1))) == [3]
    assert list(uniform_below(1, 2, Dictated(7, WORD - 1))) == [0, 0]


@pytest.mark.statistical
@pytest.mark.parametrize("bound", [2, 7, 1001])
def test_uniform_integers_are_uniform(bound: int) -> None:
    counts = np.bincount(uniform_below(bound, 200_000, WordStream(b"uniform")), minlength=bound)
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.statistical
def test_exp_minus_coins_have_their_probability() -> None:
    gammas = [Fraction(x) for x in ("0", "1/7", "1/2", "1", "3/2", "2", "9/2", "7")]
    n = 100_000
    index = np.repeat(np.arange(len(gammas)), n)
    coins = bernoulli_exp_minus(gammas, index, WordStream(b"exp"))
    for number, gamma in enumerate(gammas):
        heads = int(coins[index == number].sum())
        p = math.exp(-gamma)
        assert stats.binomtest(heads, n, p).pvalue > 1e-4
        if 0 < gamma < 7:
            assert stats.binomtest(heads, n, math.exp(-gamma * 1.1)).pvalue < 1e-6
