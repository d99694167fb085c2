"""Conversion of guarantees to other neighbours, against direct computation on small mechanisms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from dp_core.errors import BadInput
from dp_core.privacy.accounting.pld import epsilon_pld
from dp_core.privacy.accounting.profiles import EpsilonDelta
from dp_core.privacy.accounting.rdp import epsilon_rdp
from dp_core.privacy.mechanism_event import replace_one
from dp_core.privacy.mechanisms import (
    ConvertedRelation,
    FixedSizeGaussian,
    MechanismEvent,
    NeighboringRelation,
    ShuffledGaussian,
    ThresholdedHistogram,
    TruncatedPoissonGaussian,
    compose,
    under,
)

HISTOGRAM = ThresholdedHistogram(words_per_unit=64, sigma=80.0, threshold=600)


def converted(event: MechanismEvent, relation: NeighboringRelation) -> MechanismEvent:
    found = under(event, relation, 1e-6)
    assert found is not None
    return found


def test_zero_out_has_the_same_epsilon_and_composes_with_shuffled_training() -> None:
    vocabulary, shuffled = (
        converted(HISTOGRAM, NeighboringRelation.ZERO_OUT),
        ShuffledGaussian(2.0, 10),
    )
    assert epsilon_pld(vocabulary, 1e-6) == epsilon_pld(HISTOGRAM, 1e-6)
    total = compose(vocabulary, shuffled)
    assert total.relation is NeighboringRelation.ZERO_OUT
    assert epsilon_pld(shuffled, 2e-6) < epsilon_pld(total, 2e-6)
    with pytest.raises(BadInput, match="does not compose"):
        compose(HISTOGRAM, shuffled)


def test_an_empty_unit_that_takes_a_place_is_not_restated_as_zero_out() -> None:
    cut = TruncatedPoissonGaussian(1000, 20, ((0.01, 1.0, 5),))
    assert under(cut, NeighboringRelation.ZERO_OUT, 1e-6) is None
    assert under(ShuffledGaussian(1.0, 1), NeighboringRelation.ADD_REMOVE, 1e-6) is None
    assert (
        under(FixedSizeGaussian(10, ((2, 1.0, 3),)), NeighboringRelation.ADD_REMOVE, 1e-6) is None
    )
    with pytest.raises(BadInput):
        ConvertedRelation(cut, NeighboringRelation.ZERO_OUT)


def test_replace_one_is_twice_epsilon_at_a_larger_delta() -> None:
    own = epsilon_pld(HISTOGRAM, 1e-6)
    vocabulary = converted(HISTOGRAM, NeighboringRelation.REPLACE)
    delta = vocabulary.stated_delta(1e-6)
    assert delta == pytest.approx((1 + math.exp(own)) * 1e-6, rel=1e-4)
    assert epsilon_pld(vocabulary, delta) == pytest.approx(2 * own, rel=1e-3)
    assert epsilon_rdp(vocabulary, delta) is None
    assert epsilon_pld(vocabulary, 1e-6) == math.inf  # below the converted δ
    training = FixedSizeGaussian(1000, ((100, 2.0, 100),))
    total = epsilon_pld(compose(vocabulary, training), delta + 1e-6)
    assert total <= (2 * own + epsilon_pld(training, 1e-6)) * 1.001


def test_replace_one_holds_where_it_can_be_computed_directly() -> None:
    """Add-or-remove moves the sum in Gaussian noise by 1, replace-one by up to 2."""
    for mu, epsilon in itertools.product((0.3, 1.0, 2.0), (0.1, 0.7, 2.0)):

        def delta_at(shift: float, e: float) -> float:
            return float(
                norm.cdf(shift / 2 - e / shift) - math.exp(e) * norm.cdf(-shift / 2 - e / shift)
            )

        doubled, grown = replace_one(epsilon, delta_at(mu, epsilon))
        assert delta_at(2 * mu, doubled) <= grown


def test_epsilon_delta_profile_equals_profile_of_leaky_randomised_response() -> None:
    epsilon, delta = 0.8, 0.01
    p = np.array(
        [delta, 0, *(1 - delta) * np.array([1, math.exp(-epsilon)]) / (1 + math.exp(-epsilon))]
    )
    q = np.array([0, delta, p[3], p[2]])
    for x in (0.0, 0.2, 0.79, 0.8, 1.5):
        direct = float(np.maximum(0.0, p - math.exp(x) * q).sum())
        there, back = EpsilonDelta(epsilon, delta).directions(np.array([x]))
        assert there[0] == back[0] == pytest.approx(direct, rel=1e-12)
