import hashlib
import math
from typing import Any

import numpy as np
import pytest
from mechanism_examples import plan_of
from numpy.typing import NDArray
from scipy import stats

from dp_core.errors import PlanError, PrivateTextRefusal
from dp_core.privacy.batch_selection import (
    BatchSampler,
    CyclicPoissonSampling,
    PoissonSampling,
    SamplingLaw,
    TruncatedPoissonSampling,
)
from dp_core.privacy.execution_plan import BatchPhase, ExecutionPlan
from dp_core.privacy.mechanisms import (
    CyclicPoissonGaussian,
    MechanismEvent,
    NeighboringRelation,
    PoissonGaussian,
    PrivacyUnit,
    TruncatedPoissonGaussian,
)
from dp_core.privacy.seed_store import PrivacySeed

SEED, OTHER = PrivacySeed.fixed("sampling"), PrivacySeed.fixed("other")
Inclusions = NDArray[np.float64]  # (steps, units): 1 where the unit took part


def sampler(law: SamplingLaw, n_units: int, rate: float, seed: PrivacySeed = SEED) -> BatchSampler:
    return BatchSampler(law, seed, n_units, lambda step: rate)


def inclusions(batches: BatchSampler, steps: int) -> Inclusions:
    taken = np.zeros((steps, batches.n_units))
    for step in range(steps):
        batch = batches.batch(step)
        assert np.all(np.diff(batch) > 0)
        taken[step, batch] = 1
    return taken


def plan(law: SamplingLaw, batch: float, **more: Any) -> ExecutionPlan:
    usual = {"sampling": law, "expected_batch": batch, "steps": 50, "declared_units": 100}
    return plan_of(**usual | {"noise_multiplier": 1.0} | more)


def is_rate(taken: Inclusions, rate: float) -> bool:
    """Test the number of inclusions against its binomial law."""
    return bool(stats.binomtest(int(taken.sum()), taken.size, rate).pvalue > 1e-4)


def has_binomial_sizes(taken: Inclusions, rate: float) -> bool:
    """Test the variance of the batch size against n·q·(1−q)."""
    steps, n = taken.shape
    statistic = (steps - 1) * np.var(taken.sum(axis=1), ddof=1) / (n * rate * (1 - rate))
    below = float(stats.chi2.cdf(statistic, steps - 1))
    return 1e-4 < below < 1 - 1e-4


def is_independent(a: Inclusions, b: Inclusions) -> bool:
    """Test that no two columns of a and b correlate (Bonferroni over all pairs)."""
    za, zb = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
    r = za.T @ zb / len(za)
    limit = stats.norm.isf(1e-4 / r.size) / math.sqrt(len(za))
    return bool(np.max(np.abs(r)) < limit)


def units_are_independent(taken: Inclusions) -> bool:
    half = taken.shape[1] // 2
    return is_independent(taken[:, :half], taken[:, half:])


class SamplingLawConformance:
    """Conformance tests of a sampling law, whose test class inherits them and sets three fields."""

    law: SamplingLaw  # at rate 0.3, 40 units must not reach its cap, if it has one
    event: MechanismEvent  # of 50 updates at rate 0.1 out of 100 declared units, σ = 1
    digest: str  # of the batches of those updates, for 90 units

    @pytest.mark.statistical
    def test_each_unit_takes_part_at_the_rate_of_the_declared_bound(self):
        """The rate refers to the declared number of units, because the true number is private."""
        schedule = (BatchPhase(3000, 30),)
        batches = plan(self.law, 30, schedule=schedule).sampler(SEED, 40)
        taken = inclusions(batches, 3000)
        assert is_rate(taken, 0.3)
        assert not is_rate(taken, 0.2)
        assert not is_rate(taken, 0.45)

    def coins(self, taken: Inclusions, seed: PrivacySeed) -> Inclusions:
        """Return the inclusions at the updates open to each unit, equally many for all units."""
        return taken

    @pytest.mark.statistical
    def test_units_are_independent_of_each_other_of_the_past_and_of_other_seeds(self):
        taken = self.coins(inclusions(sampler(self.law, 40, 0.3), 4000), SEED)
        assert units_are_independent(taken)
        assert is_independent(taken[1:], taken[:-1])
        others = self.coins(inclusions(sampler(self.law, 40, 0.3, OTHER), 4000), OTHER)
        assert is_independent(taken, others)

    def test_an_empty_batch_is_a_batch(self):
        assert len(sampler(self.law, 0, 0.5).batch(0)) == 0
        assert len(sampler(self.law, 30, 1e-12).batch(0)) == 0

    def test_any_update_can_be_resumed_and_every_seed_differs(self):
        here = plan(self.law, 10)
        onward = [here.sampler(SEED, 100).batch(t) for t in range(50)]
        for t in (49, 17, 0, 17):
            assert np.array_equal(here.sampler(SEED, 100).batch(t), onward[t])
        assert len({tuple(b) for b in onward}) == 50
        other = here.sampler(OTHER, 100)
        assert not any(np.array_equal(other.batch(t), onward[t]) for t in range(50))

    def test_batches_do_not_change_between_releases(self):
        """If batches changed, a resumed run would no longer be the mechanism that it began as."""
        batches = plan(self.law, 10).sampler(SEED, 90)
        drawn = np.concatenate([batches.batch(t) for t in range(50)]).astype("<i8")
        assert hashlib.sha256(drawn.tobytes()).hexdigest()[:16] == self.digest

    def test_the_rate_follows_the_schedule_that_is_accounted(self):
        schedule = (BatchPhase(40, 5), BatchPhase(40, 12))
        here = plan(self.law, 0, schedule=schedule)
        sizes = [len(here.sampler(SEED, 100).batch(t)) for t in range(80)]
        assert abs(np.mean(sizes[:40]) - 5) < 5 * math.sqrt(5 / 40)
        assert abs(np.mean(sizes[40:]) - 12) < 5 * math.sqrt(12 / 40)
        within = [p[0] / self.law.separation for p in here.event().phases]  # type: ignore[attr-defined]
        assert within == pytest.approx([0.05, 0.12], rel=1e-15)

    def test_the_declared_bound_admits_as_many_units_and_not_one_more(self):
        here = plan(self.law, 10)
        assert here.sampler(SEED, 100).batch(0).max() < 100
        for more in (101, 200, 4321):
            with pytest.raises(PrivateTextRefusal, match="more units than declared") as caught:
                here.sampler(SEED, more)
            assert str(more) not in str(caught.value)  # the true number is private

    def test_event_of_a_sampling_law_is_its_mechanism(self):
        event = plan(self.law, 10).event()
        assert event == self.event
        # A plan's noise covers one clipped gradient. Replacing a unit moves a sum by two of them.
        assert event.relation is NeighboringRelation.ADD_REMOVE

    def test_no_batch_is_larger_than_it_says(self):
        largest = self.law.largest_batch(100)
        sizes = [len(sampler(self.law, 100, 0.9).batch(t)) for t in range(200)]
        assert largest is None or max(sizes) == largest

    def test_no_unit_takes_part_more_often_than_it_says(self):
        taken = inclusions(sampler(self.law, 30, 0.3), 60)
        apart = [int(d) for unit in taken.T for d in np.diff(np.flatnonzero(unit))]
        assert min(apart) == self.law.separation


class TestPoisson(SamplingLawConformance):
    law = PoissonSampling()
    event = PoissonGaussian.single(0.1, 1.0, 50, unit=PrivacyUnit.PATIENT)
    digest = "2d6c3602444d9b41"

    @pytest.mark.statistical
    @pytest.mark.parametrize("rate", [0.01, 0.3])
    def test_it_has_the_rate_and_the_variance_of_batch_size(self, rate):
        taken = inclusions(sampler(self.law, 2000, rate), 600)
        assert is_rate(taken, rate)
        assert has_binomial_sizes(taken, rate)
        assert not is_rate(taken, rate * 2 / 3)
        assert not is_rate(taken, rate * 3 / 2)

    def test_poisson_sampling_at_rate_one_draws_every_unit(self):
        assert list(sampler(self.law, 5, 1.0).batch(0)) == [0, 1, 2, 3, 4]

    def test_it_is_the_same_across_the_chunks_of_a_large_data_set(self):
        n = (1 << 20) + 1000
        batch = sampler(self.law, n, 0.01).batch(3)
        assert np.array_equal(batch[batch < 5000], sampler(self.law, 5000, 0.01).batch(3))
        assert abs(len(batch) - 0.01 * n) < 5 * math.sqrt(0.01 * n)
        assert batch[-1] >= 1 << 20


class TestTruncatedPoisson(SamplingLawConformance):
    law = TruncatedPoissonSampling(35)
    event = TruncatedPoissonGaussian(100, 35, ((0.1, 1.0, 50),), unit=PrivacyUnit.PATIENT)
    digest = TestPoisson.digest  # no batch exceeds the cap

    @pytest.mark.statistical
    def test_the_cut_is_a_uniform_choice_among_those_drawn(self):
        poisson = sampler(PoissonSampling(), 60, 0.3)
        cut = sampler(TruncatedPoissonSampling(15), 60, 0.3)
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
        # The test detects the usual mistake of dropping the highest indices.
        biased = np.where(np.arange(60) < 30, drawn * 0.99, drawn * 0.71)
        assert stats.chisquare(biased * stayed.sum() / biased.sum(), expected).pvalue < 1e-9

    def test_its_batches_do_not_change_between_releases_where_they_are_cut(self):
        batches = plan(TruncatedPoissonSampling(8), 10).sampler(SEED, 90)
        drawn = np.concatenate([batches.batch(t) for t in range(50)]).astype("<i8")
        assert hashlib.sha256(drawn.tobytes()).hexdigest()[:16] == "389d5f4f6ece5b9b"

    def test_its_bound_is_the_cap_or_all_units(self):
        assert [TruncatedPoissonSampling(c).largest_batch(100) for c in (8, 300)] == [8, 100]
        with pytest.raises(PlanError, match="below 1"):
            TruncatedPoissonSampling(0)


class TestCyclicPoisson(SamplingLawConformance):
    law = CyclicPoissonSampling(2)
    event = CyclicPoissonGaussian(2, ((0.2, 1.0, 50),), unit=PrivacyUnit.PATIENT)
    digest = "18e5089985a549ab"

    def coins(self, taken: Inclusions, seed: PrivacySeed) -> Inclusions:
        parts = self.law.parts_of(seed, taken.shape[1])
        other = np.stack([taken[1 - part :: 2, i] for i, part in enumerate(parts)])
        assert not other.any()  # a unit joins only batches of its part
        return np.stack([taken[part::2, i] for i, part in enumerate(parts)]).T

    @pytest.mark.statistical
    def test_parts_are_coins_that_no_other_unit_and_no_number_of_units_changes(self):
        law = CyclicPoissonSampling(3)
        parts = law.parts_of(SEED, 30_000)
        assert np.array_equal(law.parts_of(SEED, 29_999), parts[:-1])
        assert stats.chisquare(np.bincount(parts, minlength=3)).pvalue > 1e-4
        pairs = np.bincount(3 * parts[:-1] + parts[1:], minlength=9)
        assert stats.chisquare(pairs).pvalue > 1e-4
        dealt = np.arange(30_000) % 3  # one more unit would shift all later ones
        assert stats.chisquare(np.bincount(3 * dealt[:-1] + dealt[1:], minlength=9)).pvalue < 1e-9
        assert abs(np.corrcoef(parts, law.parts_of(OTHER, 30_000))[0, 1]) < 0.03

    @pytest.mark.statistical
    def test_a_part_is_drawn_from_at_the_rate_that_is_charged_whatever_its_size(self):
        law = CyclicPoissonSampling(4)
        here = plan(law, 10, schedule=(BatchPhase(4000, 10),))
        (charged,) = [rate for rate, _, _ in here.event().phases]  # type: ignore[attr-defined]
        assert charged == 0.4
        for declared in (20, 90):
            taken = inclusions(here.sampler(SEED, declared), 4000)
            parts = law.parts_of(SEED, declared)
            drawn = np.stack([taken[part::4, i] for i, part in enumerate(parts)])
            assert is_rate(drawn, 0.4)
            assert not is_rate(drawn, 0.1) and not is_rate(drawn, 0.6)

    def test_one_part_is_poisson_sampling(self):
        poisson, cyclic = (
            plan(law, 10).sampler(SEED, 90) for law in (PoissonSampling(), CyclicPoissonSampling(1))
        )
        assert all(np.array_equal(poisson.batch(t), cyclic.batch(t)) for t in range(9))

    def test_a_batch_that_no_part_can_fill_is_refused(self):
        plan(CyclicPoissonSampling(10), 10)
        with pytest.raises(PlanError, match="above one of 11 parts of the 100 declared"):
            plan(CyclicPoissonSampling(11), 10)
        with pytest.raises(PlanError, match="below 1"):
            CyclicPoissonSampling(0)
