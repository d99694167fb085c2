"""One step of a mechanism against its definition: each direction, each weight, each order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from dp_core.privacy.accounting.pld import composed_plds
from dp_core.privacy.accounting.profiles import (
    HistogramProfile,
    SubsampledGaussian,
    TruncatedSubsampledGaussian,
)
from dp_core.privacy.mechanisms import (
    Gaussian,
    MechanismEvent,
    PoissonGaussian,
    ShuffledGaussian,
    ThresholdedHistogram,
    compose,
)

RATE, SIGMA = 0.3, 1.2


def without(x: float) -> float:
    return float(norm.pdf(x, 0, SIGMA))


def with_unit(x: float) -> float:
    return (1 - RATE) * without(x) + RATE * float(norm.pdf(x, 1, SIGMA))


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.25])
def test_adding_and_removing_a_unit_each_have_their_own_loss(epsilon: float) -> None:
    adding, removing = composed_plds(PoissonGaussian.single(RATE, SIGMA, 1).steps(), 1e-4)
    for side, p, q in ((adding, with_unit, without), (removing, without, with_unit)):
        excess = quad(
            lambda x, p=p, q=q: max(0.0, p(x) - math.exp(epsilon) * q(x)), -15, 15, limit=400
        )[0]
        assert excess * (1 - 1e-3) <= side.delta(epsilon) <= excess * 1.01 + 1e-7


@pytest.mark.parametrize(
    "event", [PoissonGaussian.single(0.01, 1.0, 100), ThresholdedHistogram(4, 8.0, 40)]
)
def test_no_direction_is_left_out(event: MechanismEvent) -> None:
    assert len(composed_plds(event.steps(), 1e-3)) == 2


@pytest.mark.parametrize("epsilon", [0.0, 0.2, 0.4])
def test_that_a_lone_word_was_not_released_speaks_against_its_unit(epsilon: float) -> None:
    """Without the unit its word is never there; with it, it is hidden with probability 1 − τ."""
    profile = HistogramProfile(1, 5.0, 2)
    with_unit, without_unit = (float(side[0]) for side in profile.directions([epsilon]))
    assert with_unit == pytest.approx(profile.tail)
    assert without_unit == pytest.approx(1 - math.exp(epsilon) * (1 - profile.tail))


def test_a_batch_that_is_full_without_the_unit_is_cut_with_it() -> None:
    """Of two others, one at least is drawn with probability 1 − (1 − q)²."""
    cut, at = 1 - (1 - RATE) ** 2, np.array([0.0, 0.3])
    plain = SubsampledGaussian(RATE, 1 / SIGMA).directions(at)
    replaced = SubsampledGaussian(RATE, 2 / SIGMA).directions(at)
    found = TruncatedSubsampledGaussian(3, 1, RATE, 1 / SIGMA).directions(at)
    for own, a, b in zip(found, plain, replaced, strict=True):
        np.testing.assert_allclose(own, (1 - cut) * a + cut * b)


def test_epochs_of_shuffled_batches_add_up_at_each_order() -> None:
    """A Gaussian mechanism has α/2σ², and each epoch is one."""
    curve = ShuffledGaussian(SIGMA, 5).rdp([2, 8])
    np.testing.assert_allclose(curve, [5 * 2 / (2 * SIGMA**2), 5 * 8 / (2 * SIGMA**2)])


def test_a_part_without_a_renyi_bound_leaves_none_for_the_whole() -> None:
    histogram, training = ThresholdedHistogram(4, 8.0, 40), Gaussian(2.0)
    assert training.rdp([2]) is not None
    assert compose(histogram, training).rdp([2]) is None
