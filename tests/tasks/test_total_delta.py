"""The total δ of a claim stays below one over the units, in settings, specs and plans."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError
from release_examples import bench_of, record
from test_plans import PRIVATE, steps_of

from dp_core.config.privacy import refuse_large_delta
from dp_core.errors import PlanError
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit
from dp_core.privacy.statement import Release, privacy_statement
from dp_core.vocabulary.selection_calibration import calibrate
from tasks.protocol import BudgetSpec, JobSettings, ReleaseRecord, SweepSettings, VocabularySpec
from tasks.protocol.job import budget_of_run
from tasks.releases.plans import planned_release, refuse_large_deltas
from tasks.runtime.deployment import Deployment
from tasks.steps import budget_step as budget

LABELS = {
    "entities_format": "i2b2", "entities_train": "/a", "entities_test": "/b",
    "finetune_privacy": "dp", "entity_types": "problem", "entities_declared_units": 400,
    "entities_unit": "patient",
}  # fmt: skip
TOO_MUCH: list[dict[str, Any]] = [
    {"vocabulary_delta": 0.01, "declared_units": 50_000},
    {"vocabulary_delta": 0.9e-4, "delta": 0.9e-4},  # each below 1/6000, but not both together
    # charged to the same data set
    {**LABELS, "entities_patients": "/p.csv", "delta": 1e-4, "finetune_delta": 1e-4},
]


@pytest.mark.parametrize("wrong", TOO_MUCH)
def test_settings_with_a_too_large_total_delta_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="publishing one unit whole"):
        JobSettings.model_validate(PRIVATE | wrong)


def test_default_deltas_are_accepted() -> None:
    JobSettings.model_validate(PRIVATE | LABELS | {"entities_patients": "/l/patients.csv"})
    SweepSettings.model_validate(PRIVATE)


def test_total_delta_counts_all_points_of_a_sweep() -> None:
    twelve = PRIVATE | {"delta": 2e-5}
    JobSettings.model_validate(twelve)
    with pytest.raises(ValidationError, match="12 models"):
        SweepSettings.model_validate(twelve)
    SweepSettings.model_validate(twelve | {"selection": "random-count"})  # one model is released


def test_settings_never_underestimate_the_charged_delta() -> None:
    settings = JobSettings.model_validate(PRIVATE)
    charged = planned_release(steps_of()["vocabulary"]).delta
    assert charged <= settings.vocabulary_delta <= charged * 1.02


EVENT = PoissonGaussian.single(0.01, 1.0, 10, unit=PrivacyUnit.PATIENT)


def released(dataset: str, delta: float) -> ReleaseRecord:
    return record("1", EVENT, dataset, delta=delta, declared_units=6000)


def of_delta(spec: VocabularySpec, delta: float) -> VocabularySpec:
    config = spec.config.model_copy(update={"vocabulary_delta": delta})
    return spec.model_copy(update={"config": config})


def test_spec_with_a_too_large_delta_is_refused_by_its_step() -> None:
    vocabulary = steps_of()["vocabulary"]
    for delta, relation in ((0.01, "add-or-remove-one"), (1e-4, "replace-one")):
        spec = of_delta(vocabulary, delta).model_copy(update={"relation": relation})
        with pytest.raises(PlanError, match="1/6000"):
            planned_release(spec)
    training = planned_release(steps_of(delta=1e-4)["dp_pretraining"])
    refuse_large_deltas([training], [released("notes", 1e-5)])
    refuse_large_deltas([training], [released("others", 1e-4)])
    # the same entry, listed repeatedly
    refuse_large_deltas([training], [released("notes", 1e-5)] * 20)
    with pytest.raises(PlanError, match="δ of the data set notes"):
        refuse_large_deltas([training], [released("notes", 1e-4)])


def test_run_with_a_too_large_delta_is_not_registered(deployment: Deployment) -> None:
    Ledger.open(deployment.ledger).register_dataset("notes", PrivacyUnit.PATIENT, 20.0, 1e-3)
    steps = steps_of(delta=1e-4)
    vocabulary = steps["vocabulary"]
    assert isinstance(vocabulary, VocabularySpec)
    spec = steps["budget"]
    assert isinstance(spec, BudgetSpec)
    large = of_delta(vocabulary, 1e-4)
    spec = spec.model_copy(update={"charged": (large, *spec.charged[1:])})
    with pytest.raises(PlanError, match="1/6000"):
        budget.run(spec, bench_of(deployment))
    assert not Ledger.open(deployment.ledger).history("notes")


def test_registration_of_a_sweep_counts_the_delta_of_every_point(deployment: Deployment) -> None:
    Ledger.open(deployment.ledger).register_dataset("notes", PrivacyUnit.PATIENT, 20.0, 1e-3)
    small = SweepSettings.model_validate(PRIVATE)
    spec = budget_of_run(small)
    assert len(spec.charged) == 13
    first, *points = spec.charged
    large = [
        p.model_copy(update={"plan": p.plan.model_copy(update={"delta": 2e-5})}) for p in points
    ]  # type: ignore[union-attr]
    spec = spec.model_copy(update={"charged": (first, *large)})
    with pytest.raises(PlanError, match="in total"):
        budget.run(spec, bench_of(deployment))


def test_statement_makes_no_claim_at_a_delta_above_one_over_units() -> None:
    for units, private in ((0, True), (900, True), (1100, False)):
        release = Release("notes", PrivacyUnit.PATIENT, EVENT, 1e-3, "1", declared_units=units)
        statement = privacy_statement([release])
        assert statement.data["private"] is private
        assert ("No claim is made" in statement.words) is not private
        assert ("differentially private**" in statement.words) is private


def test_vocabulary_calibration_checks_delta_against_units() -> None:
    with pytest.raises(PlanError, match="1/50000"):
        calibrate(2.0, 1e-3, 16, declared_units=50_000)


@pytest.mark.parametrize("delta", [0.0, -1e-6, math.nan, math.inf])
def test_invalid_delta_is_refused(delta: float) -> None:
    with pytest.raises(PlanError):
        refuse_large_delta([delta], 100, "δ")
