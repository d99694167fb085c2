import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.optimize import linprog
from scipy.special import bdtrc, betaincinv, ndtri

from benchmarks.threshold_scan import best_epsilon, surest_first
from dp_core.audit.lower_bounds import (
    BINOMIAL,
    BOUNDS,
    GAUSSIAN,
    TRADE_OFF,
    GuessOutcome,
    binomial_p_value,
    trade_off_p_value,
    trade_off_refuted,
)
from dp_core.audit.one_run import Guesses
from dp_core.errors import BadInput
from dp_core.privacy.accounting.tradeoff import GaussianTradeOff, PrivacyProfile

DELTA = 1e-5
# (scores, coins, δ, confidence) -> lower bound on ε
Auditor = Callable[[np.ndarray, np.ndarray, float, float], float]
TRIALS, SIGNIFICANCE = 1000, 0.001


def coins_of(rng: np.random.Generator, canaries: int) -> np.ndarray:
    return rng.random(canaries) < 0.5


def null_alarms(auditor: Auditor, *, canaries: int = 60, confidence: float = 0.999) -> int:
    """Return the number of 1,000 audits of uninformative scores whose bound on ε is above 0."""
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(TRIALS):
        scores, coins = rng.normal(size=canaries), coins_of(rng, canaries)
        alarms += auditor(scores, coins, DELTA, confidence) > 0
    return alarms


def randomised_response(rng, coins, epsilon: float) -> np.ndarray:
    """Release every coin, right with probability e^ε/(1 + e^ε): an ε-DP mechanism."""
    honest = rng.random(len(coins)) < 1 / (1 + math.exp(-epsilon))
    return np.where(coins == honest, 1.0, 0.0) + 1e-6 * rng.random(len(coins))


def subsampled_gaussian(rng, coins, rate: float, sigma: float, steps: int) -> np.ndarray:
    """Return each Dirac canary's component in the sum of all noised sums of DP-SGD."""
    taken = rng.binomial(steps, rate, len(coins)) * coins
    return taken + rng.normal(0, sigma * math.sqrt(steps), len(coins))


def all_or_nothing(rng, coins, delta: float) -> np.ndarray:
    """Release all coins with probability δ, else none: a (0, δ)-DP mechanism."""
    if rng.random() < delta:
        return np.where(coins, 1.0, 0.0)
    return rng.random(len(coins))


def excesses(draw, auditor, truth, trials, canaries, delta):
    """Return the lower bounds at 95% confidence, and the number of them above the truth."""
    rng = np.random.default_rng(3)
    bounds = []
    for _ in range(trials):
        coins = coins_of(rng, canaries)
        bounds.append(auditor(draw(rng, coins), coins, delta, 0.95))
    return np.array(bounds), int(np.sum(np.array(bounds) > truth + 1e-3))


def most_excesses(trials: int, significance: float = 0.05) -> int:
    """Return the number of excesses that chance exceeds with probability at most 10⁻⁶."""
    return int(stats.binom.isf(1e-6, trials, significance))


class LowerBoundConformance:
    """No alarm on noise, no bound above the true ε, and wrong claims refuted, for every bound.

    A subclass names a bound and the choice of its guesses, and inherits the tests. Published bounds
    that are known to be wrong must fail the same checks.
    """

    shapes: frozenset[str] = frozenset({"pure", "gaussian", "delta"})
    canaries = 400
    trials = 40
    refuting = 0.999, 1.5  # confidence, and the least bound for a large ε
    delta = DELTA  # with the correction for all thresholds, a larger δ leaves no power
    near = 0.5  # share of the true ε that the median audit exceeds

    def auditor(self, scores, coins, delta, confidence) -> float:
        raise NotImplementedError

    def test_noise_is_silent(self):
        assert null_alarms(self.auditor) <= 1

    def test_constant_scores_are_silent(self):
        rng = np.random.default_rng(1)
        lower = [self.auditor(np.zeros(60), coins_of(rng, 60), DELTA, 0.999) for _ in range(TRIALS)]
        assert sum(epsilon > 0 for epsilon in lower) <= 1

    def test_randomised_response_is_not_overstated(self):
        if "pure" not in self.shapes:
            return
        draw = partial(randomised_response, epsilon=1.5)
        lower, above = excesses(draw, self.auditor, 1.5, self.trials, self.canaries, self.delta)
        assert above <= most_excesses(self.trials)
        assert np.median(lower) > self.near * 1.5

    def test_a_subsampled_gaussian_is_not_overstated(self):
        draw = partial(subsampled_gaussian, rate=0.5, sigma=1.9845, steps=10)  # ε = 4 by PLD
        lower, above = excesses(draw, self.auditor, 4.0, self.trials, 2 * self.canaries, self.delta)
        assert above == 0
        assert np.median(lower) > self.near * 1.2

    def test_leaks_within_delta_are_no_evidence(self):
        if "delta" not in self.shapes:
            return
        _, above = excesses(partial(all_or_nothing, delta=0.1), self.auditor, 0.0, 300, 40, 0.1)
        assert above <= most_excesses(300)

    def test_a_claim_below_the_truth_is_refuted(self):
        rng = np.random.default_rng(5)
        coins = coins_of(rng, 3 * self.canaries)
        confidence, claimed = self.refuting
        observations = randomised_response(rng, coins, 4.0)
        assert self.auditor(observations, coins, self.delta, confidence) > claimed
        half_the_noise = subsampled_gaussian(rng, coins, 1.0, 0.3, 1)
        assert self.auditor(half_the_noise, coins, self.delta, confidence) > claimed


def a_fifth_guessed(scores, coins):
    guesses = Guesses(len(coins) // 10, len(coins) // 10)
    return GuessOutcome(len(coins), guesses.total, guesses.right(scores, coins))


class OfAFixedNumber(LowerBoundConformance):
    def auditor(self, scores, coins, delta, confidence):
        return self.bound.epsilon(a_fifth_guessed(scores, coins), delta, confidence)


class TestBinomialBound(OfAFixedNumber):
    bound = BINOMIAL


class TestTradeOffBound(OfAFixedNumber):
    bound = TRADE_OFF


class TestGaussianBound(OfAFixedNumber):
    bound = GAUSSIAN
    shapes = frozenset({"gaussian"})  # the assumption of the bound


class TestBinomialBoundOverAllThresholds(LowerBoundConformance):
    bound = BINOMIAL
    near, trials, canaries = 0.2, 8, 300
    refuting, delta = (0.95, 1.5), 1e-9

    def auditor(self, scores, coins, delta, confidence):
        return best_epsilon(self.bound, surest_first(scores, coins), delta, confidence)


class TestTradeOffBoundOverAllThresholds(TestBinomialBoundOverAllThresholds):
    bound = TRADE_OFF


# --- published failures: each must fail the suite


def uncorrected(scores, coins, delta, confidence):
    """Return the bound of the best threshold, without a correction for the choice."""
    right = np.cumsum(surest_first(scores, coins))
    outcomes = [GuessOutcome(len(coins), r, int(v)) for r, v in enumerate(right, start=1)]
    best = min(outcomes, key=lambda o: bdtrc(o.right - 1, o.guesses, 0.5) if o.right else 1.0)
    return BINOMIAL.epsilon(best, delta, confidence)


def corrected_for_the_hull(scores, coins, delta, confidence):
    """Return the best bound on the hull of the ROC curve, corrected by the size of the hull only.

    The scores select the hull. All guesses are "in", as in the library with this error.
    """
    order = np.argsort(-scores)
    tp = np.concatenate([[0], np.cumsum(coins[order])])
    fp = np.concatenate([[0], np.cumsum(~coins[order])])
    hull = [0]
    for i in range(1, len(tp)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (tp[b] - tp[a]) * (fp[i] - fp[b]) <= (tp[i] - tp[b]) * (fp[b] - fp[a]):
                hull.pop()
            else:
                break
        hull.append(i)
    each = 1 - (1 - confidence) / len(hull)
    outcomes = [GuessOutcome(len(coins), i, int(tp[i])) for i in hull if i]
    return max(BINOMIAL.epsilon(o, delta, each) for o in outcomes)


def without_the_delta_term(scores, coins, delta, confidence):
    return BINOMIAL.epsilon(a_fifth_guessed(scores, coins), 0.0, confidence)


def gaussian_by_rates(scores, coins, delta, confidence):
    """Return ε of the μ from the best threshold's Clopper–Pearson rates, without a correction.

    Thresholds without errors are included. One of m thresholds is always so extreme that both of
    its rates are favourable by chance.
    """
    above = scores[None, :] >= scores[:, None]
    tp, fp = (above & coins).sum(axis=1), (above & ~coins).sum(axis=1)
    n, k = int(coins.sum()), int((~coins).sum())
    fnr = np.where(tp > 0, betaincinv(n - tp + 1, np.maximum(tp, 1), confidence), 1.0)
    fpr = np.where(fp < k, betaincinv(fp + 1, np.maximum(k - fp, 1), confidence), 1.0)
    with np.errstate(invalid="ignore"):
        best = float(np.nanmax(np.abs(-ndtri(fpr) - ndtri(fnr))[(fpr < 1) & (fnr < 1)]))
    return GaussianTradeOff(best).epsilon(delta) if best else 0.0


@pytest.mark.parametrize("auditor", [uncorrected, gaussian_by_rates])
def test_wrong_published_bounds_raise_false_alarms_on_noise(auditor):
    assert null_alarms(auditor, confidence=0.95) > most_excesses(1000)


def test_dividing_by_the_selected_thresholds_alone_is_invalid():
    ours = null_alarms(TestBinomialBoundOverAllThresholds().auditor, confidence=0.95)
    assert ours <= 5
    assert null_alarms(corrected_for_the_hull, confidence=0.95) > 6 * max(ours, 5)


def test_without_the_delta_term_a_leak_within_delta_contradicts_the_claim():
    draw = partial(all_or_nothing, delta=0.2)
    _, above = excesses(draw, without_the_delta_term, 0.0, 300, 40, 0.2)
    assert above > most_excesses(300)


# --- against theorems and brute force


def test_p_value_under_pure_privacy_equals_the_tail_of_randomised_response():
    for epsilon, r in itertools.product((0.0, 0.7, 3.0), (1, 5, 12)):
        q = 1 / (1 + math.exp(-epsilon))
        for v in range(r + 1):
            exact = sum(math.comb(r, i) * q**i * (1 - q) ** (r - i) for i in range(v, r + 1))
            assert binomial_p_value(GuessOutcome(20, r, v), epsilon, 0.0) == pytest.approx(exact)


def test_the_delta_term_is_the_largest_of_all():
    m, r, v, epsilon, delta = 30, 12, 10, 1.0, 1e-3
    q = 1 / (1 + math.exp(-epsilon))
    pmf = stats.binom.pmf(np.arange(r + 1), r, q)
    terms = [pmf[v - i : v].sum() / i for i in range(1, v + 1)]
    expected = pmf[v:].sum() + 2 * m * delta * max(terms)
    assert binomial_p_value(GuessOutcome(m, r, v), epsilon, delta) == pytest.approx(expected)


def most_right(m, r, v, epsilon, delta):
    """Return the largest P[right ≥ v] under the theorem's inequalities, by a linear program."""
    i = np.arange(r + 1)
    rows, ends = [], []
    for k in range(1, r + 1):
        hit = np.where(i >= k, i, 0) / m
        missed = np.where(i >= k - 1, r - i, 0) / m
        rows += [math.exp(-epsilon) * hit - missed, math.exp(epsilon) * hit - missed]
        ends += [math.exp(-epsilon) * delta, math.exp(epsilon) - 1 + delta]
    optimum = linprog(
        -(i >= v).astype(float), A_ub=rows, b_ub=ends, A_eq=[np.ones(r + 1)], b_eq=[1.0]
    )
    return -optimum.fun


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (1.5, 0.01), (0.1, 0.05)])
@pytest.mark.parametrize(("m", "r"), [(8, 8), (12, 5)])
def test_the_recursion_solves_the_theorems_linear_program(m, r, epsilon, delta):
    for v in range(1, r + 1):
        most = most_right(m, r, v, epsilon, delta)
        outcome, curve = GuessOutcome(m, r, v), PrivacyProfile.of_claim(epsilon, delta)
        # A significance above the largest possible probability refutes; one below it does not.
        assert trade_off_refuted(outcome, curve, min(1.0, most * 1.02 + 1e-9)) or most > 0.98
        assert not trade_off_refuted(outcome, curve, most * 0.98)


def test_the_p_value_is_where_refuting_begins():
    outcome, curve = GuessOutcome(1000, 100, 91), GaussianTradeOff(0.9)
    p = trade_off_p_value(outcome, curve)
    assert trade_off_refuted(outcome, curve, p)
    assert not trade_off_refuted(outcome, curve, p / 1.01)
    assert trade_off_p_value(GuessOutcome(1000, 100, 40), curve) == 1.0


# (m, r, v, δ, significance, binomial, Gaussian): jax_privacy 2.0.0, `_epsilon_one_run` and `_fdp`
FROZEN = json.loads((Path(__file__).parent / "one_run_oracles.json").read_text())


@pytest.mark.parametrize(("m", "r", "v", "delta", "significance", "binomial", "gaussian"), FROZEN)
def test_bounds_equal_another_librarys(m, r, v, delta, significance, binomial, gaussian):
    outcome, confidence = GuessOutcome(m, r, v), 1 - significance
    epsilon = BINOMIAL.epsilon(outcome, delta, confidence)
    assert epsilon == pytest.approx(binomial, abs=3e-4)
    epsilon = GAUSSIAN.epsilon(outcome, delta, confidence)
    assert epsilon == pytest.approx(gaussian, abs=1e-3)


# --- power, order, and refused input


def test_to_refute_takes_three_times_e_to_the_epsilon_right_guesses():
    for epsilon, r in [(0.5, 7), (2.0, 24), (4.0, 166)]:  # (e^ε/(1 + e^ε))^r ≤ 5%
        assert BINOMIAL.power(r, r, 0.0) >= epsilon - 1e-3
        assert BINOMIAL.power(r - 1, r - 1, 0.0) < epsilon


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.name)
def test_no_lower_bound_exceeds_the_audits_power(bound):
    power = bound.power(500, 60, DELTA)
    epsilons = [bound.epsilon(GuessOutcome(500, 60, v), DELTA) for v in range(0, 61, 4)]
    assert epsilons == sorted(epsilons)
    assert epsilons[0] == 0.0
    assert epsilons[-1] == pytest.approx(power)


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.name)
def test_confidence_delta_and_silent_canaries_lower_a_bound(bound):
    plain = bound.epsilon(GuessOutcome(500, 60, 55), 1e-5, 0.95)
    assert bound.epsilon(GuessOutcome(500, 60, 55), 1e-5, 0.99) < plain
    assert bound.epsilon(GuessOutcome(500, 60, 55), 1e-3, 0.95) < plain
    assert bound.epsilon(GuessOutcome(50_000, 60, 55), 1e-3, 0.95) < plain


def test_the_error_is_divided_by_all_possible_thresholds():
    # 30 right guesses and 70 coins: each of 100 thresholds has a hundredth of the error.
    right = np.r_[np.ones(30, bool), coins_of(np.random.default_rng(0), 70)]
    epsilon = best_epsilon(BINOMIAL, right, 0.0, 0.95)
    each = [
        BINOMIAL.epsilon(GuessOutcome(100, r, int(right[:r].sum())), 0.0, 1 - 0.05 / 100)
        for r in range(1, 101)
    ]
    assert epsilon == pytest.approx(max(each), abs=1e-3)


def test_guesses_that_cannot_be_are_refused():
    for m, r, v in ((5, 6, 1), (5, 4, 5), (5, 4, -1)):
        with pytest.raises(BadInput, match="right of"):
            GuessOutcome(m, r, v)
    for confidence in (0.0, 1.0):
        with pytest.raises(BadInput, match="confidence"):
            BINOMIAL.epsilon(GuessOutcome(5, 5, 5), 0.0, confidence)
    with pytest.raises(BadInput, match="delta"):
        BINOMIAL.epsilon(GuessOutcome(5, 5, 5), 1.0)
