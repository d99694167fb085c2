"""What the tests and the pipeline, which runs where there is no pytest, both read."""

from __future__ import annotations

from dp_core.privacy.plan import BatchPhase, TrainingPlan
from dp_core.privacy.samplings import PoissonSampling, TruncatedPoissonSampling
from dp_core.training.recipe import Recipe

CONTINUATION = tuple(i > 5 and i % 3 == 0 for i in range(30))


def plans():
    poisson = TrainingPlan.poisson(
        unit="patient",
        declared_units=50,
        expected_batch=9,
        steps=5,
        noise_multiplier=1.0,
        clip_norm=1.0,
        delta=1e-4,
        examples_per_step=2,
    )
    more = {
        name: getattr(poisson, name)
        for name in ("unit", "declared_units", "clip_norm", "noise_multiplier", "delta")
    }
    truncated = TrainingPlan(
        sampling=TruncatedPoissonSampling(8),
        schedule=(BatchPhase(2, 4), BatchPhase(3, 9)),
        examples_per_step=2,
        **more,
    )
    assert poisson.sampling == PoissonSampling()
    return {"poisson": poisson, "truncated": truncated}


def recipe():
    return Recipe(9, 5, 0.01, examples_per_step=2, micro_rows=4, whole_words=True)
