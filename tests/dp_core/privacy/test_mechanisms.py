import itertools
import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from mechanism_examples import EXAMPLES, HISTOGRAM, PATIENT, POISSON, TRUTHS, Laplace, release

from dp_core.errors import BadInput
from dp_core.privacy import mechanisms
from dp_core.privacy.accounting.accountants import composed_profile, epsilon_pld, epsilon_rdp
from dp_core.privacy.mechanism_event import REGISTRY
from dp_core.privacy.statement import privacy_statement, total_epsilon


@pytest.fixture(autouse=True)
def laplace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, ("laplace", 1), Laplace)


def read_back(event: mechanisms.MechanismEvent) -> mechanisms.MechanismEvent:
    return mechanisms.MechanismEvent.from_json(json.loads(json.dumps(event.to_json())))


def every_part(event: mechanisms.MechanismEvent) -> Iterator[mechanisms.MechanismEvent]:
    yield event
    for part in event.parts:
        yield from every_part(part)


def test_every_kind_has_an_example():
    assert {event.kind for event in EXAMPLES} == {kind for kind, _ in REGISTRY}


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda e: e.kind)
class TestMechanism:
    """Conformance tests of one mechanism; add a new kind to `EXAMPLES` and `TRUTHS`."""

    def test_event_survives_a_round_trip_through_json(self, event):
        assert read_back(event) == event
        assert hash(read_back(event)) == hash(event)

    def test_a_unit_is_stated_in_every_part(self, event):
        stating = event.stating(mechanisms.PrivacyUnit.DOCUMENT)
        assert {part.unit for part in every_part(stating)} == {mechanisms.PrivacyUnit.DOCUMENT}
        assert read_back(stating) == stating
        assert epsilon_pld(stating, 1e-4) == epsilon_pld(event, 1e-4)

    def test_description_and_assumptions_are_stated(self, event):
        statement = privacy_statement([release("L-1", event, 1e-4)])
        assert event.title and event.describe() in statement.words
        assert bool(event.assumptions()) is not event.is_unaccounted
        assert set(event.assumptions()) <= set(statement.data["assumptions"])
        assert event.relation.describe("patient").startswith("one patient")

    def test_delta_falls_with_epsilon_and_each_is_the_others_bound(self, event):
        deltas = [composed_profile(event)(x) for x in (0.0, 0.5, 2.0, 8.0)]
        assert deltas == sorted(deltas, reverse=True)
        assert 0 <= deltas[-1] <= deltas[0] <= 1
        assert event.is_unaccounted == (deltas[-1] == 1)
        epsilon = epsilon_pld(event, 0.2)
        assert event.is_unaccounted == math.isinf(epsilon)
        if event.has_pld and math.isfinite(epsilon):
            assert composed_profile(event)(epsilon) <= 0.2 * (1 + 1e-3)

    def test_the_renyi_curve_lies_above_the_pld(self, event):
        orders = [2.0, 8.0, 64.0]
        curve, epsilon = event.rdp(orders), epsilon_rdp(event, 1e-4)
        assert (curve is None) == (epsilon is None)
        if curve is not None and epsilon is not None:
            assert np.all(curve > 0) and np.all(np.diff(curve) >= 0)  # rises with the order
            assert epsilon_pld(event, 1e-4) <= epsilon * (1 + 1e-9)

    def test_composition_with_itself_doubles_the_renyi_curve(self, event):
        twice, curve = mechanisms.compose(event, event), event.rdp([4.0])
        assert twice.relation is event.relation
        if curve is not None:
            assert twice.rdp([4.0]) == pytest.approx(2 * curve)
        rho, coin = event.approximate_rdp(4.0, 1e-4)
        if math.isfinite(rho):
            both = twice.approximate_rdp(4.0, 2e-4)
            assert both == pytest.approx((2 * rho, 2 * coin), rel=1e-9)
        if event.has_pld and not event.is_unaccounted:
            again = epsilon_pld(twice, 0.1)
            assert epsilon_pld(event, 0.1) <= again <= 2 * epsilon_pld(event, 0.05) * (1 + 1e-3)


@pytest.mark.parametrize(("event", "truth", "slack"), TRUTHS)
@pytest.mark.parametrize("epsilon", [0.3, 1.0, 2.0])
def test_the_claim_lies_above_what_brute_force_finds(event, truth, slack, epsilon):
    exact, claimed = truth(epsilon), composed_profile(event)(epsilon)
    assert exact * (1 - 1e-6) - 1e-15 <= claimed <= exact * slack + 1e-6


ONE, SHUFFLED = mechanisms.Gaussian(1.0), mechanisms.ShuffledGaussian(1.0, 1)
IMPOSSIBLE = {
    mechanisms.PoissonGaussian: [((),), (((0.5, 1.0),),)],
    mechanisms.PoissonGaussian.single: [
        (1.5, 1.0, 10), (0.0, 1.0, 10), (0.5, 0.0, 10), (0.5, math.inf, 10), (0.5, 1.0, 0),
    ],
    mechanisms.TruncatedPoissonGaussian: [(0, 1, ((0.5, 1.0, 1),)), (10, 0, ((0.5, 1.0, 1),))],
    mechanisms.CyclicPoissonGaussian: [
        (0, ((0.5, 1.0, 1),)), (1.5, ((0.5, 1.0, 1),)), (2, ((1.5, 1.0, 1),)),
    ],
    mechanisms.FixedSizeGaussian: [
        (0, ((1, 1.0, 1),)), (10, ((11, 1.0, 1),)), (10, ((1.5, 1.0, 1),)),
    ],
    mechanisms.Gaussian: [(0.0,), (1.0, 0)],
    mechanisms.ShuffledGaussian: [(math.nan, 1)],
    mechanisms.ThresholdedHistogram: [(0, 1.0, 1), (1, 0.0, 1), (1, 1.0, 0), (1, 1.0, 1.5)],
    partial(mechanisms.RandomCountSelection, mean=1.0): [
        ((), "poisson", 1e-6), ((ONE, POISSON), "poisson", 1e-6), ((ONE,), "fixed", 1e-6),
    ],
    Laplace: [(0.0,)],
    mechanisms.Composed: [
        ((),), ((ONE, SHUFFLED),), ((ONE, mechanisms.FixedSizeGaussian(10, ((1, 1.0, 1),))),),
    ],
    partial(mechanisms.Composed, unit=PATIENT): [((POISSON, ONE),)],
    # hides the unit of its parts
    partial(mechanisms.Composed, unit=mechanisms.PrivacyUnit.EXAMPLE): [((POISSON,),)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "arguments"), [(make, case) for make, every in IMPOSSIBLE.items() for case in every]
)
def test_impossible_parameters_are_refused(make, arguments):
    with pytest.raises(BadInput):
        make(*arguments)


CHANGES = json.loads((Path(__file__).parent / "unknown_events.json").read_text())


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_unknown_kinds_versions_and_fields_are_refused(change):
    with pytest.raises(BadInput):
        mechanisms.MechanismEvent.from_json(POISSON.to_json() | change)


def test_a_missing_field_is_refused():
    data = mechanisms.Unaccounted("x").to_json()
    del data["reason"]
    with pytest.raises(BadInput, match="reason"):
        mechanisms.MechanismEvent.from_json(data)


def test_each_kind_has_its_neighbours():
    relations = {event.kind: event.relation for event in EXAMPLES if not event.parts}
    assert relations.pop("fixed_size_gaussian") is mechanisms.NeighboringRelation.REPLACE
    assert relations.pop("shuffled_gaussian") is mechanisms.NeighboringRelation.ZERO_OUT
    assert set(relations.values()) == {mechanisms.NeighboringRelation.ADD_REMOVE}


def test_one_charge_covers_several_models_only_where_every_iterate_is_released():
    """A composite covers all iterates if its parts do; a selection releases only the best one."""
    covering = {event.kind for event in EXAMPLES if not event.parts and event.covers_every_iterate}
    assert covering == {
        "poisson_gaussian", "truncated_poisson_gaussian", "cyclic_poisson_gaussian",
        "fixed_size_gaussian", "gaussian", "shuffled_gaussian",
    }  # fmt: skip
    assert mechanisms.compose(POISSON, POISSON).covers_every_iterate
    assert not mechanisms.compose(POISSON, HISTOGRAM).covers_every_iterate
    selections = [event for event in EXAMPLES if isinstance(event, mechanisms.RandomCountSelection)]
    assert any(all(event.covers_every_iterate for event in s.candidates) for s in selections)
    assert not any(selection.covers_every_iterate for selection in selections)


def test_examples_of_different_kinds_do_not_compose():
    kinds = ("64 words", "256 words", "one labelled sentence", "one labelled text")
    unlike = [POISSON.stating(mechanisms.PrivacyUnit.EXAMPLE, kind) for kind in kinds]
    for one, other in itertools.combinations(unlike, 2):
        with pytest.raises(BadInput, match=rf"example of {one.example}.*of {other.example}"):
            mechanisms.compose(one, other)
        assert total_epsilon([one, other], 1e-6) is None
    both = mechanisms.compose(short := unlike[0], short)
    assert both.protects == short.protects
    assert mechanisms.MechanismEvent.from_json(both.to_json()) == both
    assert {part.example for part in both.parts} == {"64 words"}
    assert "example" not in POISSON.to_json()
    for wrong in (64, True, "0 words", "64", "64 words\n", "one **labelled text**"):
        with pytest.raises(BadInput):
            mechanisms.MechanismEvent.from_json(short.to_json() | {"example": wrong})
