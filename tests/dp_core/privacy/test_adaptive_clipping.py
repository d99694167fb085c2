"""Adaptive clipping releases gradients and a count as one Gaussian with the plan's multiplier."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy.stats import norm

from dp_core.errors import PlanError
from dp_core.privacy.accounting.pld import epsilon_pld
from dp_core.privacy.execution_plan import RANGE, AdaptiveClipping, ExecutionPlan
from dp_core.privacy.mechanisms import PoissonGaussian, PrivacyUnit


def plan(**changes):
    usual = {
        "unit": PrivacyUnit.PATIENT,
        "declared_units": 1000,
        "expected_batch": 100,
        "steps": 20,
        "noise_multiplier": 1.2,
        "clip_norm": 0.5,
        "delta": 1e-6,
        "adaptive": AdaptiveClipping(quantile=0.5, count_noise=5.0),
    }
    return ExecutionPlan.poisson(**(usual | changes))


def test_the_papers_theorem_1():
    adaptive = AdaptiveClipping(0.5, count_noise=3.0)
    z_delta = adaptive.gradient_noise_multiplier(1.2)
    assert z_delta == pytest.approx((1.2**-2 - (2 * 3.0) ** -2) ** -0.5, rel=1e-12)
    assert z_delta > 1.2


def test_event_of_adaptive_clipping_has_the_joint_noise_multiplier():
    fixed = plan(adaptive=None)
    assert (
        plan().event()
        == fixed.event()
        == PoissonGaussian.single(0.1, 1.2, 20, unit=PrivacyUnit.PATIENT)
    )
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


def test_the_share_of_a_count():
    adaptive = AdaptiveClipping(0.5, 1.0)
    assert adaptive.share_within(15 - 0.5 * 20, 20.0) == pytest.approx(0.75)
    assert adaptive.share_within(0.0, 20.0) == 0.5


def test_the_clip_norm_settles_at_the_quantile():
    rng = np.random.default_rng(0)
    adaptive = AdaptiveClipping(0.3, count_noise=2.0)
    clip = first = 0.01
    course = []
    for _ in range(400):
        norms = rng.lognormal(0.0, 0.5, 100)
        noised = ((norms <= clip) - 0.5).sum() + rng.normal(0, adaptive.count_noise)
        share = adaptive.share_within(noised, 100.0)
        clip = adaptive.next_norm(clip, share, first)
        course.append(clip)
    assert np.mean(course[200:]) == pytest.approx(np.exp(0.5 * norm.ppf(0.3)), rel=0.05)


def test_the_clip_norm_stays_finite_whatever_the_noise_says():
    adaptive = AdaptiveClipping(0.5, 1.0, learning_rate=100.0)
    assert adaptive.next_norm(0.5, 50.0, 0.5) == pytest.approx(0.5 / RANGE)
    assert adaptive.next_norm(0.5, -50.0, 0.5) == pytest.approx(0.5 * RANGE)


@pytest.mark.parametrize(
    "changes,where",
    [
        ({"quantile": 1.0}, "quantile"),
        ({"quantile": 0.0}, "quantile"),
        ({"count_noise": 0.0}, "count_noise"),
        ({"count_noise": 0.6}, "count_noise"),  # z/2 leaves no budget for gradients
        ({"count_noise": 0.3}, "count_noise"),
        ({"learning_rate": math.nan}, "learning_rate"),
    ],
)
def test_a_plan_that_cannot_be_earned_cannot_be_built(changes, where):
    settings = {"quantile": 0.5, "count_noise": 5.0, "learning_rate": 0.2} | changes
    with pytest.raises(PlanError, match=f"plan.adaptive.{where}"):
        plan(adaptive=AdaptiveClipping(**settings))


def test_the_plans_digest_knows_how_clipping_adapts():
    digests = {
        plan(adaptive=a).digest()
        for a in (None, AdaptiveClipping(0.5, 5.0), AdaptiveClipping(0.6, 5.0))
    }
    assert len(digests) == 3
    assert dataclasses.asdict(plan().adaptive) == plan().to_json()["adaptive"]
