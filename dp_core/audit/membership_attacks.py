"""Membership attacks, which turn observations of rows into scores, higher for likely members.

`loss` is S-BBA. Its mean over a document, an admission or a patient is A-BBA and P-BBA. `attention`
and `gradients` are S-AWBA and S-GWBA (Jagannatha et al. 2021, section 4.1). The other attacks
compare with a reference model that never saw the members: the public model of the same run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dp_core.audit.membership_scores import Losses

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

OFFLINE_A = tuple(float(a) for a in np.linspace(0, 1, 11))  # values of RMIA's a to choose from
LEAST_FOR_VARIANCES = 64  # number of references from which each row has a separate variance
_LEAST_LOSS = 1e-12


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
    found: Losses,
    references: list[Losses],
    features: dict[str, Floats],
    members: Flags,
    fitted: Flags,
) -> list[Attack]:
    """Return every attack that the observations allow.

    Args:
        found: losses of the attacked model.
        references: losses of models that never saw the members; may be empty.
        features: name -> (n, F) features for attacks that are fitted.
        members: (n,) whether each row is a member.
        fitted: (n,) rows on which thresholds and regressions are fitted. Only `loss` measures
            them, because its threshold is a published quantity.
    """
    measured = ~fitted
    made = [Attack("loss", -found.mean, -float(found.mean[members].mean()), np.ones_like(members))]
    scores = {"min-k": -found.lowest}
    if references:
        means = np.stack([reference.mean for reference in references], axis=1)  # (n, k)
        scores["reference"] = means.mean(1) - found.mean
        scores["rmia"] = _tuned_rmia(np.exp(-found.mean), np.exp(-means), members, fitted)
        scores["lira"] = lira_offline(confidence(found.mean), confidence(means))
    for name, values in scores.items():
        threshold = best_threshold(values[fitted], members[fitted])
        made.append(Attack(name, values, threshold, measured))
    for name, seen in features.items():
        made.append(Attack(name, learned(seen, members, fitted), 0.0, measured))
    return made


def best_threshold(scores: Floats, members: Flags) -> float:
    """Return the threshold with the largest TPR − FPR."""
    candidates = np.unique(scores)
    own, others = np.sort(scores[members]), np.sort(scores[~members])
    above = 1 - np.searchsorted(own, candidates, side="right") / len(own)
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
    z = fitted & ~members
    every = [rmia(target, references, target[z], references[z], a) for a in OFFLINE_A]
    best = max(every, key=lambda scores: float(roc_auc_score(members[fitted], scores[fitted])))
    return best


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
    model = make_pipeline(
        StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=5000)
    )
    model.fit(features[fitted], members[fitted])
    odds: Floats = model.decision_function(features)
    return odds
