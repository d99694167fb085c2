import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.special import log_softmax
from sklearn.metrics import roc_auc_score

from dp_core.audit import membership
from dp_core.audit import membership as metrics
from dp_core.audit.observations import min_k
from dp_core.privacy.accounting.tradeoff import PrivacyProfile, group_privacy
from dp_core.privacy.mechanisms import Gaussian

FROZEN = json.loads((Path(__file__).parent / "membership_oracles.json").read_text())


@pytest.mark.parametrize("a", ["0.0", "0.3", "1.0"])
def test_rmia_is_privacy_meters(a):
    frozen = FROZEN["privacy_meter"]
    references = [np.array(frozen[n])[:, None] for n in ("reference", "population_reference")]
    scores = membership.rmia(
        np.array(frozen["target"]),
        references[0],
        np.array(frozen["population_target"]),
        references[1],
        float(a),
    )
    assert scores.tolist() == pytest.approx(frozen["scores"][a])


@pytest.mark.parametrize("share", ["0.2", "0.5"])
def test_min_k_is_mimirs(share):
    frozen = FROZEN["mimir"]
    logs = log_softmax(np.array(frozen["logits"]), axis=1)
    of_label = logs[np.arange(len(logs)), frozen["labels"]]
    mean = (np.exp(logs) * logs).sum(1)
    deviation = np.sqrt((np.exp(logs) * logs**2).sum(1) - mean**2)
    padded = [np.concatenate([v, [-99.0]])[None] for v in ((of_label - mean) / deviation, of_label)]
    weights = np.concatenate([np.ones(len(logs)), [0.0]])[None]
    scores = [-float(min_k(values, weights, float(share))[0]) for values in padded]
    assert scores == pytest.approx(frozen["min_k_plus_plus_and_min_k"][share])


def test_a_row_without_predictions_has_a_loss_of_zero():
    assert min_k(np.full((1, 4), 3.0), np.zeros((1, 4))).tolist() == [0.0]
    assert min_k(np.array([[3.0, 1.0, 2.0]]), np.array([[1.0, 0.0, 1.0]])).tolist() == [2.0]


def test_confidence_is_the_log_odds_of_a_rows_probability():
    p = np.array([0.2, 0.5, 0.999])
    assert membership.confidence(-np.log(p)) == pytest.approx(np.log(p / (1 - p)))
    assert np.isfinite(membership.confidence(np.array([0.0, 800.0]))).all()


def test_lira_ranks_as_the_normal_law_of_models_without_the_row():
    rng = np.random.default_rng(1)
    references = rng.normal(0, [[1.0], [3.0]], (2, 400))
    target = np.array([2.0, 3.0])
    by_row = membership.lira_offline(target, references)
    expected = (target - references.mean(1)) / references.std(1, ddof=1)
    assert by_row == pytest.approx(expected)
    few = membership.lira_offline(target, references[:, :3])
    assert few == pytest.approx(target - references[:, :3].mean(1))


def test_the_best_threshold_is_the_best_of_all():
    rng = np.random.default_rng(0)
    scores, members = rng.integers(0, 6, 30).astype(float), rng.random(30) < 0.5

    def advantage(t: float) -> float:
        above = scores > t
        return float(above[members].mean() - above[~members].mean())

    best = max(advantage(t) for t in scores)
    assert advantage(membership.best_threshold(scores, members)) == pytest.approx(best)


def rows(n: int = 400) -> tuple[membership.Losses, membership.Losses, np.ndarray, np.ndarray]:
    """Return hard and easy rows; members have a slightly lower loss than the public model's."""
    rng = np.random.default_rng(3)
    members, fitted = np.arange(n) < n // 2, np.arange(n) % 5 == 0
    public = rng.gamma(3.0, 1.0, n) + 0.5
    target = public - 0.3 * members + rng.normal(0, 0.05, n)
    return membership.Losses(target, target), membership.Losses(public, public), members, fitted


def test_every_attack_scores_members_higher_and_calibration_beats_the_plain_loss():
    target, public, members, fitted = rows()
    features = {"gradients": np.stack([target.mean, public.mean], axis=1)}
    made = {a.name: a for a in membership.attacks(target, [public], features, members, fitted)}
    assert set(made) == {"loss", "min-k", "reference", "rmia", "lira", "gradients"}
    advantage = {}
    for name, attack in made.items():
        declared = (attack.scores > attack.threshold)[attack.measured]
        truth = members[attack.measured]
        advantage[name] = declared[truth].mean() - declared[~truth].mean()
    assert advantage["loss"] > 0
    assert all(advantage[n] > advantage["loss"] + 0.5 for n in ("reference", "rmia", "gradients"))
    loss, _ = membership.attacks(target, [], {}, members, fitted)  # without references
    # The published attack declares the rows below the mean loss of the training.
    mean = target.mean[members].mean()
    np.testing.assert_array_equal(loss.scores > loss.threshold, target.mean < mean)
    assert loss.measured.all()


def test_measured_rows_are_never_fitted():
    target, public, members, fitted = rows()
    features = {"attention": np.stack([target.mean, public.mean], axis=1)}
    before = membership.attacks(target, [public], features, members, fitted)
    flipped = np.where(fitted, members, ~members)
    after = membership.attacks(target, [public], features, flipped, fitted)
    for first, other in zip(before[1:], after[1:], strict=True):
        assert first.threshold == other.threshold
        np.testing.assert_array_equal(first.scores, other.scores)
        np.testing.assert_array_equal(first.measured, ~fitted)


def test_regression_does_not_care_for_units_or_for_how_many_are_on_a_side():
    target, public, members, fitted = rows()
    features = np.stack([target.mean, public.mean], axis=1)
    plain = membership.learned(features, members, fitted)
    assert membership.learned(1e6 * features + 3, members, fitted) == pytest.approx(plain, abs=1e-3)
    fewer = fitted & ~(members & (np.arange(len(members)) % 2 == 0))
    assert abs(float(np.median(membership.learned(features, members, fewer)))) < math.log(2)


def scored(members: list[float], others: list[float]) -> membership.Scored:
    n = len(members) + len(others)
    flags = np.arange(n) < len(members)
    return membership.Scored(np.array([*members, *others], np.float64), flags, np.arange(n))


# --- ceilings


@pytest.mark.parametrize("epsilon, delta", [(0.0, 0.0), (0.3, 0.01), (1.0, 1e-5), (4.0, 0.1)])
def test_a_ceiling_is_attained_by_the_worst_case_mechanism(epsilon, delta):
    """Randomised response with δ: the (ε, δ) mechanism that dominates all others (KOV 2015)."""
    keep = (1 - delta) / (1 + math.exp(epsilon))
    with_unit = np.array([delta, keep * math.exp(epsilon), keep, 0.0])
    without = with_unit[::-1]
    tests = list(itertools.product((0.0, 1.0), repeat=4))
    points = [(float(np.dot(t, without)), float(np.dot(t, with_unit))) for t in tests]
    ceiling = PrivacyProfile.of_claim(epsilon, delta)
    for fpr, tpr in points:
        assert tpr <= ceiling.true_positive_rate(min(1.0, fpr)) + 1e-12
    assert max(tpr - fpr for fpr, tpr in points) == pytest.approx(ceiling.leakage, abs=1e-12)
    for best in ((0, delta), (keep, delta + keep * math.exp(epsilon)), (1 - delta, 1)):
        assert ceiling.true_positive_rate(best[0]) == pytest.approx(best[1], abs=1e-12)
    corners = sorted({(0.0, 0.0), (0.0, delta), (keep, 1 - keep), (1 - delta, 1.0), (1.0, 1.0)})
    xs, ys = zip(*corners, strict=True)
    exact = float(np.trapezoid(ys, xs) if hasattr(np, "trapezoid") else np.trapz(ys, xs))
    assert exact <= ceiling.area <= exact + 2e-3


def test_leakage_and_area_of_a_gaussian_are_the_best_tests():
    """The ceilings are slightly above the values of Φ(Φ⁻¹(FPR) + 1/σ), Dong, Roth and Su 2022."""
    sigma = 1.3
    ceiling = PrivacyProfile.of_event(Gaussian(sigma, 1))
    exact = 2 * float(stats.norm.cdf(0.5 / sigma)) - 1
    assert exact <= ceiling.leakage <= exact * 1.001
    auc = float(stats.norm.cdf(1 / sigma / math.sqrt(2)))
    assert auc <= ceiling.area <= auc + 5e-3
    nothing = PrivacyProfile.of_claim(math.inf, 0.0)
    assert nothing.leakage == nothing.area == nothing.true_positive_rate(0.0) == 1.0


def test_a_group_of_several_units_may_leak_more():
    unit = PrivacyProfile.of_claim(1.0, 1e-6)
    group = group_privacy(1.0, 1e-6, 3)
    assert unit.for_group(3) == PrivacyProfile.of_claim(group.epsilon, group.delta)
    assert unit.for_group(1) == unit
    assert unit.for_group(2).leakage > unit.leakage


# --- intervals


@pytest.mark.parametrize("hits, n", [(0, 7), (1, 7), (4, 7), (7, 7), (30, 100)])
def test_an_interval_is_the_exact_one_of_both_sides(hits, n):
    interval = membership.clopper_pearson(hits / n, n)
    exact = stats.binomtest(hits, n).proportion_ci(0.95, "exact")
    assert (interval.low, interval.high) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_repeated_rows_are_worth_one():
    assert membership.effective_size(np.arange(9)) == 9
    assert membership.effective_size(np.repeat(np.arange(9), 4)) == 9
    assert membership.effective_size(np.array([0, 0, 0, 1])) == pytest.approx(16 / 10)
    sample = scored([0.3, 0.7, 0.2], [0.1, 0.4])
    four = membership.Scored(
        np.repeat(sample.scores, 4), np.repeat(sample.members, 4), np.repeat(sample.clusters, 4)
    )
    assert membership.leakage(four, 0.25) == membership.leakage(sample, 0.25)
    assert membership.area(four) == membership.area(sample)


def test_leakage_is_tpr_less_fpr_with_an_interval_that_keeps_its_word():
    leakage = membership.leakage(scored([0.1, 0.6, 0.9, 0.9], [0.1, 0.6]), 0.5)
    assert leakage.value == 0.75 - 0.5
    tpr, fpr = membership.clopper_pearson(0.75, 4, 0.975), membership.clopper_pearson(0.5, 2, 0.975)
    assert (leakage.low, leakage.high) == (tpr.low - fpr.high, tpr.high - fpr.low)
    # Exact coverage: sum over every outcome of both sides.
    p, q, n, m = 0.6, 0.35, 12, 9
    covered = 0.0
    for hits, alarms in itertools.product(range(n + 1), range(m + 1)):
        sides = ([1.0] * k + [0.0] * (of - k) for k, of in ((hits, n), (alarms, m)))
        estimate = membership.leakage(scored(*sides), 0.5)
        chance = stats.binom.pmf(hits, n, p) * stats.binom.pmf(alarms, m, q)
        covered += chance * (estimate.low <= p - q <= estimate.high)
    assert 0.95 <= covered < 1


@pytest.mark.statistical
def test_the_interval_of_an_area_covers_it_where_rows_are_repeated():
    rng, covered, trials = np.random.default_rng(5), 0, 400
    truth = float(stats.norm.cdf(0.5 / math.sqrt(2)))
    for _ in range(trials):
        scores = np.concatenate([rng.normal(0.5, 1, 60), rng.normal(0, 1, 50)])
        members, clusters = np.arange(110) < 60, np.arange(110)
        times = rng.integers(1, 5, 110)
        sample = membership.Scored(*(np.repeat(a, times) for a in (scores, members, clusters)))
        area = membership.area(sample)
        covered += area.low <= truth <= area.high
    assert 0.89 < covered / trials < 0.99  # 0.95 ± more than five deviations; without clusters 0.83


# --- ROC


def test_areas_and_low_rates_equal_scikit_learns_and_enumeration():
    rng = np.random.default_rng(2)
    for _ in range(20):
        roc = scored(rng.integers(0, 8, 9).tolist(), rng.integers(-2, 6, 11).tolist())
        assert membership.area(roc).value == pytest.approx(roc_auc_score(roc.members, roc.scores))
        for asked in (0.0, 0.001, 0.1, 2 / 11, 0.5, 1.0):
            members, others = roc.side(True)[0], roc.side(False)[0]
            cuts = [-math.inf, *roc.scores.tolist()]
            best = max((members > t).mean() for t in cuts if (others > t).mean() <= asked + 1e-12)
            rates = membership.at_low_rate(roc, asked)
            assert rates.tpr.value == pytest.approx(best)
            assert rates.fpr.value <= asked + 1e-12


def test_rates_equal_jax_privacys_where_no_threshold_is_drawn_by_lot():
    """Its auditor mixes thresholds at random, which adds TPR except at the corners."""
    frozen = FROZEN["jax_privacy"]
    sample = scored(frozen["members"], frozen["others"])
    assert membership.area(sample).value <= frozen["area"] + 1e-12
    for rate, tpr in zip(frozen["rates"], frozen["tpr"], strict=True):
        assert membership.at_low_rate(sample, rate).tpr.value <= tpr + 1e-12
    for rate in frozen["corners"]:
        tpr = frozen["tpr"][frozen["rates"].index(rate)]
        assert membership.at_low_rate(sample, rate).tpr.value == pytest.approx(tpr)


@pytest.mark.statistical
def test_the_false_alarms_of_a_threshold_that_they_set_stay_within_their_interval():
    rng, missed, trials = np.random.default_rng(4), 0, 4000
    for _ in range(trials):
        others = rng.uniform(size=40)
        rates = membership.at_low_rate(scored([0.0], others.tolist()), 0.05)
        threshold = float(np.sort(others)[::-1][2])
        missed += rates.fpr.high < 1 - threshold
    assert 0.015 < missed / trials < 0.035  # 2.5%


# --- rows of the report


def test_a_row_is_flagged_if_its_interval_exceeds_the_claims_ceiling():
    clear = scored([1.0] * 300, [0.0] * 300)
    for ceiling, above in ((PrivacyProfile.of_claim(1.0, 1e-6), True), (None, False)):
        row = membership.measure("patient", "loss", clear, 0.5, ceiling)
        assert row.above is above
        assert (row.leakage_ceiling is None) is (ceiling is None)
    assert not membership.measure(
        "patient", "loss", clear, 0.5, PrivacyProfile.of_claim(9.0, 1e-6)
    ).above
    assert 0.98 < membership.measure("patient", "loss", clear, 0.5, None).area.low < 1
    few = scored([1.0, 1.0], [0.0, 0.0])
    assert not membership.measure(
        "patient", "loss", few, 0.5, PrivacyProfile.of_claim(1.0, 1e-6)
    ).above


# --- rarity


def test_a_profiles_probability_is_the_product_over_all_codes():
    profiles = [frozenset("ab"), frozenset("a"), frozenset("ac"), frozenset("a"), frozenset("ab")]
    p = {"a": 5 / 5, "b": 2 / 5, "c": 1 / 5}
    for profile, log_probability in zip(
        profiles, membership.profile_log_probabilities(profiles), strict=True
    ):
        exact = math.prod(p[c] if c in profile else 1 - p[c] for c in p)
        assert math.exp(log_probability) == pytest.approx(exact)


def test_buckets_of_fewer_than_ten_or_of_one_side_are_left_out():
    logs = np.array([-9.0] * 9 + [-5.0] * 12 + [-4.0] * 20 + [0.0] * 10)
    members = np.ones(len(logs), np.bool_)
    members[9:15] = members[21:31] = members[45:] = False
    scores = np.where(np.arange(len(logs)) % 2 == 0, 1.0, 0.0)
    sample = membership.Scored(scores, members, np.arange(len(logs)))
    buckets = membership.rarity_buckets(logs, sample, 0.5)
    assert [b.log_probability for b in buckets] == [-5.0, -4.0, 0.0]
    assert [(b.members, b.others) for b in buckets] == [(6, 6), (10, 10), (4, 6)]
    for bucket in buckets:
        here = logs == bucket.log_probability
        tpr, fpr = ((scores[here & side] > 0.5).mean() for side in (members, ~members))
        assert bucket.leakage == pytest.approx(tpr - fpr)
    assert metrics.LEAST_IN_BUCKET == 10
