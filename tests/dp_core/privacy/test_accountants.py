import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from mechanism_examples import either_way, truncated_truth
from numpy.typing import ArrayLike
from scipy.stats import binom, norm

from dp_core.errors import BadInput
from dp_core.privacy.accounting.accountants import (
    ComposedPld,
    composed_plds,
    composed_profile,
    discretise,
    epsilon_paper_conversion,
    epsilon_pld,
    epsilon_rdp,
    gaussian_epsilon,
)
from dp_core.privacy.accounting.calibration import noise_for, steps_within
from dp_core.privacy.accounting.profiles import Floats, Profile, SelfComposed
from dp_core.privacy.execution_plan import LEAST_NOISE
from dp_core.privacy.mechanisms import (
    FixedSizeGaussian,
    Gaussian,
    PoissonGaussian,
    PrivacyUnit,
    ShuffledGaussian,
    ThresholdedHistogram,
    TruncatedPoissonGaussian,
    compose,
)

PRIVACY_PAGE = Path(__file__).resolve().parents[3] / "docs" / "privacy.md"
single = PoissonGaussian.single
PAPER = single(131_072 / 83e6, 2.72, 31_250)
SCALE = single(1024 / 100_000, 1.0, 977)  # n=100k, B=1024, 10 epochs


@pytest.mark.parametrize(
    ("event", "delta", "pld", "rdp"),
    [
        (PAPER, 1e-8, 0.529, 0.561),
        (single(0.01, 4.0, 10_000), 1e-5, 0.947, 1.0355),
        (SCALE, 1e-6, 2.16, 2.47),
        (single(131_072 / 2.78e6, 2.72, 31_250), 1e-8, 22.3, None),
    ],
)
def test_reference_values(event, delta, pld, rdp):
    assert epsilon_pld(event, delta) == pytest.approx(pld, rel=0.01)
    if rdp is not None:
        assert epsilon_rdp(event, delta) == pytest.approx(rdp, rel=0.01)


def test_reference_values_of_other_conversions_and_samplings():
    assert epsilon_paper_conversion(PAPER, 1e-8) == pytest.approx(0.655, rel=0.01)
    one_cap = TruncatedPoissonGaussian(100_000, 1152, SCALE.phases)
    eight_caps = TruncatedPoissonGaussian(12_500, 144, SCALE.phases)
    assert epsilon_pld(one_cap, 1e-6) == pytest.approx(2.755, rel=0.001)
    assert epsilon_pld(eight_caps, 1e-6) == pytest.approx(7.80, rel=0.01)


# --- closed forms: k composed Gaussians are one Gaussian, at any δ


@pytest.mark.cases
@pytest.mark.parametrize("delta", [1e-5, 1e-10, 1e-14])
def test_composition_is_an_upper_bound_and_tight(sigma, steps, delta):
    exact = gaussian_epsilon(delta, math.sqrt(steps) / sigma)
    claimed = epsilon_pld(single(1.0, sigma, steps), delta)
    assert exact <= claimed <= exact * 1.005


def test_delta_inverts_epsilon():
    for event, delta in ((PAPER, 1e-8), (SCALE, 1e-6), (SCALE, 1e-13)):
        assert composed_profile(event)(epsilon_pld(event, delta)) == pytest.approx(delta, rel=1e-3)


# --- another implementation, where its rounding is negligible


@pytest.mark.cases
def test_agrees_with_dp_accounting(rate, sigma, steps, delta):
    theirs = PLDAccountant().compose(
        dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(sigma)), steps
    )
    ours = epsilon_pld(single(rate, sigma, steps), delta)
    assert ours == pytest.approx(theirs.get_epsilon(delta), rel=1e-3)


@pytest.mark.parametrize("rate", [2.5e-5, 0.02])
def test_delta_is_above_the_exact_convolution(rate):
    """Convolution without an FFT adds only positive numbers, so it is exact in a heavy tail too."""
    for pmf in discretise(single(rate, 0.85, 1).steps()[0].step, 0.05):
        exact = pmf.probabilities
        for _ in range(7):
            exact = np.convolve(exact, exact)
        losses = 128 * pmf.losses[0] + 0.05 * np.arange(len(exact))
        pld = ComposedPld([(pmf, 128)], 0.05)
        for epsilon in np.linspace(0.0, 2.0, 41):
            delta = pld.infinite - np.dot(exact, np.expm1(np.minimum(epsilon - losses, 0.0)))
            assert delta <= pld.delta(epsilon) < 1.001 * delta + 1e-14


def test_phases_add_up():
    parts = epsilon_pld(PoissonGaussian(((0.01, 1.0, 300), (0.01, 1.0, 677))), 1e-6)
    assert parts == pytest.approx(epsilon_pld(single(0.01, 1.0, 977), 1e-6), rel=1e-3)


@settings(max_examples=8, deadline=None)
@given(rate=st.floats(1e-4, 1.0), sigma=st.floats(0.5, 20.0), steps=st.integers(1, 2000))
def test_never_above_renyi_and_monotone(rate, sigma, steps):
    event, delta = single(rate, sigma, steps), 1e-6
    claimed = epsilon_pld(event, delta)
    renyi = epsilon_rdp(event, delta)
    assert claimed <= renyi * (1 + 1e-6)
    assert epsilon_pld(single(rate, sigma * 1.2, steps), delta) <= claimed * (1 + 1e-3)
    assert epsilon_pld(single(rate, sigma, 2 * steps), delta) >= claimed * (1 - 1e-3)


# --- truncated and fixed-size batches: every outcome of a tiny data set


@pytest.mark.parametrize("cap", [1, 2])
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_declared_bound_covers_every_smaller_number_of_units(cap, rate):
    for epsilon in (0.3, 2.0):
        claimed = composed_profile(TruncatedPoissonGaussian(6, cap, ((rate, 1.0, 1),)))(epsilon)
        for units in range(1, 7):
            assert truncated_truth(units, cap, rate, 1.0, epsilon) <= claimed * (1 + 1e-9)


def one_against_all(others: int, cap: int, rate: float) -> tuple[dict[float, float], ...]:
    """Return the laws of the sum with and without a unit of +1, if all other units have −1."""
    with_unit, without = dict[float, float](), dict[float, float]()
    for drawn in range(others + 1):
        weight = float(binom.pmf(drawn, others, rate))
        kept = min(drawn, cap)
        stays = rate * min(1.0, cap / (drawn + 1))
        takes_place = drawn >= cap
        for law, total, part in (
            (without, -kept, weight),
            (with_unit, -kept, weight * (1 - stays)),
            (with_unit, -kept + 1 + takes_place, weight * stays),
        ):
            law[total] = law.get(total, 0.0) + part
    return with_unit, without


def test_library_s_accounting_at_the_declared_bound_does_not_cover_fewer_units():
    """The library's mixture is over 100 declared units; if 31 exist, a unit is kept more often."""
    units, cap, rate, sigma, epsilon = 100, 10, 0.5, 1.0, 1.0
    library = privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
        units, rate, cap, sigma
    ).get_delta_for_epsilon(epsilon)
    true = either_way(*one_against_all(30, cap, rate), sigma, epsilon)
    ours = composed_profile(TruncatedPoissonGaussian(units, cap, ((rate, sigma, 1),)))(epsilon)
    assert library < true / 4
    assert true <= ours


@pytest.mark.cases
def test_cut_batches_cost_no_more_than_the_library_says(
    units, cap, rate, steps, epsilon, of_library
):
    delta = 1e-5 if units == 1_000 else 1e-6
    ours = epsilon_pld(TruncatedPoissonGaussian(units, cap, ((rate, 1.0, steps),)), delta)
    library = (
        privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
            units, rate, cap, 1.0
        )
        .self_compose(steps)
        .get_epsilon_for_delta(delta)
    )
    assert (round(ours, 2), round(library, 2)) == (epsilon, of_library)
    assert ours <= library
    (row,) = re.findall(
        rf"^\| {units:,} \| {cap:,} \| {rate} \| {steps:,} \| ([\d.]+) \| ([\d.]+) \|",
        PRIVACY_PAGE.read_text(),
        re.MULTILINE,
    )
    assert row == (f"{ours:.2f}", f"{library:.2f}")


def test_fixed_size_renyi_is_above_the_profile():
    event = FixedSizeGaussian(10_000, ((100, 4.0, 500),))
    renyi = epsilon_rdp(event, 1e-5)
    assert epsilon_pld(event, 1e-5) <= renyi
    assert epsilon_pld(event, 1e-5) > epsilon_pld(single(0.01, 4.0, 500), 1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-6])
def test_impossible_questions_are_refused(delta):
    with pytest.raises(BadInput):
        epsilon_pld(PAPER, delta)


@pytest.mark.parametrize(
    ("event", "delta"),
    [
        (single(0.01, 0.5, 1_000_000), 1e-7),  # ε in the thousands
        (single(0.5, 0.3, 100_000), 1e-5),  # beyond any grid
        (Gaussian(1e-3, 5), 1e-5),
    ],
    ids=str,
)
def test_extremes_are_answered_and_stay_valid(event, delta):
    renyi = epsilon_rdp(event, delta)
    assert 0 < epsilon_pld(event, delta) <= renyi
    assert 0 <= composed_profile(event)(1.0) <= 1


@pytest.mark.cases
def test_one_step_at_the_edges_is_the_closed_form(rate, sigma, delta):
    """δ = Pr_P[x > x*] − e^ε Pr_Q[x > x*], where the ratio of the densities at x* is e^ε."""
    mu = 1 / sigma

    def exact(epsilon: float) -> float:
        ratio = epsilon - math.log(rate) + math.log1p(-(1 - rate) * math.exp(-epsilon))
        x = ratio / mu + mu / 2
        with_unit = rate * norm.sf(x - mu) + (1 - rate) * norm.sf(x)
        return float(with_unit - math.exp(epsilon) * norm.sf(x))

    claimed = epsilon_pld(single(rate, sigma, 1), delta)
    assert exact(claimed) <= delta < exact(0.999 * claimed)


@pytest.mark.parametrize("steps", [1, 1000])
def test_a_rate_too_small_for_any_loss_costs_nothing(steps):
    event = single(1e-290, 0.04, steps)
    assert epsilon_pld(event, 1e-6) == 0
    assert 0 <= composed_profile(event)(1.0) <= 1


def test_a_million_small_steps_follow_the_central_limit() -> None:
    # Dong, Roth and Su 2022, Corollary 5.4: μ → q √(T(e^{1/σ²} − 1)).
    event = single(0.001, 1.0, 1_000_000)
    limit = gaussian_epsilon(1e-6, 0.001 * math.sqrt(1e6 * math.expm1(1.0)))
    assert epsilon_pld(event, 1e-6) == pytest.approx(limit, rel=0.02)


@dataclass(frozen=True)
class _Reversed(Profile):
    profile: Profile

    def directions(self, epsilon: Floats) -> tuple[Floats, Floats]:
        with_unit, without = self.profile.directions(epsilon)
        return without, with_unit

    def reach(self) -> float:
        return self.profile.reach()

    def rdp(self, orders: ArrayLike) -> Floats | None:
        return self.profile.rdp(orders)


@pytest.mark.parametrize("steps", [1, 20])
def test_the_worse_direction_counts_whichever_it_is(monkeypatch, steps):
    """Removing a unit costs more for a subsampled Gaussian; adding one, for the reversed one."""
    event = PoissonGaussian.single(0.1, 0.8, steps)
    sides = [side.epsilon(1e-5) for side in composed_plds(event.steps(), 1e-3)]
    assert sides[0] > 1.1 * sides[1]
    epsilon, delta = epsilon_pld(event, 1e-5), composed_profile(event)(sides[0])
    reversed_steps = [SelfComposed(_Reversed(step), count) for step, count in event.steps()]
    monkeypatch.setattr(PoissonGaussian, "steps", lambda _: reversed_steps)
    assert epsilon_pld.__wrapped__(event, 1e-5) == pytest.approx(epsilon, rel=1e-6)
    assert composed_profile(event)(sides[0]) == pytest.approx(delta, rel=1e-6)


def sampled(rate: float, steps: int, **more: Any) -> Callable[[float], PoissonGaussian]:
    return lambda sigma: PoissonGaussian.single(rate, sigma, steps, **more)


@pytest.mark.cases
def test_steps_within_epsilon_invert_calibrated_noise(target, delta, rate, steps):
    sigma = noise_for(sampled(rate, steps), target, delta)
    reached = epsilon_pld(PoissonGaussian.single(rate, sigma, steps), delta)
    assert target * 0.999 <= reached <= target
    fitting = steps_within(lambda n: PoissonGaussian.single(rate, sigma, n), target, delta)
    assert fitting == pytest.approx(steps, abs=max(1, steps // 200))
    more = epsilon_pld(PoissonGaussian.single(rate, sigma, fitting + 1), delta)
    assert more > target


def test_calibrated_noise_includes_the_cost_of_the_composed_release():
    vocabulary = ThresholdedHistogram(64, 60.0, 380, unit=PrivacyUnit.PATIENT)
    training = sampled(0.05, 100, unit=PrivacyUnit.PATIENT)
    both = noise_for(training, 2.0, 1e-6, [vocabulary])
    assert both > noise_for(training, 2.0, 1e-6)
    assert 0.995 * 2.0 <= epsilon_pld(compose(vocabulary, training(both)), 1e-6) <= 2.0


def test_search_returns_its_limits_when_every_parameter_fits():
    assert noise_for(sampled(1e-6, 1), 100.0, 0.5) == LEAST_NOISE
    assert steps_within(lambda n: Gaussian(1e6 * math.sqrt(n)), 1.0, 1e-6) == 10_000_000


def test_epochs_have_the_noise_of_one_gaussian_and_whole_epochs_of_updates():
    def event(steps: int, sigma: float) -> ShuffledGaussian:
        return ShuffledGaussian(sigma, math.ceil(steps / 20))

    sigma = noise_for(lambda s: event(60, s), 3.0, 1e-5)
    # Three Gaussians equal one with μ = √3/σ, whose ε has a closed form (Balle and Wang).
    assert gaussian_epsilon(1e-5, math.sqrt(3) / sigma) == pytest.approx(3.0, rel=2e-3)
    assert steps_within(lambda n: event(n, sigma), 3.0, 1e-5) == 60
    assert steps_within(lambda n: event(n, 1.2 * sigma), 3.0, 1e-5) == 80


def test_targets_out_of_reach_are_refused():
    leaky, training = ThresholdedHistogram(64, 60.0, 100), sampled(0.05, 10)
    with pytest.raises(BadInput, match="already spend it"):
        noise_for(training, 1.0, 1e-6, [leaky])
    with pytest.raises(BadInput, match="one update"):
        steps_within(lambda n: PoissonGaussian.single(0.5, 0.5, n), 0.01, 1e-6)
    with pytest.raises(BadInput, match="epsilon"):
        noise_for(training, 0.0, 1e-6)
    with pytest.raises(BadInput, match="delta"):
        noise_for(training, 1.0, 0.0)
