"""Calibrates the noise, the updates or the noise bands of a training run to a target ε."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import scipy

from dp_core.config.privacy import LEAST_NOISE, MOST_BANDS
from dp_core.errors import BadInput, PlanError
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.batch_selection import CyclicPoissonSampling, PoissonSampling
from dp_core.privacy.execution_plan import MOST_NOISE, ExecutionPlan
from dp_core.privacy.matrix_factorization import Workload, least_error_strategy
from dp_core.privacy.mechanisms import MechanismEvent, compose

_MOST_STEPS = 10_000_000
DIGITS = 5  # significant digits of a calibrated σ
_TOLERANCE = 1e-8  # of 1/σ


def noise_for(
    event_of: Callable[[float], MechanismEvent],
    target_epsilon: float,
    delta: float,
    alongside: Sequence[MechanismEvent] = (),
) -> float:
    """Return the smallest noise multiplier σ at which the event stays within (ε, δ).

    Args:
        event_of: the training's event at a noise multiplier σ.
        target_epsilon: ε > 0 that training, and whatever is `alongside`, may reach by PLD.
        delta: δ of the total.
        alongside: other releases of the same plan (the vocabulary's event), composed with it.

    Raises:
        BadInput: no σ up to a million reaches the target (`alongside` alone may exceed it).
    """
    _check(target_epsilon, delta)

    def excess(sigma: float) -> float:
        return epsilon_pld(compose(*alongside, event_of(sigma)), delta) - target_epsilon

    if excess(MOST_NOISE) > 0:
        raise BadInput(
            f"no noise reaches ε={target_epsilon:g} at δ={delta:g}",
            where="epsilon",
            fix="The releases composed with the training already spend it: raise ε or δ."
            if alongside
            else "Raise ε or δ, or make fewer updates.",
        )
    low, high = 1 / MOST_NOISE, 1.0  # of 1/σ, in which ε is nearly linear
    while excess(1 / high) <= 0:
        if high == 1 / LEAST_NOISE:
            return LEAST_NOISE
        low, high = high, min(2 * high, 1 / LEAST_NOISE)
    sigma = round_up(1 / scipy.optimize.brentq(lambda x: excess(1 / x), low, high, xtol=_TOLERANCE))
    while excess(sigma) > 0:
        sigma = round_up(sigma * (1 + 2 * 10.0**-DIGITS))
    return sigma


def steps_within(
    event_of: Callable[[int], MechanismEvent], target_epsilon: float, delta: float
) -> int:
    """Return the largest number of updates within (ε, δ), at most ten million.

    Args:
        event_of: the training's event after a number of updates.
        target_epsilon, delta: as for `noise_for`.

    Raises:
        BadInput: not even one update fits.
    """
    _check(target_epsilon, delta)

    def exceeds(steps: int) -> bool:
        return epsilon_pld(event_of(steps), delta) > target_epsilon

    if exceeds(1):
        raise BadInput(
            f"one update already passes ε={target_epsilon:g}",
            where="epsilon",
            fix="Raise the noise multiplier or lower the sampling rate.",
        )
    fitting, most = 1, 1000
    while not exceeds(most):
        if most == _MOST_STEPS:
            return _MOST_STEPS
        fitting, most = most, min(2 * most, _MOST_STEPS)
    return fitting + bisect.bisect_left(range(fitting + 1, most), True, key=exceeds)


def _check(target_epsilon: float, delta: float) -> None:
    if not (target_epsilon > 0 and math.isfinite(target_epsilon)):
        raise BadInput(f"{target_epsilon} is not above 0", where="epsilon")
    if not 0 < delta < 1:
        raise BadInput(f"{delta} is not between 0 and 1", where="delta")


def round_up(sigma: float) -> float:
    """Return σ rounded up to five significant digits, few enough for a person to copy."""
    step = 10.0 ** (math.floor(math.log10(sigma)) - DIGITS + 1)
    return float(f"{math.ceil(sigma / step - 1e-6) * step:.12g}")


# --- bands of correlated noise: the least error of the weights at equal ε


def workload_error(plan: ExecutionPlan, workload: Workload) -> float:
    """Return the root mean square noise of the weights that training goes through."""
    return plan.noise_multiplier * workload.error(plan.strategy)


def with_bands(plan: ExecutionPlan, bands: int, workload: Workload) -> ExecutionPlan:
    """Return the plan with noise of b bands and batches from b parts in turn, at its σ.

    Args:
        plan: DP-SGD, with noise of one band.
        bands: b.
        workload: of the plan's updates.

    Raises:
        PlanError: the plan has a feature without a proof for correlated noise, or its batch is
            larger than a part.
    """
    if bands == 1:
        return plan
    if not isinstance(plan.sampling, PoissonSampling):
        raise PlanError(
            "correlated noise is proven only for Poisson samples", where="plan.sampling"
        )
    strategy = least_error_strategy(bands, workload)
    return dataclasses.replace(plan, sampling=CyclicPoissonSampling(bands), strategy=strategy)


@functools.lru_cache(maxsize=64)
def least_error(plan: ExecutionPlan, workload: Workload) -> ExecutionPlan:
    """Return the plan of the same ε whose weights have the least error, over 1, 2, 4, … bands.

    For each number of bands, σ is calibrated so that ε does not exceed the plan's. One band is the
    plan itself, so the returned plan is never worse. The search reads no data.

    Args:
        plan: DP-SGD, with noise of one band. Where correlated noise is not proven for it (cut or
            growing batches, a clip norm that is learned), it is returned as it is.
        workload: of the plan's updates.
    """
    best, epsilon = plan, epsilon_pld(plan.event(), plan.delta)
    for doublings in range(1, min(MOST_BANDS, plan.steps).bit_length()):
        try:
            candidate = _calibrated(with_bands(plan, 1 << doublings, workload), epsilon)
        except BadInput:  # the plan refuses so many bands, or no noise that it may have reaches ε
            break
        if workload_error(candidate, workload) >= workload_error(best, workload):
            break
        best = candidate
    return best


def _calibrated(plan: ExecutionPlan, epsilon: float) -> ExecutionPlan:
    def at(sigma: float) -> ExecutionPlan:
        return dataclasses.replace(plan, noise_multiplier=sigma)

    return at(noise_for(lambda sigma: at(sigma).event(), epsilon, plan.delta))
