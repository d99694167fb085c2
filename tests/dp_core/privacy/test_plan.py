import dataclasses
import json
from typing import Any

import pytest

from dp_core.errors import PlanError
from dp_core.privacy.execution_plan import (
    BatchPhase,
    ExecutionPlan,
    FixedSizeSampling,
    ShuffledSampling,
    TruncatedPoissonSampling,
)
from dp_core.privacy.mechanisms import (
    FixedSizeGaussian,
    NeighboringRelation,
    PoissonGaussian,
    PrivacyUnit,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
)


def plan(**changes: Any) -> ExecutionPlan:
    usual: dict[str, Any] = {
        "unit": PrivacyUnit.PATIENT,
        "declared_units": 4000,
        "expected_batch": 256,
        "steps": 300,
        "noise_multiplier": 1.2,
        "clip_norm": 0.5,
        "delta": 1e-6,
    }
    return ExecutionPlan.poisson(**(usual | changes))


def with_sampling(sampling: Any, batch: float = 256, **changes: Any) -> ExecutionPlan:
    return dataclasses.replace(
        plan(), sampling=sampling, schedule=(BatchPhase(300, batch),), **changes
    )


def test_execution_and_event_agree() -> None:
    p = plan()
    event = p.event()
    assert isinstance(event, PoissonGaussian)
    assert event.phases == ((p.sampling_rate(0), p.noise_multiplier, p.steps),)
    assert p.sampling_rate(0) == 256 / 4000
    assert p.expected_batch(299) == 256
    assert event.unit is PrivacyUnit.PATIENT


def test_a_schedule_is_executed_and_accounted_phase_by_phase() -> None:
    p = dataclasses.replace(
        plan(), schedule=(BatchPhase(10, 100), BatchPhase(5, 200), BatchPhase(1, 400))
    )
    rates = [p.sampling_rate(t) for t in range(p.steps)]
    assert rates == [100 / 4000] * 10 + [200 / 4000] * 5 + [400 / 4000]
    event = p.event()
    assert isinstance(event, PoissonGaussian)
    assert [(rate, steps) for rate, _, steps in event.phases] == [
        (100 / 4000, 10),
        (200 / 4000, 5),
        (400 / 4000, 1),
    ]
    for outside in (-1, p.steps):
        with pytest.raises(IndexError):
            p.expected_batch(outside)


def test_noise_per_draw_adds_up_to_the_effective_noise() -> None:
    once = plan(shards=8, accumulation=4)
    each = plan(shards=8, accumulation=4, noise_placement="per-draw")
    assert (once.noise_draws(), once.noise_multiplier_per_draw()) == (1, 1.2)
    assert each.noise_draws() == 32
    assert each.noise_draws() * each.noise_multiplier_per_draw() ** 2 == pytest.approx(1.2**2)
    assert once.event() == each.event()


def test_per_shard_noise_counted_once_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(PlanError, match=r"32 draws .* σ=6\.78823"):
        plan(
            shards=8,
            accumulation=4,
            noise_placement="per-draw",
            noise_multiplier_per_draw_stated=1.2,
        )
    plan(
        shards=8,
        accumulation=4,
        noise_placement="per-draw",
        noise_multiplier_per_draw_stated=1.2 / 32**0.5,
    )


@pytest.mark.parametrize("sampling", [ShuffledSampling(256), FixedSizeSampling(256)])
def test_a_poisson_epsilon_for_other_batches_is_refused(sampling: Any) -> None:
    with_sampling(sampling)
    with pytest.raises(PlanError, match="does not hold"):
        with_sampling(sampling, amplification="poisson")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"denominator": "realised"}, "expected batch"),
        ({"expected_batch": 4001}, "declared units"),
        ({"expected_batch": 0}, "above 0"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": float("inf")}, "noise_multiplier"),
        ({"clip_norm": float("nan")}, "clip_norm"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1 / 4000}, "publishing one unit whole"),
        ({"steps": 0}, "schedule"),
        ({"shards": 0}, "shards"),
        ({"accumulation": 0}, "accumulation"),
        ({"examples_per_step": 0}, "examples_per_step"),
        ({"examples_per_step": 9, "max_examples_per_unit": 8}, "keeps 8"),
        ({"noise_placement": "per-shard"}, "placement"),
        ({"declared_units": 0}, "declared_units"),
        ({"amplification": "shuffled"}, "does not hold"),
    ],
    ids=str,
)
def test_inconsistent_plans_cannot_be_built(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        plan(**changes)


def test_batch_and_schedule_must_agree() -> None:
    with pytest.raises(PlanError, match="schedule says 100"):
        with_sampling(FixedSizeSampling(256), batch=100)
    with pytest.raises(PlanError, match="schedule says 100"):
        with_sampling(ShuffledSampling(256), batch=100)
    with pytest.raises(PlanError, match="below 1"):
        TruncatedPoissonSampling(0)


def test_other_samplings_get_the_event_that_is_proven_for_them() -> None:
    truncated = with_sampling(TruncatedPoissonSampling(300))
    assert truncated.event() == TruncatedPoissonGaussian(
        4000, 300, ((256 / 4000, 1.2, 300),), unit=PrivacyUnit.PATIENT
    )
    fixed = with_sampling(FixedSizeSampling(256))
    assert fixed.event() == FixedSizeGaussian(4000, ((256, 1.2, 300),), unit=PrivacyUnit.PATIENT)
    assert fixed.relation is NeighboringRelation.REPLACE
    assert fixed.needs_exact_units
    assert not truncated.needs_exact_units


def test_shuffled_epochs_count_every_epoch_that_begins() -> None:
    # 4000 // 256 = 15 whole batches an epoch; 300 updates are 20 epochs, 301 begin the 21st.
    shuffled = with_sampling(ShuffledSampling(256))
    assert shuffled.batches_per_epoch == 15
    assert shuffled.event() == ShuffledGaussian(1.2, 20, unit=PrivacyUnit.PATIENT)
    longer = dataclasses.replace(shuffled, schedule=(BatchPhase(301, 256),))
    assert longer.event() == ShuffledGaussian(1.2, 21, unit=PrivacyUnit.PATIENT)


def test_the_digest_knows_every_field() -> None:
    base = plan()
    assert plan().digest() == base.digest()
    changes: list[dict[str, Any]] = [
        {"unit": PrivacyUnit.DOCUMENT},
        {"declared_units": 4001},
        {"expected_batch": 255},
        {"steps": 301},
        {"noise_multiplier": 1.3},
        {"clip_norm": 0.6},
        {"delta": 2e-6},
        {"shards": 2},
        {"accumulation": 2},
        {"noise_placement": "per-draw"},
        {"examples_per_step": 2},
        {"max_examples_per_unit": 8},
    ]
    digests = {plan(**change).digest() for change in changes} | {base.digest()}
    digests.add(with_sampling(TruncatedPoissonSampling(300)).digest())
    digests.add(with_sampling(TruncatedPoissonSampling(301)).digest())
    assert len(digests) == len(changes) + 3
    json.dumps(base.to_json())
