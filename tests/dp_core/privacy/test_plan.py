import json
import math
from typing import Any

import numpy as np
import pytest
from mechanism_examples import plan_of, power_strategy
from scipy.stats import norm

from dp_core.errors import BadInput, PlanError
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.batch_selection import CyclicPoissonSampling, TruncatedPoissonSampling
from dp_core.privacy.execution_plan import RANGE, AdaptiveClipping, BatchPhase, growing_batches
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit
from dp_core.privacy.noise_addition import UpdateNoise
from dp_core.privacy.seed_store import PrivacySeed


def test_a_schedule_is_executed_and_accounted_phase_by_phase():
    p = plan_of(schedule=(BatchPhase(10, 100), BatchPhase(5, 200), BatchPhase(1, 400)))
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


def test_noise_is_the_multiple_of_the_clip_norm_that_is_charged():
    p, seed = plan_of(), PrivacySeed.fixed(1)
    clipper = p.clipper()
    assert p.noise(seed, b"m", 3, clipper) == UpdateNoise(seed, b"m", 3, 1.2, 0.5)
    clipper.clip_norm = 0.1
    assert p.noise(seed, b"m", 3, clipper) == UpdateNoise(seed, b"m", 3, 1.2, 0.1)


@pytest.mark.cases
def test_inconsistent_plans_cannot_be_built(changes, reason):
    if "adaptive" in changes:
        changes = changes | {"adaptive": AdaptiveClipping(**changes["adaptive"])}
    with pytest.raises(PlanError, match=reason):
        plan_of(**changes)


def test_growing_batches_go_by_equal_factors_and_then_stay():
    assert growing_batches(128, 1024, 24) == (
        BatchPhase(3, 128),
        BatchPhase(3, 256),
        BatchPhase(3, 512),
        BatchPhase(15, 1024),
    )
    assert sum(phase.steps for phase in growing_batches(1024, 4096, 80)) == 80
    with pytest.raises(BadInput, match="7 updates are too few"):
        growing_batches(1, 2, 7)


def test_the_digest_knows_every_field():
    base = plan_of()
    assert plan_of().digest() == base.digest()
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
        {"adaptive": AdaptiveClipping(0.5, 5.0)},
        {"adaptive": AdaptiveClipping(0.6, 5.0)},
    ]
    digests = {plan_of(**change).digest() for change in changes} | {base.digest()}
    digests.add(plan_of(sampling=TruncatedPoissonSampling(300)).digest())
    digests.add(plan_of(sampling=TruncatedPoissonSampling(301)).digest())
    cyclic = CyclicPoissonSampling(4)
    digests.add(plan_of(sampling=cyclic).digest())
    digests.add(plan_of(sampling=cyclic, strategy=power_strategy(4, 0.5)).digest())
    assert len(digests) == len(changes) + 5
    json.dumps(base.to_json())


# --- adaptive clipping: gradients and a count are one Gaussian with the plan's multiplier


def test_the_papers_theorem_1():
    adaptive = AdaptiveClipping(0.5, count_noise=3.0)
    z_delta = adaptive.gradient_noise_multiplier(1.2)
    assert z_delta == pytest.approx((1.2**-2 - (2 * 3.0) ** -2) ** -0.5, rel=1e-12)
    assert z_delta > 1.2


def test_event_of_adaptive_clipping_has_the_joint_noise_multiplier():
    fixed, learned = plan_of(), plan_of(adaptive=AdaptiveClipping(0.5, count_noise=5.0))
    charged = PoissonGaussian.single(256 / 4000, 1.2, 300, unit=PrivacyUnit.PATIENT)
    assert learned.event() == fixed.event() == charged
    assert fixed.gradient_noise_multiplier() == 1.2


@pytest.mark.parametrize("z,sigma_b", [(0.5, 0.3), (1.2, 5.0), (8.0, 4.5)])
def test_no_unit_moves_both_releases_together_by_more_than_the_multiplier_allows(z, sigma_b):
    """The maximum of |(Δ/(z_Δ C), (b − 1/2)/σ_b)| over norms and clip norms is 1/z."""
    z_delta = AdaptiveClipping(0.5, sigma_b).gradient_noise_multiplier(z)
    norms, clips = np.meshgrid(np.linspace(0, 3, 301), np.linspace(0.01, 3, 300))
    clipped = norms * np.minimum(1.0, clips / np.maximum(norms, 1e-30))
    b = norms <= clips
    joint = np.hypot(clipped / (z_delta * clips), (b - 0.5) / sigma_b)
    assert joint.max() == pytest.approx(1 / z, rel=1e-6)


def test_joint_release_of_a_poisson_batch_costs_at_most_the_claimed_epsilon():
    """Compare the PLD with the hockey-stick divergence of gradients and count over the plane."""
    q, z = 0.1, 1.0
    adaptive = AdaptiveClipping(0.5, count_noise=0.8)
    shift = 1 / adaptive.gradient_noise_multiplier(z), 0.5 / adaptive.count_noise
    x = np.linspace(-9, 9, 1201)
    base = np.multiply.outer(norm.pdf(x), norm.pdf(x))
    moved = np.multiply.outer(norm.pdf(x - shift[0]), norm.pdf(x - shift[1]))
    mixture = (1 - q) * base + q * moved
    epsilon = 0.5
    excess = max(
        np.maximum(0, a - math.exp(epsilon) * b).sum() * (x[1] - x[0]) ** 2
        for a, b in ((mixture, base), (base, mixture))
    )
    claimed = epsilon_pld(PoissonGaussian.single(q, z, 1), float(excess))
    assert claimed == pytest.approx(epsilon, abs=0.01)
    too_little = epsilon_pld(PoissonGaussian.single(q, 1 / shift[0], 1), float(excess))
    assert too_little < epsilon - 0.05  # the claim if the count were ignored


def test_the_clip_norm_settles_at_the_quantile():
    rng = np.random.default_rng(0)
    adaptive = AdaptiveClipping(0.3, count_noise=2.0)
    clip = first = 0.01
    course = []
    for _ in range(400):
        norms = rng.lognormal(0.0, 0.5, 100)
        noised = ((norms <= clip) - 0.5).sum() + rng.normal(0, adaptive.count_noise)
        clip = adaptive.next_norm(clip, noised, 100.0, first)
        course.append(clip)
    assert np.mean(course[200:]) == pytest.approx(np.exp(0.5 * norm.ppf(0.3)), rel=0.05)


def test_the_clip_norm_stays_finite_whatever_the_noise_says():
    adaptive = AdaptiveClipping(0.5, 1.0, learning_rate=100.0)
    assert adaptive.next_norm(0.5, 49.5, 1.0, 0.5) == pytest.approx(0.5 / RANGE)
    assert adaptive.next_norm(0.5, -50.5, 1.0, 0.5) == pytest.approx(0.5 * RANGE)


@pytest.mark.cases
def test_a_plan_that_cannot_be_earned_cannot_be_built(changes, where):
    settings = {"quantile": 0.5, "count_noise": 5.0, "learning_rate": 0.2} | changes
    with pytest.raises(PlanError, match=f"plan.adaptive.{where}"):
        plan_of(adaptive=AdaptiveClipping(**settings))
