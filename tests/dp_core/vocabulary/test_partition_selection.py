import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import binom, kstest, norm

from benchmarks.selection_mechanisms import (
    FINER_DEVIATION,
    SHAPES,
    ComparedWeights,
    calibrated,
    comparison_plan,
    finer_gaussian,
)
from benchmarks.vocabulary_corpora import item_sets
from dp_core.errors import BadInput, PlanError
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.discrete_gaussian import LATTICE_DEVIATION, discrete_gaussian, lattice_gaussian
from dp_core.privacy.mechanisms import NoisedWeights
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.vocabulary.item_sets import GatheredSets, ItemSets
from dp_core.vocabulary.partition_selection import Counted, Elimination
from dp_core.vocabulary.selection_calibration import _elimination, paper_parameters, selection_plan

SEED = PrivacySeed.fixed(3)
Held = list[set[str]]


def shard_of(held: Sequence[set[str]], n: int = 8, first: int = 0, **more: object) -> ItemSets:
    """Return one shard; units are named by position, so neighbours share ids and coins."""
    named = ((f"u{first + i}", items) for i, items in enumerate(held))
    return item_sets(named, n, b"k", **more)  # type: ignore[arg-type]


def bare(name: str, n: int, scale: int, threshold: int, units: int = 16) -> Elimination:
    """Return a mechanism of weights with an empty claim (ε = 100, δ = 0.06)."""
    shape = SHAPES[name]
    rounds = len(shape.shares)
    last = 1 if name == "mad2r" else 0
    checks = ((0, 0, threshold), (1, 1, threshold))[: last + 1]
    rounding = math.isqrt((units + 1) * n) + 2 if shape.sums_are_rounded else 0
    event = NoisedWeights(n, (scale,) * (rounds + 1), checks)
    if name != "elimination":
        rest = {"rule": name, "sums_are_rounded": shape.sums_are_rounded, "rounding": rounding}
        event = ComparedWeights(n, (scale,) * (rounds + 1), checks, **rest)
    return claiming_nothing(event, units)


def claiming_nothing(event: NoisedWeights, units: int) -> Elimination:
    """Return the mechanism of an event without a check of (ε, δ)."""
    made = object.__new__(SHAPES[getattr(event, "rule", "elimination")].maker)
    for key, value in {
        "items_per_unit": event.items_per_unit, "epsilon": 100.0, "delta": 0.06, "unit": None,
        "declared_units": units, "mechanism": event,
    }.items():  # fmt: skip
        object.__setattr__(made, key, value)
    return made


def weights(plan: Elimination, held: Held, gone: frozenset[str], number: int = 0) -> dict[str, int]:
    shard = shard_of(held, plan.items_per_unit)
    items = shard.items.to_pylist()
    live = np.array([item not in gone for item in items], np.bool_)
    sums = plan.weigh(GatheredSets.of([shard]), number, live)
    return dict(zip(items, sums.tolist(), strict=True))


def held_to_the_norm(
    plan: Elimination, others: Held, unit: set[str], gone: frozenset[str], without: dict[str, int]
) -> float:
    """Check a pair of neighbours, of which one has the weights `without`; return the norm."""
    with_unit = weights(plan, [*others, unit], gone)
    known = {item for held in others for item in held}
    moved = [with_unit.get(i, 0) - without.get(i, 0) for i in {*with_unit, *without}]
    new = [w for i, w in with_unit.items() if i not in known and i not in gone]
    length = math.hypot(*moved) if moved else 0.0
    assert length <= plan.mechanism.norm(0)
    bound = (
        min(plan.mechanism.largest, 1 / math.sqrt(max(1, len(new)))) * plan.mechanism.scales[0] + 1
    )
    assert all(w <= bound for w in new)
    assert all(w == 0 for i, w in with_unit.items() if i in gone)
    return length


WEIGHTS = sorted(SHAPES)


@pytest.mark.parametrize("name", ["gaussian", *WEIGHTS])
class TestSelection:
    def test_release_from_merged_shards_equals_release_of_whole(self, name):
        rng = np.random.default_rng(1)
        held = [{f"w{i}" for i in rng.geometric(0.1, 30)} for _ in range(60)]
        plan = comparison_plan(name, 4.0, 1e-3, 8, declared_units=100)
        whole = plan.release([shard_of(held)], SEED, b"x")
        parts = [shard_of(held[:25]), shard_of(held[25:], first=25)]
        assert plan.release(parts, SEED, b"x") == whole
        assert len(whole) > 3

    def test_the_same_seed_gives_the_same_release(self, name):
        held = [{f"w{i}" for i in range(8)} for _ in range(60)]
        plan = comparison_plan(name, 4.0, 1e-3, 8, declared_units=100)

        def out(seed: PrivacySeed, context: bytes) -> dict[str, int]:
            return plan.release([shard_of(held)], seed, context)

        assert out(SEED, b"x") == out(SEED, b"x")
        assert out(SEED, b"x") != out(SEED, b"y")
        assert out(SEED, b"x") != out(PrivacySeed.fixed(4), b"x")
        assert list(out(SEED, b"x")) == sorted(out(SEED, b"x"))

    @pytest.mark.parametrize("wish", [0.1, 1.0, 8.0])
    def test_charged_epsilon_equals_requested_epsilon(self, name, wish):
        plan = comparison_plan(name, wish, 1e-6, 64, declared_units=5000)
        assert 0.995 * wish <= epsilon_pld(plan.event(), 1e-6) <= wish

    def test_shards_with_a_looser_bound_are_refused(self, name):
        plan = comparison_plan(name, 2.0, 1e-6, 8, declared_units=10)
        with pytest.raises(PlanError, match="9 items per unit"):
            plan.release([shard_of([{"a"}], 9)], SEED, b"x")
        with pytest.raises(BadInput, match="declared bound of 10"):
            plan.release([shard_of([{"a"}] * 6), shard_of([{"a"}] * 5)], SEED, b"x")

    def test_empty_shards_release_nothing(self, name):
        plan = comparison_plan(name, 2.0, 1e-6, 8, declared_units=10)
        assert plan.release([shard_of([])], SEED, b"x") == {}
        assert plan.release([], SEED, b"x") == {}


@pytest.mark.parametrize("name", WEIGHTS)
class TestWeights:
    @pytest.fixture
    def low(self, name: str) -> Elimination:
        """A mechanism with a level near 1, so that tiny data exceed it."""
        return bare(name, 4, 1 << (28 if SHAPES[name].sums_are_rounded else 20), 1)

    def gone(self, name: str) -> list[frozenset[str]]:
        return [frozenset(), *([] if name == "policy" else [frozenset("a")])]

    def test_one_unit_changes_weights_by_norm_one_at_most(self, name, low):
        """All data sets of up to three units over three items, with every possible unit added."""
        subsets = [set(c) for r in range(1, 4) for c in itertools.combinations("abc", r)]
        largest = 0.0
        for size in range(4):
            for others in itertools.combinations_with_replacement(subsets, size):
                for gone in self.gone(name):
                    without = weights(low, list(others), gone)
                    for unit in [*subsets, {"a", "d"}, {"d", "e"}]:
                        length = held_to_the_norm(low, list(others), unit, gone, without)
                        largest = max(largest, length)
        # the bound is not much larger than necessary
        assert largest >= 0.85 * low.mechanism.norm(0)

    @pytest.mark.statistical
    def test_planted_items_are_released_with_the_probability_of_the_coin(self, name):
        """Four thousand units with unique items: the rate is at most the coin's, and close."""
        n, draws = 3, 4000
        event = calibrated(name, 6.0, 0.02, n, draws)
        plan = claiming_nothing(event, draws)
        # Here the worst number of such items is all if each has its largest weight, otherwise one.
        letters = "pqr" if name == "elimination" else "p"
        shard = shard_of([{f"{x}{i}" for x in letters} for i in range(draws)], n)
        released = len({item[1:] for item in plan.release([shard], SEED, b"x")})
        assert binom.sf(released - 1, draws, event.coin) > 1e-6
        if len(event.scales) == 2:  # more rounds do not reach the bound
            assert binom.sf(released - 1, draws, event.coin / 3) < 1e-6
        lower = replace(event, checks=tuple((a, b, c - c // 3) for a, b, c in event.checks))
        freely = len({i[1:] for i in claiming_nothing(lower, draws).release([shard], SEED, b"x")})
        assert binom.sf(freely - 1, draws, event.coin) < 1e-6

    def test_estimates_are_close_to_true_counts(self, name):
        rng = np.random.default_rng(5)
        held = [{f"w{i}" for i in rng.geometric(0.05, 12)} for _ in range(3000)]
        shard = shard_of(held, 16)
        true = dict(zip(shard.items.to_pylist(), np.bincount(shard.members).tolist(), strict=True))
        plan = comparison_plan(name, 4.0, 1e-6, 16, declared_units=5000)
        out = plan.release([shard], SEED, b"x")
        assert len(out) >= 20
        off = [abs(n / true[item] - 1) for item, n in out.items()]
        assert np.median(off) < 0.12

    def test_plan_with_too_little_noise_is_refused(self, name):
        plan = comparison_plan(name, 2.0, 1e-6, 8, declared_units=10)
        louder = tuple(2 * s for s in plan.mechanism.scales)
        with pytest.raises(PlanError, match="gives δ="):
            replace(plan, mechanism=replace(plan.mechanism, scales=louder))
        lower = tuple((a, b, c - c // 4) for a, b, c in plan.mechanism.checks)
        with pytest.raises(PlanError, match="gives δ="):
            replace(plan, mechanism=replace(plan.mechanism, checks=lower))


@pytest.mark.parametrize(("epsilon", "delta", "n"), [(0.3, 1e-7, 20), (4.0, 1e-3, 200)])
def test_calibration_of_elimination_equals_the_calibration_of_all_mechanisms(epsilon, delta, n):
    general = calibrated.__wrapped__("elimination", epsilon, delta, n, 5000)
    assert _elimination.__wrapped__(epsilon, delta, n) == general


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.lists(st.sets(st.sampled_from("abcdefgh"), min_size=1, max_size=8), max_size=10),
    st.sets(st.sampled_from("abcdefghxyz"), min_size=1, max_size=8),
    st.sets(st.sampled_from("abcdefgh"), max_size=3),
)
def test_norm_of_rounded_weights_stays_within_the_scale(name, others, unit, gone):
    plan = bare(name, 5, 1 << (28 if SHAPES[name].sums_are_rounded else 12), 1)
    left_out = frozenset() if name == "policy" else frozenset(gone)
    held_to_the_norm(plan, others, unit, left_out, weights(plan, others, left_out))


# --- noise


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("draw", "deviation"),
    [(lattice_gaussian, LATTICE_DEVIATION), (finer_gaussian, FINER_DEVIATION)],
    ids=["lattice", "finer lattice"],
)
def test_lattice_noise_has_its_deviation(draw, deviation):
    noise = draw(6000, SEED, b"x")

    def fits(sigma: float) -> bool:
        return bool(abs(noise.var() / sigma**2 - 1) < 6 * math.sqrt(2 / len(noise)))

    assert fits(deviation)
    assert not fits(deviation * 2 / 3)
    assert not fits(deviation * 3 / 2)
    assert kstest(noise / deviation, "norm").pvalue > 1e-6
    low = np.bincount(noise % 256, minlength=256)  # every residue occurs, none is preferred
    assert kstest((noise % 256 + 0.5) / 256, "uniform").pvalue > 1e-6
    assert low.max() < 60


def test_profile_of_two_levels_equals_convolution():
    """At widths with a visible error, k·x + y has the same ratio as 256·x + y."""
    a, k, b = 4.0, 3, 15.0
    x = np.arange(-60, 61)
    y = np.arange(-200, 201)
    px, py = np.exp(-(x**2) / (2 * a * a)), np.exp(-(y**2) / (2 * b * b))
    law = np.zeros(1001)
    for v, mass in zip(x, px / px.sum(), strict=True):
        law[500 + k * v + y] += mass * py / py.sum()
    z = np.arange(-500, 501)
    wanted = np.exp(-(z**2) / (2 * (k * k * a * a + b * b)))
    wanted /= wanted.sum()
    near = np.abs(z) < 100
    assert np.max(np.abs(law[near] / wanted[near] - 1)) < 1e-10
    assert discrete_gaussian(1280.0, 1, SEED, b"x").dtype == np.int64
    assert pytest.approx(math.hypot(256 * 1024, 1280)) == LATTICE_DEVIATION


# --- accounting


@pytest.mark.parametrize(("epsilon", "delta", "n"), [(1.0, 1e-5, 100), (3.0, 1e-6, 8)])
def test_profile_equals_the_closed_form_of_gopi_et_al(epsilon, delta, n):
    """Their σ and threshold for (ε, δ), with half of δ for each part, have δ in our profile."""

    def excess(sigma: float) -> float:
        a = norm.cdf(1 / (2 * sigma) - epsilon * sigma)
        b = math.exp(epsilon) * norm.cdf(-1 / (2 * sigma) - epsilon * sigma)
        return float(a - b) - delta / 2

    sigma = brentq(excess, 0.05, 100)
    t = np.arange(1, n + 1)
    threshold = np.max(1 / np.sqrt(t) + sigma * norm.ppf((1 - delta / 2) ** (1 / t)))
    scale = FINER_DEVIATION / sigma
    checks = ((0, 0, math.ceil(threshold * scale)),)
    event = ComparedWeights(n, (round(scale),), checks, sums_are_rounded=True)
    assert event.profile.delta_at(epsilon) == pytest.approx(delta, rel=1e-3)
    assert event.coin == pytest.approx(delta / 2, rel=1e-3)
    assert epsilon_pld(event, delta) == pytest.approx(epsilon, rel=2e-3)


def test_cost_of_rounds_is_the_cost_of_their_composition():
    single = NoisedWeights(4, (30_000,), ((0, 0, 2_000_000),))
    four = NoisedWeights(4, (15_000,) * 4, ((0, 3, 4_000_000),))
    assert four.mu == pytest.approx(single.mu, rel=1e-12)
    assert four.mu == pytest.approx(30_000 / LATTICE_DEVIATION, rel=1e-6)


def test_every_threshold_check_is_charged():
    last = NoisedWeights(4, (10_000,) * 4, ((0, 3, 2_000_000),))
    every = replace(last, checks=tuple((0, r, 2_000_000) for r in range(4)))
    assert last.coin < every.coin < 2 * last.coin
    alone = [replace(last, checks=((0, r, 2_000_000),)).coin for r in range(4)]
    assert every.coin == pytest.approx(sum(alone), rel=1e-9)


@pytest.mark.cases
def test_invalid_parameters_are_refused(wrong):
    right = ComparedWeights(4, (10_000,), ((0, 0, 100_000),))
    with pytest.raises(BadInput):
        replace(right, **wrong)  # type: ignore[arg-type]


def test_calibration_compensates_the_rounding_of_the_accounting():
    """The charge would be slightly above an ε that is met to the last digit."""
    epsilon, delta = 1 / math.sqrt(3), 1e-7 / 3
    plan = selection_plan("elimination", epsilon, delta, 2000, declared_units=5000)
    assert 0.995 * epsilon <= epsilon_pld(plan.event(), delta) <= epsilon


# --- the mechanism of the paper, and plain counts


def test_paper_mechanism_is_charged_at_its_true_delta():
    plan = selection_plan("paper", 1.0, 1e-7, 128, declared_units=6000)
    assert isinstance(plan, Counted)
    assert (plan.items_per_unit, plan.sigma, plan.threshold) == (256, 200.0, 983)
    assert plan.epsilon == pytest.approx(0.5178, abs=1e-4)
    assert plan.delta == pytest.approx(1.18e-4, rel=0.01)
    assert epsilon_pld(plan.event(), 1e-6) == math.inf
    with pytest.raises(PlanError, match="no guarantee") as caught:
        selection_plan("paper", 1.0, 1e-7, 128, declared_units=9000)
    assert "elimination" in str(caught.value)


def test_paper_threshold_releases_a_planted_word_more_often_than_its_delta():
    """Shown by thousands of draws: the paper's formulas at σ = 20, N = 1, δ = 0.002."""
    draws, delta = 4000, 0.002
    paper = paper_parameters(20.0, delta, 1)
    exact = selection_plan("gaussian", paper.epsilon, delta, 1, declared_units=10)
    noise = discrete_gaussian(paper.sigma, draws, SEED, b"paper")
    passes = int(np.sum(1 + noise >= math.ceil(paper.threshold)))
    assert binom.sf(passes - 1, draws, delta) < 1e-6
    noise = discrete_gaussian(exact.sigma, draws, SEED, b"exact")
    passes = int(np.sum(1 + noise >= exact.threshold))
    assert binom.sf(passes - 1, draws, delta) > 1e-6


# --- sets of items


@given(
    st.lists(st.lists(st.sampled_from("abcdefghij"), max_size=20), max_size=8), st.integers(1, 12)
)
def test_unit_changes_at_most_n_counts_by_one(units, n):
    """Also with repeated items: without the unit, at most N counts are lower, each by 1."""

    def counts(held: list[tuple[str, list[str]]]) -> dict[str, int]:
        shard = item_sets(held, n, b"k")
        sums = np.bincount(shard.members, minlength=len(shard.items)).tolist()
        return dict(zip(shard.items.to_pylist(), sums, strict=True))

    named = [(str(i), items) for i, items in enumerate(units)]
    whole = counts(named)
    for i in range(len(named)):
        rest = counts(named[:i] + named[i + 1 :])
        moved = {w: whole[w] - rest.get(w, 0) for w in whole}
        assert rest.keys() <= whole.keys() and set(moved.values()) <= {0, 1}
        assert sum(moved.values()) == min(n, len(set(units[i])))


def test_bounded_sample_does_not_depend_on_frequency() -> None:
    # Ten thousand units share 9 items; each has one unique item. Bounded to 5 of 10.
    held = [{*"abcdefghi", f"own{i}"} for i in range(10_000)]
    shard = shard_of(held, 5)
    counts = dict(zip(shard.items.to_pylist(), np.bincount(shard.members).tolist(), strict=True))
    unique = sum(n for w, n in counts.items() if w.startswith("own"))
    for n in (unique, counts["a"], counts["i"]):
        assert abs(n - 5000) < 6 * 50
    assert len(shard.members) == 50_000


def test_more_units_than_declared_are_refused():
    units = [(str(i), {"secretword"}) for i in range(12345)]
    assert item_sets(units[:-1], 5, b"k", declared_units=12344).units == 12344
    with pytest.raises(BadInput, match="declared bound of 12344") as caught:
        item_sets(iter(units), 5, b"k", declared_units=12344)
    assert "12345" not in str(caught.value)
    assert "secretword" not in str(caught.value)
    with pytest.raises(BadInput, match="0 is below 1"):
        shard_of([], 0)
