from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from benchmarks.threshold_scan import surest_first
from dp_core.audit.canaries import throw_coins
from dp_core.audit.one_run import Claim, Guesses, audit_claim, null_alarms
from dp_core.errors import BadInput
from dp_core.privacy.accounting.tradeoff import GaussianTradeOff
from dp_core.privacy.seed_store import PrivacySeed

SEED = PrivacySeed.fixed("coins")


@pytest.mark.statistical
def test_coins_are_fair_and_independent_of_their_neighbours():
    coins = throw_coins(SEED, 100_000)
    assert stats.binomtest(int(coins.sum()), len(coins)).pvalue > 1e-6
    same = int((coins[1:] == coins[:-1]).sum())
    assert stats.binomtest(same, len(coins) - 1).pvalue > 1e-6


def test_the_highest_are_guessed_in_and_the_lowest_out():
    scores = np.array([0.3, 0.9, 0.1, 0.5, 0.7])
    inside, outside = Guesses(2, 1).chosen(scores)
    assert inside.tolist() == [1, 4]
    assert outside.tolist() == [2]
    coins = np.array([True, True, False, False, False])
    assert Guesses(2, 1).right(scores, coins) == 2
    assert surest_first(scores, coins).tolist() == [True, True, False, False, False]


def test_guesses_that_cannot_be_made_are_refused():
    with pytest.raises(BadInput, match="guesses"):
        Guesses(0, 0)
    with pytest.raises(BadInput, match="6 guesses on 5"):
        Guesses(3, 3).chosen(np.zeros(5))
    with pytest.raises(BadInput, match="finite"):
        Guesses(1, 1).chosen(np.array([0.0, np.nan]))
    with pytest.raises(BadInput, match="one coin"):
        Guesses(1, 0).right(np.zeros(5), np.zeros(4, bool))


def test_half_of_the_guesses_are_right_if_all_scores_are_equal():
    streams = [throw_coins(SEED, 200, stream) for stream in range(200)]
    right = sum(Guesses(25, 25).right(np.zeros(200), coins) for coins in streams)
    assert right == pytest.approx(5000, abs=250)  # five standard deviations


def claim_of(epsilon: float) -> Claim:
    return Claim(epsilon, 1e-5, GaussianTradeOff.of_epsilon(epsilon, 1e-5))


def scores_of(coins, mu: float):
    return mu * coins + np.random.default_rng(2).normal(size=len(coins))


def test_a_leak_that_is_claimed_is_consistent_and_a_larger_one_contradicts():
    coins = throw_coins(SEED, 4000)
    guesses = Guesses(200, 0)
    mu = GaussianTradeOff.of_epsilon(4.0, 1e-5).mu
    good = audit_claim(claim_of(4.0), [scores_of(coins, mu)], coins, guesses, SEED)
    assert good.word == "consistent"
    assert 1.0 < good.lower_bounds["trade-off"] < 4.0 < good.power["Gaussian"]
    bad = audit_claim(claim_of(1.0), [scores_of(coins, 3 * mu)], coins, guesses, SEED)
    assert bad.word == "contradicted"
    assert bad.p_value <= 0.001
    assert bad.lower_bounds["trade-off"] > 1.0


def test_the_error_is_divided_by_the_number_of_scores():
    coins = throw_coins(SEED, 2000)
    scores, guesses = scores_of(coins, 1.2), Guesses(100, 0)
    one = audit_claim(claim_of(2.0), [scores], coins, guesses, SEED)
    two = audit_claim(claim_of(2.0), [scores, np.zeros(2000)], coins, guesses, SEED)
    assert two.p_value == pytest.approx(min(1.0, 2 * one.p_value), rel=1e-6)
    assert two.lower_bounds["binomial"] < one.lower_bounds["binomial"]
    with pytest.raises(BadInput, match="needs scores"):
        audit_claim(claim_of(2.0), [], coins, guesses, SEED)


def test_the_null_control_is_silent_where_scores_saw_no_coins():
    coins = throw_coins(SEED, 1000)
    assert null_alarms(scores_of(coins, 2.0), Guesses(50, 50), SEED) <= 5


def test_an_audit_whose_null_control_alarms_judges_nothing(monkeypatch):
    monkeypatch.setattr("dp_core.audit.one_run.throw_coins", lambda seed, canaries, stream: loud)
    loud = np.arange(1000) < 500
    verdict = audit_claim(claim_of(0.1), [-np.arange(1000.0)], loud, Guesses(100, 100), SEED)
    assert verdict.word == "invalid" and verdict.outcome.right > verdict.allowed
    assert not replace(verdict, null_alarms=30).sound
    assert replace(verdict, null_alarms=3).sound
