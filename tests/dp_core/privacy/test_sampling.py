import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from dp_core.errors import BadInput
from dp_core.privacy.batch_selection import (
    FixedSizeSampler,
    PoissonSampler,
    ShuffledSampler,
    TruncatedPoissonSampler,
    UnitSampler,
    sampler_for,
)
from dp_core.privacy.execution_plan import (
    BatchPhase,
    ExecutionPlan,
    FixedSizeSampling,
    PoissonSampling,
    Sampling,
    ShuffledSampling,
    TruncatedPoissonSampling,
)
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit, ShuffledGaussian
from dp_core.privacy.seed_store import PrivacySeed

SEED = PrivacySeed.fixed("sampling")


def constant(rate: float) -> Callable[[int], float]:
    return lambda t: rate


def inclusion(sampler: UnitSampler, n_units: int, steps: int) -> NDArray[np.float64]:
    """Return [steps, n_units]: 1 where the unit took part."""
    taken = np.zeros((steps, n_units))
    for t in range(steps):
        batch = sampler.batch(t)
        assert np.all(np.diff(batch) > 0)
        taken[t, batch] = 1
    return taken


def plan(sampling: Sampling, batch: float, declared: int = 100, **more: Any) -> ExecutionPlan:
    return ExecutionPlan(
        unit=PrivacyUnit.PATIENT,
        declared_units=declared,
        sampling=sampling,
        clip_norm=1.0,
        noise_multiplier=1.0,
        schedule=more.pop("schedule", (BatchPhase(50, batch),)),
        delta=1e-6,
        **more,
    )


def is_rate(taken: NDArray[np.float64], rate: float) -> bool:
    """Test the number of inclusions against its binomial law."""
    return bool(stats.binomtest(int(taken.sum()), taken.size, rate).pvalue > 1e-4)


def has_binomial_sizes(taken: NDArray[np.float64], rate: float) -> bool:
    """Test the variance of the batch size against n·q·(1−q)."""
    steps, n = taken.shape
    statistic = (steps - 1) * np.var(taken.sum(axis=1), ddof=1) / (n * rate * (1 - rate))
    below = float(stats.chi2.cdf(statistic, steps - 1))
    return 1e-4 < below < 1 - 1e-4


def is_independent(a: NDArray[np.float64], b: NDArray[np.float64]) -> bool:
    """Test that no two columns of a and b correlate (Bonferroni over all pairs)."""
    za, zb = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
    r = za.T @ zb / len(za)
    limit = stats.norm.isf(1e-4 / r.size) / math.sqrt(len(za))
    return bool(np.max(np.abs(r)) < limit)


def off_diagonal(taken: NDArray[np.float64]) -> bool:
    half = taken.shape[1] // 2
    return is_independent(taken[:, :half], taken[:, half:])


@pytest.mark.statistical
@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_poisson_has_the_rate_and_the_variance_of_batch_size(rate: float) -> None:
    taken = inclusion(PoissonSampler(SEED, 2000, constant(rate)), 2000, 600)
    assert is_rate(taken, rate)
    assert has_binomial_sizes(taken, rate)
    assert not is_rate(taken, rate * 2 / 3)
    assert not is_rate(taken, rate * 3 / 2)


@pytest.mark.statistical
def test_poisson_units_are_independent_of_each_other_and_of_the_past() -> None:
    taken = inclusion(PoissonSampler(SEED, 40, constant(0.3)), 40, 8000)
    assert off_diagonal(taken)
    assert is_independent(taken[1:], taken[:-1])
    other = inclusion(PoissonSampler(PrivacySeed.fixed("other"), 40, constant(0.3)), 40, 8000)
    assert is_independent(taken, other)


@pytest.mark.statistical
def test_the_tests_see_samplers_that_are_not_poisson() -> None:
    fixed = inclusion(FixedSizeSampler(SEED, 40, 40, 12), 40, 8000)
    assert is_rate(fixed, 0.3)
    assert not has_binomial_sizes(fixed, 0.3)
    # one that takes units by pairs: right rate, dependent units
    halves = inclusion(PoissonSampler(SEED, 20, constant(0.3)), 20, 8000)
    assert not off_diagonal(np.concatenate([halves, halves], axis=1))


def test_poisson_at_rate_one_takes_everybody_and_with_no_units_nobody() -> None:
    assert list(PoissonSampler(SEED, 5, constant(1.0)).batch(0)) == [0, 1, 2, 3, 4]
    assert len(PoissonSampler(SEED, 0, constant(0.5)).batch(0)) == 0


def test_poisson_is_the_same_across_the_chunks_of_a_large_data_set() -> None:
    n = (1 << 20) + 1000
    batch = PoissonSampler(SEED, n, constant(0.01)).batch(3)
    assert np.array_equal(batch[batch < 5000], PoissonSampler(SEED, 5000, constant(0.01)).batch(3))
    assert abs(len(batch) - 0.01 * n) < 5 * math.sqrt(0.01 * n)
    assert batch[-1] >= 1 << 20


@pytest.mark.parametrize(
    "sampling",
    [
        PoissonSampling(),
        TruncatedPoissonSampling(12),
        FixedSizeSampling(10),
        ShuffledSampling(10),
    ],
)
def test_any_update_can_be_resumed_and_every_seed_differs(sampling: Sampling) -> None:
    here = plan(sampling, 10)
    onward = [sampler_for(here, SEED, 100).batch(t) for t in range(50)]
    for t in (49, 17, 0, 17):
        assert np.array_equal(sampler_for(here, SEED, 100).batch(t), onward[t])
    assert len({tuple(b) for b in onward}) == 50
    other = sampler_for(here, PrivacySeed.fixed("other"), 100)
    assert not any(np.array_equal(other.batch(t), onward[t]) for t in range(50))


def test_batches_do_not_change_between_releases() -> None:
    # A changed batch would make a resumed run another mechanism than the one it began as.
    digests = {}
    for sampling in (
        PoissonSampling(),
        TruncatedPoissonSampling(8),
        FixedSizeSampling(10),
        ShuffledSampling(10),
    ):
        sampler = sampler_for(plan(sampling, 10), SEED, 90)
        batches = np.concatenate([sampler.batch(t) for t in range(50)]).astype("<i8")
        digests[sampling.kind] = hashlib.sha256(batches.tobytes()).hexdigest()[:16]
    assert digests == {
        "poisson": "2d6c3602444d9b41",
        "truncated-poisson": "389d5f4f6ece5b9b",
        "fixed-size": "999c7f12d564fe09",
        "shuffled": "8ba1b2d215c7cf42",
    }


def test_the_sampler_follows_the_schedule_of_the_plan() -> None:
    here = plan(
        PoissonSampling(), 0, declared=4000, schedule=(BatchPhase(40, 100), BatchPhase(40, 800))
    )
    sizes = [len(sampler_for(here, SEED, 4000).batch(t)) for t in range(80)]
    assert abs(np.mean(sizes[:40]) - 100) < 5 * math.sqrt(100 / 40)
    assert abs(np.mean(sizes[40:]) - 800) < 5 * math.sqrt(800 / 40)
    event = here.event()
    assert isinstance(event, PoissonGaussian)
    assert [phase[0] for phase in event.phases] == [100 / 4000, 800 / 4000]


@pytest.mark.statistical
def test_the_rate_is_that_of_the_declared_number_not_of_the_true_one() -> None:
    for sampling in (PoissonSampling(), FixedSizeSampling(30), ShuffledSampling(30)):
        sampler = sampler_for(plan(sampling, 30, schedule=(BatchPhase(3000, 30),)), SEED, 60)
        taken = inclusion(sampler, 60, 3000)
        assert is_rate(taken, 0.3)


@pytest.mark.statistical
def test_truncation_is_a_uniform_choice_among_those_drawn() -> None:
    poisson = PoissonSampler(SEED, 60, constant(0.3))
    cut = TruncatedPoissonSampler(SEED, 60, constant(0.3), cap=15)
    stayed, drawn = np.zeros(60), np.zeros(60)
    for t in range(4000):
        before, after = poisson.batch(t), cut.batch(t)
        assert len(after) == min(15, len(before))
        assert np.all(np.diff(after) > 0)
        assert np.isin(after, before).all()
        if len(before) > 15:
            stayed[after] += 1
            drawn[before] += 1
    expected = drawn * stayed.sum() / drawn.sum()
    assert drawn.sum() > 10_000
    assert stats.chisquare(stayed, expected).pvalue > 1e-4
    # cutting off the highest indices, the usual mistake, would be seen
    biased = np.where(np.arange(60) < 30, drawn * 0.99, drawn * 0.71)
    assert stats.chisquare(biased * stayed.sum() / biased.sum(), expected).pvalue < 1e-9


@pytest.mark.statistical
def test_fixed_size_batches_are_uniform_subsets() -> None:
    sampler = FixedSizeSampler(SEED, 6, 6, 3)
    seen: dict[tuple[int, ...], int] = {}
    for t in range(4000):
        batch = tuple(int(i) for i in sampler.batch(t))
        seen[batch] = seen.get(batch, 0) + 1
    assert len(seen) == 20
    assert stats.chisquare(list(seen.values())).pvalue > 1e-4


@pytest.mark.statistical
def test_shuffled_epochs_are_uniform_permutations() -> None:
    sampler = ShuffledSampler(SEED, 4, 4, 1, per_epoch=4)
    seen: dict[tuple[int, ...], int] = {}
    for epoch in range(3000):
        order = tuple(int(sampler.batch(4 * epoch + place)[0]) for place in range(4))
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 24
    assert stats.chisquare(list(seen.values())).pvalue > 1e-4


def test_no_unit_takes_part_more_often_in_shuffled_epochs_than_is_accounted() -> None:
    here = plan(ShuffledSampling(30), 30, declared=100)
    sampler = sampler_for(here, SEED, 93)
    per_epoch = here.batches_per_epoch
    event = here.event()
    assert isinstance(event, ShuffledGaussian)
    took_part = np.zeros(93, int)
    for epoch in range(math.ceil(here.steps / per_epoch)):
        updates = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        dealt = np.concatenate([sampler.batch(t) for t in updates])
        assert len(np.unique(dealt)) == len(dealt)
        assert 83 <= len(dealt) <= 93  # 100 slots, 90 dealt, 7 empty
        took_part[dealt] += 1
    assert took_part.max() == event.participations


def test_more_units_than_declared_are_refused_without_saying_how_many() -> None:
    with pytest.raises(BadInput, match="declared") as caught:
        sampler_for(plan(PoissonSampling(), 10), SEED, 4321)
    assert "4321" not in str(caught.value)
    assert "100" in str(caught.value)


@pytest.mark.parametrize(
    "sampling",
    [
        PoissonSampling(),
        TruncatedPoissonSampling(30),
        FixedSizeSampling(10),
        ShuffledSampling(10),
    ],
)
def test_the_declared_bound_admits_as_many_units_and_not_one_more(sampling: Sampling) -> None:
    bounded = plan(sampling, 10, declared=100)
    sampler_for(bounded, SEED, 100).batch(0)
    with pytest.raises(BadInput, match="more units than declared"):
        sampler_for(bounded, SEED, 101)
