"""From a target ε back to the noise, or to the number of updates, of a training run."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

from scipy.optimize import brentq

from dp_core.errors import BadInput
from dp_core.privacy.accounting import epsilon_pld
from dp_core.privacy.execution_plan import LEAST_NOISE, MOST_NOISE, ExecutionPlan
from dp_core.privacy.mechanisms import MechanismEvent, PoissonGaussian, compose

_MOST_STEPS = 10_000_000
_DIGITS = 5  # significant digits of a calibrated σ, rounded up


def noise_multiplier_for(
    target_epsilon: float,
    delta: float,
    *,
    sampling_rate: float,
    steps: int,
    alongside: MechanismEvent | None = None,
) -> float:
    """Return the smallest σ at which Poisson-sampled DP-SGD stays within (ε, δ).

    Args:
        target_epsilon: ε > 0 that training, and whatever is `alongside`, may reach by PLD.
        delta: δ of the total.
        sampling_rate: q. steps: updates.
        alongside: another release of the same plan (the vocabulary's event), composed with it.

    Raises:
        BadInput: no σ up to a million reaches the target (what is alongside spends it all).
    """
    unit = alongside.unit if alongside else None
    return noise_for(
        lambda sigma: PoissonGaussian.single(sampling_rate, sigma, steps, unit=unit),
        target_epsilon,
        delta,
        alongside,
    )


def noise_for(
    event_of: Callable[[float], MechanismEvent],
    target_epsilon: float,
    delta: float,
    alongside: MechanismEvent | None = None,
) -> float:
    """Return the smallest σ at which the event stays within (ε, δ), however batches are drawn.

    Args:
        event_of: the training's event at a noise multiplier σ.
        target_epsilon, delta, alongside: as for `noise_multiplier_for`; of the event's neighbours.

    Raises:
        BadInput: no σ up to a million reaches the target.
    """

    @functools.cache
    def excess(sigma: float) -> float:
        return _excess(event_of(sigma), target_epsilon, delta, alongside)

    _check(target_epsilon, delta)
    low = high = 1.0
    while excess(high) > 0:
        low, high = high, 2 * high
        if high > MOST_NOISE:
            raise BadInput(
                f"no noise reaches ε={target_epsilon:g} at δ={delta:g}",
                where="epsilon",
                fix="What is composed with the training already spends it."
                if alongside
                else "Ask for a larger ε or δ, or fewer updates.",
            )
    while low == high or excess(low) <= 0:
        low, high = low / 2, min(low, high)
        if low < LEAST_NOISE:
            return _round_up(high)
    root = brentq(lambda x: excess(math.exp(x)), math.log(low), math.log(high), xtol=2e-6)
    sigma = _round_up(math.exp(root))
    while excess(sigma) > 0:
        sigma = _round_up(sigma * (1 + 2 * 10.0**-_DIGITS))
    return sigma


def plan_for(
    plan: ExecutionPlan, target_epsilon: float, *, alongside: MechanismEvent | None = None
) -> ExecutionPlan:
    """Return `plan` with the smallest σ that reaches the target at the plan's δ.

    For every kind of sampling and schedule; the other fields stay.
    """
    plan = dataclasses.replace(plan, noise_multiplier_per_draw_stated=None)
    sigma = noise_for(
        lambda s: dataclasses.replace(plan, noise_multiplier=s).event(),
        target_epsilon,
        plan.delta,
        alongside,
    )
    return dataclasses.replace(plan, noise_multiplier=sigma)


def steps_for(
    target_epsilon: float,
    delta: float,
    *,
    sampling_rate: float,
    noise_multiplier: float,
    alongside: MechanismEvent | None = None,
) -> int:
    """Return the largest number of updates that stays within (ε, δ), at most ten million.

    Raises:
        BadInput: not even one update fits.
    """
    unit = alongside.unit if alongside else None
    return steps_within(
        lambda n: PoissonGaussian.single(sampling_rate, noise_multiplier, n, unit=unit),
        target_epsilon,
        delta,
        alongside,
    )


def steps_within(
    event_of: Callable[[int], MechanismEvent],
    target_epsilon: float,
    delta: float,
    alongside: MechanismEvent | None = None,
) -> int:
    """Return the largest number of updates within (ε, δ), however batches are drawn.

    Args:
        event_of: the training's event after a number of updates.
        target_epsilon, delta, alongside: as for `noise_for`.

    Raises:
        BadInput: not even one update fits.
    """

    @functools.cache
    def excess(steps: int) -> float:
        return _excess(event_of(steps), target_epsilon, delta, alongside)

    _check(target_epsilon, delta)
    if excess(1) > 0:
        raise BadInput(
            f"one update already passes ε={target_epsilon:g}",
            where="epsilon",
            fix="Raise the noise multiplier or lower the sampling rate.",
        )
    low, high = 1, 2
    while excess(high) <= 0:
        if high == _MOST_STEPS:
            return high
        low, high = high, min(8 * high, _MOST_STEPS)
    guess = brentq(
        lambda x: excess(round(math.exp(x))), math.log(low), math.log(high), xtol=0.3 / high
    )
    return _last_below(excess, low, high, round(math.exp(guess)))


def _last_below(excess: Callable[[int], float], low: int, high: int, guess: int) -> int:
    """Return the largest n with excess(n) ≤ 0, given excess(low) ≤ 0 < excess(high)."""
    while high - low > 1:
        n = min(max(guess, low + 1), high - 1)
        if excess(n) <= 0:
            low, guess = n, n + 1
        else:
            high, guess = n, n - 1
    return low


def _excess(
    event: MechanismEvent, target: float, delta: float, alongside: MechanismEvent | None
) -> float:
    """Return ln(ε/target), nearly linear in ln σ and in ln steps; kept finite."""
    epsilon = epsilon_pld(event if alongside is None else compose(alongside, event), delta)
    return math.log(min(max(epsilon, 1e-9), 1e9) / target)


def _check(target_epsilon: float, delta: float) -> None:
    if not (target_epsilon > 0 and math.isfinite(target_epsilon)):
        raise BadInput(f"{target_epsilon} is not above 0", where="epsilon")
    if not 0 < delta < 1:
        raise BadInput(f"{delta} is not between 0 and 1", where="delta")


def _round_up(sigma: float) -> float:
    step = 10.0 ** (math.floor(math.log10(sigma)) - _DIGITS + 1)
    return float(f"{math.ceil(sigma / step - 1e-6) * step:.12g}")
