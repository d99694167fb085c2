"""The script derives ε of every mechanism from the recorded events alone, by dp_accounting."""

import json
import math
from typing import Any

import pytest

from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.accounting.tradeoff import PrivacyProfile
from dp_core.privacy.check_evidence import (
    LEDGER,
    SHAPES,
    TOLERANCE,
    derive,
    misshapen,
    relation_of,
    understates,
)
from dp_core.privacy.mechanism_event import REGISTRY
from dp_core.privacy.mechanisms import (
    Composed,
    CyclicPoissonGaussian,
    FixedSizeGaussian,
    Gaussian,
    MechanismEvent,
    NoisedWeights,
    PhraseRounds,
    PoissonGaussian,
    RandomCountSelection,
    ShuffledGaussian,
    ThresholdedHistogram,
    TruncatedPoissonGaussian,
    compose,
)

DELTA = 1e-6
HISTOGRAM = ThresholdedHistogram(4, 6.0, 40)
WEIGHTS = NoisedWeights(64, (60_000, 40_000), ((0, 0, 2_000_000), (0, 1, 2_600_000)), largest=0.35)
SAMPLED = PoissonGaussian(((0.05, 1.5, 40), (0.1, 1.2, 10)))
CASES: list[MechanismEvent] = [
    SAMPLED,
    PoissonGaussian.single(0.01, 0.6, 50),
    CyclicPoissonGaussian(8, ((0.2, 3.0, 100),)),
    TruncatedPoissonGaussian(10_000, 560, ((0.05, 2.0, 30),)),
    FixedSizeGaussian(1000, ((20, 2.0, 30),)),
    Gaussian(3.0, 2),
    ShuffledGaussian(4.0, 3),
    HISTOGRAM,
    PhraseRounds((HISTOGRAM, HISTOGRAM), (2, 3)),
    WEIGHTS,
    NoisedWeights(8, (60_000,), ((0, 0, 2_400_000),)),
    RandomCountSelection(
        (Gaussian(6.0), Gaussian(9.0)), "truncated-negative-binomial", DELTA, eta=1.0, gamma=0.1
    ),
    RandomCountSelection((Gaussian(6.0),), "truncated-negative-binomial", DELTA, gamma=0.1),
    RandomCountSelection((Gaussian(6.0),), "poisson", DELTA, mean=8.0),
    compose(RandomCountSelection((Gaussian(6.0),), "poisson", DELTA, mean=8.0), WEIGHTS),
]


def _recorded(event: MechanismEvent) -> dict[str, Any]:
    return dict(json.loads(json.dumps(event.to_json())))


@pytest.mark.parametrize("event", CASES, ids=lambda e: f"{e.kind}-{CASES.index(e)}")
def test_another_library_derives_relation_and_no_larger_epsilon(event):
    delta = 2e-6 if isinstance(event, Composed) else DELTA
    claimed = epsilon_pld(event, delta)
    assert math.isfinite(claimed)
    derived = derive([_recorded(event)], delta)
    assert derived.epsilon is not None, derived.why_not
    assert not understates(claimed, derived.epsilon)
    assert derived.epsilon == pytest.approx(claimed, rel=TOLERANCE)
    assert all(part and theorem for part, theorem in derived.lines)
    recorded = _recorded(event)
    assert relation_of(recorded) == event.relation.value
    assert list(misshapen(recorded, SHAPES[LEDGER]["extracts"][0]["entries"][0]["event"], "")) == []


def test_words_state_the_noise_and_the_costliest_candidate():
    assert f"in all σ = {1 / WEIGHTS.mu:.4g} times a unit's norm" in WEIGHTS.describe()
    chosen = RandomCountSelection((Gaussian(9.0), Gaussian(6.0)), "poisson", DELTA, mean=8.0)
    assert "the costliest of them the Gaussian mechanism, 1 times, σ = 6;" in chosen.describe()


def test_parts_with_different_neighbours_have_no_relation():
    parts = [_recorded(Gaussian(2.0)), _recorded(ShuffledGaussian(2.0, 3))]
    with pytest.raises(ValueError, match="relations"):
        relation_of({"kind": "composed", "version": 1, "unit": None, "events": parts})


def test_histogram_that_gives_a_unit_away_more_often_than_delta_has_infinite_epsilon():
    event = ThresholdedHistogram(4, 6.0, 28)
    assert epsilon_pld(event, DELTA) == math.inf
    assert derive([_recorded(event)], DELTA).epsilon == math.inf


@pytest.mark.parametrize(("n", "sigma", "threshold"), [(5, 0.9, 8), (3, 0.6, 12), (16, 0.8, 9)])
def test_honest_histogram_of_little_noise_is_not_understated(n, sigma, threshold):
    event = ThresholdedHistogram(n, sigma, threshold)
    derived = derive([_recorded(event)], 1e-4)
    assert derived.epsilon == pytest.approx(epsilon_pld(event, 1e-4), rel=0.01)
    assert not understates(epsilon_pld(event, 1e-4), derived.epsilon)


def test_only_a_claim_below_the_derived_epsilon_is_understated():
    assert not understates(12.138, 11.646)
    assert understates(11.5, 11.646)
    assert understates(math.nan, 11.646)


def test_every_registered_mechanism_is_tested():
    assert {event.kind for event in CASES} == {kind for kind, _ in REGISTRY} - {"unaccounted"}


@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
@pytest.mark.parametrize("event", [SAMPLED, HISTOGRAM, WEIGHTS], ids=lambda e: e.kind)
def test_claim_for_more_noise_than_was_recorded_is_understated(event, factor):
    claimed, other = epsilon_pld(event, DELTA), _recorded(event)
    if "phases" in other:
        other["phases"] = [[q, factor * s, n] for q, s, n in other["phases"]]
    elif "sigma" in other:
        other["sigma"] *= factor
        other["threshold"] = round(other["threshold"] * factor)
    else:
        other["scales"] = [round(scale / factor) for scale in other["scales"]]
    derived = derive([other], DELTA)
    assert understates(claimed, derived.epsilon) == (factor < 1)


def test_ceilings_use_the_composed_distribution():
    profile = PrivacyProfile.of_event(compose(SAMPLED, Gaussian(3.0)))
    again = derive([_recorded(SAMPLED), _recorded(Gaussian(3.0))], DELTA, (0.001, 0.01))
    for rate, ceiling in again.ceilings.items():
        assert ceiling == pytest.approx(profile.true_positive_rate(rate), rel=1e-3)


@pytest.mark.parametrize(
    "event",
    [
        {"kind": "laplace", "version": 1, "unit": None, "scale": 1.0},
        {"kind": "poisson_gaussian", "version": 2, "unit": None, "phases": []},
        {"kind": "poisson_gaussian", "version": 1, "unit": None},
        {"kind": "gaussian", "version": 1, "unit": None, "noise_multiplier": "3", "count": 1},
        _recorded(
            RandomCountSelection(
                (PoissonGaussian.single(0.01, 0.7, 1), Gaussian(6.0)), "poisson", DELTA, mean=2.0
            )
        ),
    ],
    ids=["unknown", "newer", "incomplete", "false", "no worst candidate"],
)
def test_event_without_a_theorem_is_not_derived(event):
    again = derive([event], DELTA)
    assert again.epsilon is None and again.why_not
