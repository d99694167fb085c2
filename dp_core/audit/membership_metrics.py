"""Accuracy of membership attacks, and the ceilings that the privacy guarantee sets for it.

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

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from dp_core.privacy.accounting import PrivacyProfile

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

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
    row = MembershipRow(
        level=level,
        attack=attack,
        members=int(scored.members.sum()),
        others=int((~scored.members).sum()),
        leakage=leakage(scored, threshold),
        area=area(scored),
        low_rates=rates,
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
    low, high = float(log_probabilities.min()), float(log_probabilities.max())
    width = (high - low) / BUCKETS
    places = np.zeros(len(log_probabilities), np.int64)
    if width > 0:
        places = np.minimum(((log_probabilities - low) / width).astype(np.int64), BUCKETS - 1)
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
