"""Random-count selection against exhaustive computation over every outcome and K.

No test uses the product's formulas: for small mechanisms, the output distribution of "run Q K
times, keep the best" is summed over K for every outcome, and its Rényi divergence over outcomes.
"""

import itertools
import math
from collections import Counter
from typing import Any

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting import dp_event
from numpy.typing import NDArray
from scipy.stats import chi2

from dp_core.errors import BadInput
from dp_core.privacy.accounting.accountants import LOW_ORDERS, epsilon_pld, epsilon_rdp
from dp_core.privacy.accounting.accountants import ORDERS as ORDERS_OF_RDP
from dp_core.privacy.mechanisms import (
    Gaussian,
    MechanismEvent,
    PoissonGaussian,
    RandomCountSelection,
    ThresholdedHistogram,
    compose,
)
from dp_core.privacy.private_selection import (
    draw_candidate,
    draw_count,
    negative_binomial_curve,
    negative_binomial_mean,
    poisson_curve,
    selection_of,
    training_seed,
    worst,
)
from dp_core.privacy.seed_store import PrivacySeed

ORDERS = np.array([1.5, 2, 3, 5, 8, 16, 32, 64, 128, 512.0])
LAWS = [(1.0, 0.1), (0.0, 0.02), (-0.5, 0.01), (3.0, 0.3)]
Floats = NDArray[np.float64]


def negative_binomial(eta: float, gamma: float, upto: int = 6000) -> Floats:
    """Return Pr[K = k] for k = 0 … from the product in its definition, normalised by the sum."""
    weights = np.zeros(upto)
    for k in range(1, upto):
        log = k * math.log1p(-gamma) + (
            -math.log(k)
            if eta == 0
            else sum(math.log(abs(j + eta)) for j in range(k)) - math.lgamma(k + 1)
            if k < 60
            else math.lgamma(k + eta) - math.lgamma(abs(eta) if eta > 0 else 1 + eta)
            + (0 if eta > 0 else math.log(abs(eta))) - math.lgamma(k + 1)
        )  # fmt: skip
        weights[k] = math.exp(log)
    return np.asarray(weights / weights.sum())


def poisson(mean: float, upto: int = 400) -> Floats:
    return np.array([math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(upto)])


def best_of(law: Floats, q: Floats) -> Floats:
    """Return the law of the best outcome, in order of rising quality; the last entry is K = 0."""
    below = np.concatenate([[0.0], np.cumsum(q)])
    powers = below[None, :] ** np.arange(1, len(law))[:, None]  # Pr[all k outcomes are at most y]
    best = np.diff(law[1:] @ powers)
    return np.concatenate([best, law[:1]])


def renyi(p: Floats, q: Floats, order: float) -> float:
    held = p > 0
    log = order * np.log(p[held]) + (1 - order) * np.log(q[held])
    return float(np.logaddexp.reduce(log) / (order - 1))


def both_ways(p: Floats, q: Floats, order: float) -> float:
    return max(renyi(p, q, order), renyi(q, p, order))


def mechanisms() -> list[tuple[Floats, Floats]]:
    """Return neighbouring output laws: randomised response, rare wins, and random pairs."""
    rng = np.random.default_rng(5)
    pairs = [(np.array([0.3, 0.7]), np.array([0.4, 0.6]))]
    for win in (1e-4, 1e-3, 0.03):
        pairs.append((np.array([1 - win, win]), np.array([1 - 1.5 * win, 1.5 * win])))
    for _ in range(12):
        p = rng.dirichlet(np.ones(5))
        q = p * np.exp(rng.uniform(-0.4, 0.4, 5))
        pairs.append((p, q / q.sum()))
    return pairs


@pytest.mark.parametrize(
    ("law", "curve"),
    [
        *(
            (negative_binomial(*numbers), lambda o, b, n=numbers: negative_binomial_curve(o, b, *n))
            for numbers in LAWS
        ),
        *(
            (poisson(mean), lambda o, b, m=mean: poisson_curve(o, b, m))
            for mean in (0.5, 3.0, 30.0)
        ),
    ],
)
def test_the_bound_of_a_law_holds_for_every_small_mechanism(law, curve):
    kept = slice(None) if law[0] else slice(-1)  # the last outcome is K = 0
    for p, q in mechanisms():
        base = np.array([both_ways(p, q, order) for order in ORDERS])
        divergences = [both_ways(best_of(law, p)[kept], best_of(law, q)[kept], o) for o in ORDERS]
        assert np.all(np.asarray(divergences) <= curve(ORDERS, base) * (1 + 1e-9) + 1e-12)


@pytest.mark.parametrize(("eta", "gamma"), LAWS)
def test_mean_of_the_negative_binomial_is_the_sum_over_its_law(eta, gamma):
    law = negative_binomial(eta, gamma)
    mean = float(law @ np.arange(len(law)))
    assert mean == pytest.approx(negative_binomial_mean(eta, gamma), rel=1e-6)


@pytest.mark.parametrize("eta", [0.0, 1.0, 3.0])
def test_the_negative_binomial_bound_is_nearly_reached(eta):
    """ε becomes (2 + η)ε if one outcome is e^ε likelier and the better outcome e^ε rarer."""
    epsilon, gamma, top, rare = 0.1, 1e-4, 0.05, 1e-7
    p = np.array([1 - top - rare * math.exp(epsilon), rare * math.exp(epsilon), top])
    q = np.array([1 - top * math.exp(epsilon) - rare, rare, top * math.exp(epsilon)])

    def best(weights: Floats) -> Floats:  # by E[x^K] in closed form, for large K
        below = np.concatenate([[0.0], np.cumsum(weights)])
        rest = 1 - (1 - gamma) * below
        generated = np.log(rest) / math.log(gamma) if eta == 0 else rest**-eta
        if eta != 0:
            generated = (generated - 1) / (gamma**-eta - 1)
        return np.diff(generated)

    loss = float(np.max(np.abs(np.log(best(p) / best(q)))))
    bound = negative_binomial_curve(np.array([1e9]), np.array([epsilon]), eta, gamma)[0]
    assert 0.98 * bound < loss <= bound


def test_a_candidate_drawn_at_random_is_at_most_the_worst():
    rng = np.random.default_rng(9)
    ps, qs = rng.dirichlet(np.ones(4), 3), rng.dirichlet(np.ones(4), 3)
    for order in ORDERS:
        curves = [np.array([renyi(p, q, order)]) for p, q in zip(ps, qs, strict=True)]
        assert renyi(ps.mean(axis=0), qs.mean(axis=0), order) <= worst(curves)[0]


CANDIDATES: tuple[MechanismEvent, ...] = (
    PoissonGaussian.single(0.01, 1.0, 500),
    PoissonGaussian.single(0.01, 2.0, 1000),
    Gaussian(8.0),
)


def geometric_selection(**more: float) -> RandomCountSelection:
    numbers: dict[str, Any] = {"eta": 1.0, "gamma": 0.1, "delta": 1e-6} | more
    return RandomCountSelection(CANDIDATES, "truncated-negative-binomial", **numbers)


def test_a_selection_costs_less_than_releasing_every_point_and_more_than_one():
    selection = geometric_selection()
    chosen = epsilon_pld(selection, 1e-6)
    assert chosen == epsilon_rdp(selection, 1e-6)
    assert epsilon_rdp(CANDIDATES[0], 1e-6) < chosen  # type: ignore[operator]
    every = Gaussian(8.0), *(PoissonGaussian.single(0.01, 1.0, 500) for _ in range(30))
    assert chosen < epsilon_pld(compose(*every), 1e-6)
    curve = selection.rdp([2.0, 8.0, 64.0])
    assert np.all(curve >= worst([np.asarray(c.rdp([2.0, 8.0, 64.0])) for c in CANDIDATES]))


def test_selection_composes_with_a_histogram_as_its_proven_epsilon_and_delta():
    selection = geometric_selection()
    histogram = ThresholdedHistogram(words_per_unit=64, sigma=80.0, threshold=600)
    assert histogram.has_pld and not selection.has_pld
    both = epsilon_pld(compose(histogram, selection), 2e-6)
    apart = epsilon_pld(histogram, 1e-6) + epsilon_pld(selection, 1e-6)
    assert epsilon_pld(selection, 1e-6) < both <= apart * 1.001
    assert epsilon_pld(compose(histogram, selection), 0.9e-6) == math.inf  # below the selection's δ


@pytest.mark.parametrize(
    ("law", "shape"), [("geometric", 1.0), ("logarithmic", 0.0), ("poisson", math.inf)]
)
def test_selection_curve_equals_independent_implementation(law, shape):
    event = PoissonGaussian.single(0.01, 1.0, 500)
    steps = dpa.PoissonSampledDpEvent(0.01, dpa.GaussianDpEvent(1.0))
    repeated = dp_event.RepeatAndSelectDpEvent(dpa.SelfComposedDpEvent(steps, 500), 6.0, shape)
    theirs = (
        dpa.rdp.RdpAccountant(sorted({*LOW_ORDERS, *ORDERS_OF_RDP}))
        .compose(repeated)
        .get_epsilon(1e-6)
    )
    ours = epsilon_rdp(selection_of([event], law, 6.0, 1e-6), 1e-6)
    assert ours == pytest.approx(theirs, rel=0.01)


@pytest.mark.cases
def test_impossible_laws_are_refused(more):
    with pytest.raises(BadInput):
        geometric_selection(**more)


@pytest.mark.parametrize(
    ("event", "law"),
    [
        (geometric_selection(), negative_binomial(1.0, 0.1)),
        (geometric_selection(eta=0.0, gamma=0.05), negative_binomial(0.0, 0.05)),
        (geometric_selection(eta=-0.5, gamma=0.05), negative_binomial(-0.5, 0.05)),
        (RandomCountSelection(CANDIDATES, "poisson", 1e-6, mean=4.0), poisson(4.0)),
    ],
)
def test_counts_follow_their_law_and_no_neighbouring_one(event, law):
    draws = Counter(draw_count(event, PrivacySeed.fixed(i)) for i in range(3000))

    def statistic(expected: Floats) -> tuple[float, int]:
        edges = [k for k in range(len(expected)) if expected[k] * 3000 >= 8]
        observed = np.array([draws[k] for k in edges])
        wanted = expected[edges] * 3000
        rest = 3000 - observed.sum(), 3000 - wanted.sum()
        total = np.sum((observed - wanted) ** 2 / wanted) + (rest[0] - rest[1]) ** 2 / rest[1]
        return float(total), len(edges)

    right, freedom = statistic(law)
    assert chi2.sf(right, freedom) > 1e-3
    shifted = np.concatenate([[0.0], law[:-1]])
    wrong, freedom = statistic(shifted)
    assert chi2.sf(wrong, freedom) < 1e-6


@pytest.mark.parametrize("law", ["geometric", "logarithmic", "poisson"])
def test_law_has_the_requested_mean(law):
    event = selection_of(CANDIDATES, law, 5.0, 1e-6)
    drawn = [draw_count(event, PrivacySeed.fixed(i)) for i in range(4000)]
    spread = float(np.std(drawn)) / math.sqrt(len(drawn))
    assert abs(float(np.mean(drawn)) - 5.0) < 4 * spread
    assert min(drawn) == (0 if law == "poisson" else 1)


def test_trainings_share_no_seed():
    seed = PrivacySeed.fixed(1)
    noise = {training_seed(seed, i).derive("noise") for i in range(50)} | {seed.derive("noise")}
    assert len(noise) == 51
    assert training_seed(seed, 3).derive("x") == training_seed(seed, 3).derive("x")
    assert training_seed(seed, 0).known


def test_candidates_are_uniform_independent_and_repeatable():
    selection, seed = geometric_selection(), PrivacySeed.fixed("selection")
    drawn = [draw_candidate(selection, seed, i) for i in range(3000)]
    assert drawn == [draw_candidate(selection, seed, i) for i in range(3000)]
    pairs = Counter(itertools.pairwise(drawn))
    wanted = 2999 / 9
    assert chi2.sf(sum((n - wanted) ** 2 / wanted for n in pairs.values()), 8) > 1e-3
    assert draw_count(selection, seed) == draw_count(selection, seed)
