"""Membership attacks: scores of rows, their accuracy, and the ceilings of the privacy guarantee.

An attack turns observations of rows into scores, higher for likely members. `loss` is S-BBA. Its
mean over a document, an admission or a patient is A-BBA and P-BBA. `attention` and `gradients` are
S-AWBA and S-GWBA (Jagannatha et al. 2021, section 4.1). The other attacks compare with a reference
model that never saw the members: the public model of the same run.

An attack gives every sample or group a score, higher for likely members, and declares members if
the score exceeds a threshold. TPR is the share of members declared, FPR the share of non-members.

* Privacy leakage, the advantage of Yeom et al. 2018 (arXiv:1709.01604): PL = TPR − FPR at the
  attack's own threshold.
* ROC, its area (AUC), and TPR at a low FPR (Carlini et al. 2022, arXiv:2112.03570).
* Ceilings: no test of one unit's membership exceeds the trade-off of the model's guarantee
  (Wasserman and Zhou 2010; Kairouz, Oh and Viswanath 2015, arXiv:1311.0776, Theorem 2.1).

Rows of one unit are not independent. Intervals of shares are Clopper and Pearson's at the effective
sample size (Korn and Graubard 1998), as if all rows of a cluster were one observation repeated. The
interval of the AUC is Obuchowski's for clusters (1997, Biometrics 53).
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dp_core.privacy.accounting.tradeoff import PrivacyProfile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

OFFLINE_A = tuple(float(a) for a in np.linspace(0, 1, 11))  # values of RMIA's a to choose from
LEAST_FOR_VARIANCES = 64  # number of references from which each row has a separate variance
_LEAST_LOSS = 1e-12


@dataclass(frozen=True)
class Losses:
    """Black-box signals: (n,) each, lower for rows that the model predicts better.

    Attributes:
        mean: mean cross-entropy over a row's predictions under all masks, in nats.
        lowest: negated Min-K%++ over the same predictions.
    """

    mean: Floats
    lowest: Floats


@dataclass(frozen=True)
class Attack:
    """One attack's scores of all rows.

    Attributes:
        name: loss | min-k | reference | rmia | lira | attention | gradients.
        scores: (n,) higher for likely members; a group's score is the mean over its rows.
        threshold: score above which a row or group is declared a member.
        measured: (n,) whether each row is measured, because the attack was not fitted on it.
    """

    name: str
    scores: Floats
    threshold: float
    measured: Flags


def attacks(
    loss: Losses,
    references: list[Losses],
    features: dict[str, Floats],
    members: Flags,
    fitted: Flags,
) -> list[Attack]:
    """Return every attack that the observations allow.

    Args:
        loss: losses of the attacked model.
        references: losses of models that never saw the members; may be empty.
        features: name -> (n, F) features for attacks that are fitted.
        members: (n,) whether each row is a member.
        fitted: (n,) rows on which thresholds and regressions are fitted. Only `loss` measures
            them, because its threshold is a published quantity.
    """
    measured = ~fitted
    made = [Attack("loss", -loss.mean, -float(loss.mean[members].mean()), np.ones_like(members))]
    scores = {"min-k": -loss.lowest}
    if references:
        means = np.stack([reference.mean for reference in references], axis=1)  # (n, k)
        scores["reference"] = means.mean(1) - loss.mean
        scores["rmia"] = _tuned_rmia(np.exp(-loss.mean), np.exp(-means), members, fitted)
        scores["lira"] = lira_offline(confidence(loss.mean), confidence(means))
    for name, values in scores.items():
        threshold = best_threshold(values[fitted], members[fitted])
        made.append(Attack(name, values, threshold, measured))
    for name, seen in features.items():
        made.append(Attack(name, learned(seen, members, fitted), 0.0, measured))
    return made


def best_threshold(scores: Floats, members: Flags) -> float:
    """Return the threshold with the largest TPR − FPR."""
    candidates = np.unique(scores)
    of_members, others = np.sort(scores[members]), np.sort(scores[~members])
    above = 1 - np.searchsorted(of_members, candidates, side="right") / len(of_members)
    above -= 1 - np.searchsorted(others, candidates, side="right") / len(others)
    return float(candidates[int(np.argmax(above))])


def confidence(losses: Floats) -> Floats:
    """Return ln(p / (1 − p)) for p = e^−loss, which LiRA's normal distribution fits well."""
    kept = np.maximum(losses, _LEAST_LOSS)
    logits: Floats = -kept - np.log(-np.expm1(-kept))
    return logits


def rmia(
    target: Floats,
    references: Floats,
    population_target: Floats,
    population_references: Floats,
    a: float,
) -> Floats:
    """Return offline RMIA scores: the share of a population with a smaller ratio than a row.

    Zarifzadeh et al. 2024 (arXiv:2312.03262), equation 8 with γ = 1. p(x) is estimated only from
    models without x (appendix B.2.2): ((1 + a)·p_out(x) + (1 − a)) / 2.

    Args:
        target: (n,) probability of each row by the attacked model.
        references: (n, k) probabilities by models that never saw the row.
        population_target: (z,) as `target`, for other rows, which are not measured.
        population_references: (z, k) as `references`, for the same rows.
        a: the parameter a in [0, 1].
    """
    ratios = target / (((1 + a) * references.mean(1) + (1 - a)) / 2)
    population = np.sort(
        population_target / (((1 + a) * population_references.mean(1) + (1 - a)) / 2)
    )
    shares: Floats = np.searchsorted(population, ratios, side="left") / len(population)
    return shares


def _tuned_rmia(target: Floats, references: Floats, members: Flags, fitted: Flags) -> Floats:
    """Return RMIA's scores with the a of the largest AUC on the fitted rows.

    The population z consists of the non-members among the fitted rows. Probabilities of text are
    so small that any a other than 1 undoes the calibration.
    """
    from sklearn.metrics import roc_auc_score  # a slow import that few steps need

    z = fitted & ~members
    every = [rmia(target, references, target[z], references[z], a) for a in OFFLINE_A]
    return max(every, key=lambda scores: float(roc_auc_score(members[fitted], scores[fitted])))


def lira_offline(target: Floats, references: Floats) -> Floats:
    """Return offline LiRA: a row's score in standard deviations above models without the row.

    Carlini et al. 2022 (arXiv:2112.03570), section VI.A: 1 − Pr[N(μ_out, σ²_out) > φ] increases
    with this score. With fewer than 64 references all rows share one variance (their section V).

    Args:
        target: (n,) `confidence` of each row by the attacked model.
        references: (n, k) `confidence` by models that never saw the row.
    """
    centred: Floats = target - references.mean(1)
    if references.shape[1] < LEAST_FOR_VARIANCES:
        return centred  # a shared deviation does not change the order
    result: Floats = centred / np.maximum(references.std(1, ddof=1), 1e-12)
    return result


def learned(features: Floats, members: Flags, fitted: Flags) -> Floats:
    """Return the log-odds of logistic regression, fitted on the rows `fitted`: (n,).

    Only these rows determine the standardisation of features. Both sides have the same weight.
    """
    from sklearn.linear_model import LogisticRegression  # a slow import that few steps need
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(
        StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=5000)
    )
    model.fit(features[fitted], members[fitted])
    odds: Floats = model.decision_function(features)
    return odds


LOW_RATES = (0.001, 0.01)  # values of FPR at which TPR is reported
CONFIDENCE = 0.95
BUCKETS, LEAST_IN_BUCKET = 100, 10


# --- measurements


@dataclass(frozen=True)
class Share:
    """A share with a two-sided interval."""

    value: float
    low: float
    high: float


def clopper_pearson(share: float, size: float, confidence: float = CONFIDENCE) -> Share:
    """Return the two-sided exact interval of a share of `size` trials.

    Args:
        share: successes / trials.
        size: number of trials; for clustered trials the effective number, which may be fractional.
        confidence: two-sided confidence.
    """
    hits, tail = share * size, (1 - confidence) / 2
    low = float(stats.beta.ppf(tail, hits, size - hits + 1)) if hits > 0 else 0.0
    high = float(stats.beta.ppf(1 - tail, hits + 1, size - hits)) if hits < size else 1.0
    return Share(share, low, high)


def effective_size(clusters: Ints) -> float:
    """Return a lower bound on the number of independent observations: (Σm)²/Σm².

    This is Kish's design effect, as if all m rows of a cluster were one row m times.
    """
    sizes = np.unique(clusters, return_counts=True)[1].astype(np.float64)
    return float(sizes.sum() ** 2 / (sizes**2).sum())


@dataclass(frozen=True)
class Scored:
    """An attack's scores of the samples or groups of one level, members and non-members.

    Attributes:
        scores: (n,) higher for likely members.
        members: (n,) the truth.
        clusters: (n,) cluster numbers; samples of one cluster are not independent.
    """

    scores: Floats
    members: Flags
    clusters: Ints

    def side(self, members: bool) -> tuple[Floats, Ints]:
        """Return scores and clusters of the members, or of the others."""
        chosen = self.members == members
        return self.scores[chosen], self.clusters[chosen]

    def rates(self, threshold: float, confidence: float = CONFIDENCE) -> tuple[Share, Share]:
        """Return TPR and FPR of the scores above a threshold, each with its interval."""
        shares = []
        for members in (True, False):
            scores, clusters = self.side(members)
            share = float((scores > threshold).mean())
            shares.append(clopper_pearson(share, effective_size(clusters), confidence))
        return shares[0], shares[1]


def leakage(scored: Scored, threshold: float) -> Share:
    """Return PL = TPR − FPR at a threshold that was fixed beforehand.

    The interval covers both rates at once, each at half the error.
    """
    tpr, fpr = scored.rates(threshold, 1 - (1 - CONFIDENCE) / 2)
    return Share(tpr.value - fpr.value, tpr.low - fpr.high, tpr.high - fpr.low)


@dataclass(frozen=True)
class LowRate:
    """The TPR where at most a share `asked` of the non-members is declared a member.

    Attributes:
        asked: the requested FPR.
        tpr: share of the members above the threshold.
        fpr: share of the non-members above it. The upper end is exact although the non-members set
            the threshold: the true FPR above the (k + 1)-th largest of n scores has the law that
            Clopper and Pearson invert.
    """

    asked: float
    tpr: Share
    fpr: Share


def at_low_rate(scored: Scored, asked: float) -> LowRate:
    """Return the largest TPR at an FPR of at most `asked`, without interpolation of rates."""
    others = np.sort(scored.side(False)[0])[::-1]
    allowed = math.floor(asked * len(others) * (1 + 1e-12))
    threshold = float(others[allowed]) if allowed < len(others) else -math.inf
    return LowRate(asked, *scored.rates(threshold))


def area(scored: Scored) -> Share:
    """Return the AUC, ties counted half, with Obuchowski's interval for clusters.

    If all scores of one side exceed all scores of the other, that interval has no width. The
    Clopper-Pearson interval of the smaller side replaces it, because the variance of an AUC is at
    most the variance of such a share (Birnbaum and Klose 1957).
    """
    from sklearn.metrics import roc_auc_score  # a slow import that few steps need

    value = float(roc_auc_score(scored.members, scored.scores))
    (positive, p_clusters), (negative, n_clusters) = scored.side(True), scored.side(False)
    variance = _placement_variance(positive, negative, p_clusters, value)
    variance += _placement_variance(-negative, -positive, n_clusters, value)
    if variance == 0:
        return clopper_pearson(value, min(effective_size(c) for c in (p_clusters, n_clusters)))
    half = float(stats.norm.ppf(0.5 + CONFIDENCE / 2)) * math.sqrt(variance)
    return Share(value, max(0.0, value - half), min(1.0, value + half))


def _placement_variance(of: Floats, among: Floats, clusters: Ints, mean: float) -> float:
    """Return the variance of the AUC that is due to one side's clusters.

    A score's placement is the share of the other side's scores below it, ties counted half.
    """
    ordered = np.sort(among)
    below, not_above = (np.searchsorted(ordered, of, side=s) for s in ("left", "right"))
    placements = (below + not_above) / (2 * len(ordered))
    _, cluster = np.unique(clusters, return_inverse=True)
    sums = np.bincount(cluster, placements - mean)
    if len(sums) < 2:
        return 0.25  # one cluster gives no estimate, so use the largest variance of a share
    return float(len(sums) / (len(sums) - 1) * (sums**2).sum() / len(of) ** 2)


@dataclass(frozen=True)
class MembershipRow:
    """One attack on one model at one level, with the ceilings of the guarantee.

    Ceilings are None without a claim. `above` means that a whole interval exceeds its ceiling (for
    a TPR, the ceiling at the upper end of its FPR). That does not contradict the claim, because
    members and others were divided once and may differ in other ways, but it needs an explanation.
    """

    level: str  # sample | example | document | admission | patient
    attack: str
    members: int
    others: int
    leakage: Share
    area: Share
    low_rates: tuple[LowRate, ...]
    leakage_ceiling: float | None = None
    area_ceiling: float | None = None
    low_rate_ceilings: tuple[float, ...] | None = None
    above: bool = False


def measure(
    level: str, attack: str, scored: Scored, threshold: float, ceiling: PrivacyProfile | None
) -> MembershipRow:
    """Return the metrics of an attack at one level.

    Args:
        level: the level of the scored samples or groups.
        attack: the attack's name.
        scored: the scores of members and non-members, neither empty.
        threshold: the attack's threshold, which must not be chosen on these scores.
        ceiling: privacy profile of the guarantee at this level; None without a claim.
    """
    rates = tuple(at_low_rate(scored, rate) for rate in LOW_RATES)
    members, others = int(scored.members.sum()), int((~scored.members).sum())
    row = MembershipRow(
        level, attack, members, others, leakage(scored, threshold), area(scored), rates
    )
    if ceiling is None or not ceiling.pairs:
        return row
    above = row.leakage.low > ceiling.leakage
    above |= any(rate.tpr.low > ceiling.true_positive_rate(rate.fpr.high) for rate in rates)
    return replace(
        row,
        leakage_ceiling=ceiling.leakage,
        area_ceiling=ceiling.area,
        low_rate_ceilings=tuple(ceiling.true_positive_rate(rate.asked) for rate in rates),
        above=above,
    )


# --- rarity


@dataclass(frozen=True)
class RarityBucket:
    """Groups with similar log-probability of their profiles, and the leakage among them."""

    log_probability: float  # mean, in nats
    members: int
    others: int
    leakage: float


def profile_log_probabilities(profiles: Sequence[frozenset[Hashable]]) -> Floats:
    """Return the log-probability of each profile, its codes taken as independent: (n,) in nats.

    ln p(c) = Σ_{c ∈ profile} ln p(c) + Σ_{c ∉ profile} ln(1 − p(c)), with p(c) the share of
    profiles that have the code (Jagannatha et al. 2021, appendix A.2, equations 4 and 5).
    """
    counts = Counter(code for profile in profiles for code in profile)
    n = len(profiles)
    # A code of all profiles is absent from none, so its second term, ln 0, never occurs.
    absent = {code: math.log1p(-count / n) if count < n else 0.0 for code, count in counts.items()}
    present = {code: math.log(count / n) - absent[code] for code, count in counts.items()}
    of_none = math.fsum(absent.values())
    return np.array([of_none + math.fsum(present[c] for c in profile) for profile in profiles])


def rarity_buckets(
    log_probabilities: Floats, scored: Scored, threshold: float
) -> tuple[RarityBucket, ...]:
    """Return PL by rarity: groups in buckets of equal width, by log-probability.

    Buckets with fewer than ten groups, or without one side, are left out. A minimum of ten groups
    on each side would leave out the rare profiles, which are the subject of the measurement.
    """
    edges = np.linspace(log_probabilities.min(), log_probabilities.max(), BUCKETS + 1)
    places = np.digitize(log_probabilities, edges[1:-1])
    buckets = []
    for place in np.unique(places):
        here = places == place
        members, declared = scored.members[here], scored.scores[here] > threshold
        if len(members) < LEAST_IN_BUCKET or members.all() or not members.any():
            continue
        buckets.append(
            RarityBucket(
                log_probability=float(log_probabilities[here].mean()),
                members=int(members.sum()),
                others=int((~members).sum()),
                leakage=float(declared[members].mean() - declared[~members].mean()),
            )
        )
    return tuple(buckets)
