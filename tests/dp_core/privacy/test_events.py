import json
import math

import pytest

from dp_core.errors import BadInput
from dp_core.privacy.mechanisms import (
    Composed,
    FixedSizeGaussian,
    Gaussian,
    MechanismEvent,
    NeighboringRelation,
    PoissonGaussian,
    PrivacyUnit,
    ShuffledGaussian,
    ThresholdedHistogram,
    TruncatedPoissonGaussian,
    Unaccounted,
)

PATIENT = PrivacyUnit.PATIENT
EVENTS = [
    PoissonGaussian(((0.01, 1.0, 100), (0.02, 1.5, 50)), unit=PATIENT),
    TruncatedPoissonGaussian(1000, 30, ((0.01, 1.0, 100),)),
    FixedSizeGaussian(1000, ((10, 1.0, 100),), unit=PrivacyUnit.EXAMPLE),
    Gaussian(2.0, 3),
    ShuffledGaussian(1.0, 5),
    ThresholdedHistogram(256, 166.0, 1137, unit=PATIENT),
    Unaccounted("non-private training"),
    Composed((Gaussian(1.0, unit=PATIENT), Gaussian(2.0, unit=PATIENT)), unit=PATIENT),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: e.kind)
def test_json_round_trip(event: MechanismEvent) -> None:
    assert MechanismEvent.from_json(json.loads(json.dumps(event.to_json()))) == event


def test_stored_form_does_not_change() -> None:
    # The ledger holds years of these; changing a kind's fields needs a new version.
    assert EVENTS[0].to_json() == {
        "kind": "poisson_gaussian",
        "version": 1,
        "unit": "patient",
        "phases": [[0.01, 1.0, 100], [0.02, 1.5, 50]],
    }
    assert EVENTS[5].to_json() == {
        "kind": "thresholded_histogram",
        "version": 1,
        "unit": "patient",
        "words_per_unit": 256,
        "sigma": 166.0,
        "threshold": 1137,
        "mechanism": "set-counts",
        "noise": "discrete-gaussian",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "os.system"},
        {"version": 2},
        {"version": None},
        {"extra": 1},
        {"phases": [[0.5, 1.0]]},
        {"phases": []},
        {"phases": 5},
        {"phases": [[1.5, 1.0, 10]]},
        {"phases": [[0.5, 0.0, 10]]},
        {"phases": [[0.5, math.inf, 10]]},
        {"phases": [[0.5, 1.0, 0]]},
        {"unit": "hospital"},
    ],
    ids=str,
)
def test_what_is_not_known_is_refused(change: dict[str, object]) -> None:
    good = EVENTS[0].to_json()
    MechanismEvent.from_json(good)
    with pytest.raises(BadInput):
        MechanismEvent.from_json(good | change)


def test_a_missing_field_is_refused() -> None:
    data = EVENTS[0].to_json()
    del data["phases"]
    with pytest.raises(BadInput, match="phases"):
        MechanismEvent.from_json(data)


@pytest.mark.parametrize(
    "parts",
    [
        (Gaussian(1.0, unit=PATIENT), Gaussian(1.0, unit=PrivacyUnit.DOCUMENT)),
        (Gaussian(1.0), ShuffledGaussian(1.0, 1)),
        (Gaussian(1.0), FixedSizeGaussian(10, ((1, 1.0, 1),))),
        (),
    ],
)
def test_a_composition_of_unlike_events_cannot_be_built(parts: tuple[MechanismEvent, ...]) -> None:
    with pytest.raises(BadInput):
        Composed(parts, unit=parts[0].unit if parts else None)


def test_a_composition_cannot_hide_the_unit_of_its_parts() -> None:
    with pytest.raises(BadInput):
        Composed((Gaussian(1.0, unit=PATIENT),), unit=PrivacyUnit.EXAMPLE)


def test_each_event_names_its_neighbours() -> None:
    relations = {event.kind: event.relation for event in EVENTS}
    assert relations["poisson_gaussian"] is NeighboringRelation.ADD_REMOVE
    assert relations["truncated_poisson_gaussian"] is NeighboringRelation.ADD_REMOVE
    assert relations["thresholded_histogram"] is NeighboringRelation.ADD_REMOVE
    assert relations["fixed_size_gaussian"] is NeighboringRelation.REPLACE
    assert relations["shuffled_gaussian"] is NeighboringRelation.ZERO_OUT
