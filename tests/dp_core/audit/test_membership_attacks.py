"""Tests of membership attacks against frozen outputs of other tools, and by brute force."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from dp_core.audit.membership_attacks import (
    attacks,
    best_threshold,
    confidence,
    learned,
    lira_offline,
    rmia,
)
from dp_core.audit.membership_scores import Losses, min_k

FROZEN = json.loads((Path(__file__).parent / "membership_oracles.json").read_text())


@pytest.mark.parametrize("a", ["0.0", "0.3", "1.0"])
def test_rmia_is_privacy_meters(a):
    frozen = FROZEN["privacy_meter"]
    references = [np.array(frozen[n])[:, None] for n in ("reference", "population_reference")]
    found = rmia(
        np.array(frozen["target"]),
        references[0],
        np.array(frozen["population_target"]),
        references[1],
        float(a),
    )
    assert found.tolist() == pytest.approx(frozen["scores"][a])


@pytest.mark.parametrize("share", ["0.2", "0.5"])
def test_min_k_is_mimirs(share):
    frozen = FROZEN["mimir"]
    logs = log_softmax(np.array(frozen["logits"]), axis=1)
    own = logs[np.arange(len(logs)), frozen["labels"]]
    mean = (np.exp(logs) * logs).sum(1)
    deviation = np.sqrt((np.exp(logs) * logs**2).sum(1) - mean**2)
    padded = [np.concatenate([v, [-99.0]])[None] for v in ((own - mean) / deviation, own)]
    weights = np.concatenate([np.ones(len(logs)), [0.0]])[None]
    found = [-float(min_k(values, weights, float(share))[0]) for values in padded]
    assert found == pytest.approx(frozen["min_k_plus_plus_and_min_k"][share])


def test_a_row_without_predictions_has_a_loss_of_zero():
    assert min_k(np.full((1, 4), 3.0), np.zeros((1, 4))).tolist() == [0.0]
    assert min_k(np.array([[3.0, 1.0, 2.0]]), np.array([[1.0, 0.0, 1.0]])).tolist() == [2.0]


def test_confidence_is_the_log_odds_of_a_rows_probability():
    p = np.array([0.2, 0.5, 0.999])
    assert confidence(-np.log(p)) == pytest.approx(np.log(p / (1 - p)))
    assert np.isfinite(confidence(np.array([0.0, 800.0]))).all()


def test_lira_ranks_as_the_normal_law_of_models_without_the_row():
    rng = np.random.default_rng(1)
    references = rng.normal(0, [[1.0], [3.0]], (2, 400))
    target = np.array([2.0, 3.0])
    by_row = lira_offline(target, references)
    expected = (target - references.mean(1)) / references.std(1, ddof=1)
    assert by_row == pytest.approx(expected)
    few = lira_offline(target, references[:, :3])
    assert few == pytest.approx(target - references[:, :3].mean(1))


def test_the_best_threshold_is_the_best_of_all():
    rng = np.random.default_rng(0)
    scores, members = rng.integers(0, 6, 30).astype(float), rng.random(30) < 0.5

    def advantage(t: float) -> float:
        above = scores > t
        return float(above[members].mean() - above[~members].mean())

    best = max(advantage(t) for t in scores)
    assert advantage(best_threshold(scores, members)) == pytest.approx(best)


def rows(n: int = 400) -> tuple[Losses, Losses, np.ndarray, np.ndarray]:
    """Return hard and easy rows; members have a slightly lower loss than the public model's."""
    rng = np.random.default_rng(3)
    members, fitted = np.arange(n) < n // 2, np.arange(n) % 5 == 0
    public = rng.gamma(3.0, 1.0, n) + 0.5
    own = public - 0.3 * members + rng.normal(0, 0.05, n)
    return Losses(own, own), Losses(public, public), members, fitted


def test_every_attack_scores_members_higher_and_calibration_beats_the_plain_loss():
    own, public, members, fitted = rows()
    features = {"gradients": np.stack([own.mean, public.mean], axis=1)}
    made = {a.name: a for a in attacks(own, [public], features, members, fitted)}
    assert set(made) == {"loss", "min-k", "reference", "rmia", "lira", "gradients"}
    found = {}
    for name, attack in made.items():
        declared = (attack.scores > attack.threshold)[attack.measured]
        truth = members[attack.measured]
        found[name] = declared[truth].mean() - declared[~truth].mean()
    assert found["loss"] > 0
    assert all(found[n] > found["loss"] + 0.5 for n in ("reference", "rmia", "gradients"))


def test_the_published_attack_declares_what_lies_below_the_mean_training_loss():
    own, _, members, fitted = rows()
    loss = attacks(own, [], {}, members, fitted)[0]
    mean = own.mean[members].mean()
    np.testing.assert_array_equal(loss.scores > loss.threshold, own.mean < mean)
    assert loss.measured.all()
    assert [a.name for a in attacks(own, [], {}, members, fitted)] == ["loss", "min-k"]


def test_measured_rows_are_never_fitted():
    own, public, members, fitted = rows()
    features = {"attention": np.stack([own.mean, public.mean], axis=1)}
    before = attacks(own, [public], features, members, fitted)
    flipped = np.where(fitted, members, ~members)
    after = attacks(own, [public], features, flipped, fitted)
    for one, other in zip(before[1:], after[1:], strict=True):
        assert one.threshold == other.threshold
        np.testing.assert_array_equal(one.scores, other.scores)
        np.testing.assert_array_equal(one.measured, ~fitted)


def test_regression_does_not_care_for_units_or_for_how_many_are_on_a_side():
    own, public, members, fitted = rows()
    features = np.stack([own.mean, public.mean], axis=1)
    plain = learned(features, members, fitted)
    assert learned(1e6 * features + 3, members, fitted) == pytest.approx(plain, abs=1e-3)
    fewer = fitted & ~(members & (np.arange(len(members)) % 2 == 0))
    assert abs(float(np.median(learned(features, members, fewer)))) < math.log(2)
