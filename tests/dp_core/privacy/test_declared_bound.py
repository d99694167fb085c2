"""The declared number of units is a bound: it may be reached, and not passed by one."""

from __future__ import annotations

import pytest

from dp_core.data.privacy_units import Unit
from dp_core.errors import BadInput
from dp_core.privacy.batch_selection import sampler_for
from dp_core.privacy.execution_plan import (
    BatchPhase,
    ExecutionPlan,
    FixedSizeSampling,
    PoissonSampling,
    Sampling,
    ShuffledSampling,
    TruncatedPoissonSampling,
)
from dp_core.privacy.mechanisms import PrivacyUnit
from dp_core.privacy.seed_store import PrivacySeed
from dp_core.vocabulary.dp_histogram import set_counts

SEED = PrivacySeed.fixed("declared bound")
DECLARED = 20


@pytest.mark.parametrize(
    "sampling",
    [PoissonSampling(), TruncatedPoissonSampling(6), FixedSizeSampling(5), ShuffledSampling(5)],
    ids=lambda sampling: sampling.kind,
)
def test_a_sampler_draws_from_no_more_units_than_declared(sampling: Sampling) -> None:
    plan = ExecutionPlan(
        unit=PrivacyUnit.PATIENT,
        declared_units=DECLARED,
        sampling=sampling,
        clip_norm=1.0,
        noise_multiplier=1.0,
        schedule=(BatchPhase(50, 5),),
        delta=1e-6,
    )
    assert sampler_for(plan, SEED, DECLARED).batch(0).max() < DECLARED
    for more in (DECLARED + 1, 2 * DECLARED):
        with pytest.raises(BadInput, match="more units than declared"):
            sampler_for(plan, SEED, more)


def test_a_histogram_counts_no_more_units_than_declared() -> None:
    units = [Unit(str(number), ["pain"]) for number in range(DECLARED + 1)]
    assert set_counts(units[:-1], 1, b"k", declared_units=DECLARED) == {"pain": DECLARED}
    with pytest.raises(BadInput, match="more units than the declared bound"):
        set_counts(units, 1, b"k", declared_units=DECLARED)
