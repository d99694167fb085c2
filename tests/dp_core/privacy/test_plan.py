import dataclasses
import json
from typing import Any

import pytest

from dp_core.errors import BadInput, PlanError
from dp_core.privacy.batch_selection import (
    CyclicPoissonSampling,
    PoissonSampling,
    TruncatedPoissonSampling,
)
from dp_core.privacy.execution_plan import (
    AdaptiveClipping,
    BatchPhase,
    ExecutionPlan,
    growing_batches,
)
from dp_core.privacy.matrix_factorization import power_strategy
from dp_core.privacy.mechanisms import (
    FixedSizeGaussian,
    MechanismEvent,
    NeighboringRelation,
    PoissonGaussian,
    PrivacyUnit,
)
from dp_core.privacy.noise_addition import UpdateNoise
from dp_core.privacy.seed_store import PrivacySeed


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


@pytest.mark.parametrize(
    ("relation", "factor"),
    [
        (NeighboringRelation.ADD_REMOVE, 1),
        (NeighboringRelation.ZERO_OUT, 1),
        (NeighboringRelation.REPLACE, 2),
    ],
)
def test_the_clipper_knows_its_sensitivity(relation: NeighboringRelation, factor: int) -> None:
    clipper = plan().clipper()
    assert clipper.sensitivity(relation) == factor * 0.5
    clipper.clip_norm = 0.1  # as adaptive clipping would
    assert clipper.sensitivity(relation) == factor * 0.1


def test_noise_is_the_multiple_of_the_clip_norm_that_is_charged() -> None:
    p, seed = plan(), PrivacySeed.fixed(1)
    clipper = p.clipper()
    assert p.noise(seed, b"m", 3, clipper) == UpdateNoise(seed, b"m", 3, 1.2, 0.5)
    clipper.clip_norm = 0.1
    assert p.noise(seed, b"m", 3, clipper) == UpdateNoise(seed, b"m", 3, 1.2, 0.1)


class ReplaceOne(PoissonSampling):
    """A law whose guarantee is for neighbours that differ by the replacement of one unit."""

    def event(self, declared_units: int, phases: Any, unit: PrivacyUnit) -> MechanismEvent:
        return FixedSizeGaussian(declared_units, ((256, 1.2, 300),), unit=unit)


def test_noise_is_of_the_same_deviation_where_neighbours_replace_a_unit() -> None:
    """σ is in clip norms, whereas rounding is relative to the distance of neighbouring sums."""
    p = dataclasses.replace(plan(), sampling=ReplaceOne())
    noise = p.noise(PrivacySeed.fixed(1), b"m", 0, p.clipper())
    assert noise.clip_norm == 2 * 0.5
    assert noise.noise_multiplier * noise.clip_norm == 1.2 * 0.5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"expected_batch": 4001}, "declared units"),
        ({"expected_batch": 0}, "above 0"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": float("inf")}, "noise_multiplier"),
        ({"clip_norm": float("nan")}, "clip_norm"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1 / 4000}, "publishing one unit whole"),
        ({"steps": 0}, "schedule"),
        ({"examples_per_step": 0}, "examples_per_step"),
        ({"examples_per_step": 9, "max_examples_per_unit": 8}, "keeps 8"),
        ({"declared_units": 0}, "declared_units"),
        ({"clipping": "soft"}, "'soft' is not one of flat, automatic"),
        (
            {"clipping": "automatic", "adaptive": AdaptiveClipping(0.5, 5.0)},
            "no clip norm to learn",
        ),
    ],
    ids=str,
)
def test_inconsistent_plans_cannot_be_built(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        plan(**changes)


def test_growing_batches_go_by_equal_factors_and_then_stay() -> None:
    assert growing_batches(128, 1024, 24) == (
        BatchPhase(3, 128),
        BatchPhase(3, 256),
        BatchPhase(3, 512),
        BatchPhase(15, 1024),
    )
    assert sum(phase.steps for phase in growing_batches(1024, 4096, 80)) == 80
    with pytest.raises(BadInput, match="7 updates are too few"):
        growing_batches(1, 2, 7)


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
        {"clipping": "automatic"},
        {"examples_per_step": 2},
        {"max_examples_per_unit": 8},
    ]
    digests = {plan(**change).digest() for change in changes} | {base.digest()}
    digests.add(with_sampling(TruncatedPoissonSampling(300)).digest())
    digests.add(with_sampling(TruncatedPoissonSampling(301)).digest())
    cyclic = CyclicPoissonSampling(4)
    digests.add(with_sampling(cyclic).digest())
    digests.add(with_sampling(cyclic, strategy=power_strategy(4, 0.5)).digest())
    assert len(digests) == len(changes) + 5
    json.dumps(base.to_json())
