"""Chooses the number of noise bands of a plan: the least error of the weights at equal ε."""

from __future__ import annotations

import dataclasses
import functools
import math

from dp_core.config.privacy import MOST_BANDS
from dp_core.errors import BadInput
from dp_core.privacy.accounting.calibration import noise_for
from dp_core.privacy.accounting.pld import epsilon_pld
from dp_core.privacy.batch_selection import CyclicPoissonSampling, PoissonSampling
from dp_core.privacy.execution_plan import ExecutionPlan
from dp_core.privacy.matrix_factorization import Workload, least_error_strategy


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
    proven = isinstance(plan.sampling, PoissonSampling) and plan.adaptive is None
    if not proven or len(plan.schedule) > 1:
        return plan
    best, epsilon = plan, epsilon_pld(plan.event(), plan.delta)
    most = min(MOST_BANDS, plan.steps, int(plan.declared_units / plan.expected_batch(0)))
    if not math.isfinite(epsilon):
        return plan
    for doublings in range(1, max(1, most).bit_length()):
        try:
            candidate = _calibrated(with_bands(plan, 1 << doublings, workload), epsilon)
        except BadInput:  # no noise that a plan may have reaches this ε
            break
        if workload_error(candidate, workload) >= workload_error(best, workload):
            break
        best = candidate
    return best


def _calibrated(plan: ExecutionPlan, epsilon: float) -> ExecutionPlan:
    def at(sigma: float) -> ExecutionPlan:
        return dataclasses.replace(plan, noise_multiplier=sigma)

    return at(noise_for(lambda sigma: at(sigma).event(), epsilon, plan.delta))
