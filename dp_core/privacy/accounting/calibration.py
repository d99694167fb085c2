"""Calibrates the noise, the updates or the noise bands of a training run to a target ε.

The search is dp_accounting's `calibrate_dp_mechanism`, with ε computed by our PLD accountant.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dp_accounting as dpa
from dp_accounting.mechanism_calibration import (
    LowerEndpointAndGuess,
    NoBracketIntervalFoundError,
    calibrate_dp_mechanism,
)

from dp_core.config.privacy import LEAST_NOISE, MOST_BANDS
from dp_core.errors import BadInput
from dp_core.privacy.accounting.pld import delta_pld, epsilon_pld
from dp_core.privacy.batch_selection import CyclicPoissonSampling, PoissonSampling
from dp_core.privacy.execution_plan import MOST_NOISE, ExecutionPlan
from dp_core.privacy.matrix_factorization import Workload, least_error_strategy
from dp_core.privacy.mechanisms import MechanismEvent, NeighboringRelation, compose

_MOST_STEPS = 10_000_000
DIGITS = 5  # significant digits of a calibrated σ
_TOLERANCE = 1e-8  # of 1/σ
_RELATIONS = {
    NeighboringRelation.ADD_REMOVE: dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
    NeighboringRelation.ZERO_OUT: dpa.NeighboringRelation.REPLACE_SPECIAL,
    NeighboringRelation.REPLACE: dpa.NeighboringRelation.REPLACE_ONE,
}
_epsilon = functools.lru_cache(maxsize=64)(epsilon_pld)  # the search evaluates its ends twice


@dataclass(frozen=True)
class MechanismDpEvent(dpa.DpEvent):  # type: ignore[misc]
    """A mechanism of ours as an event of dp_accounting."""

    mechanism: MechanismEvent


class PldAccountant(dpa.PrivacyAccountant):  # type: ignore[misc]
    """Our privacy loss distributions as an accountant of dp_accounting.

    It composes every `MechanismDpEvent` of its neighbouring relation.
    """

    def __init__(self, relation: NeighboringRelation = NeighboringRelation.ADD_REMOVE) -> None:
        super().__init__(_RELATIONS[relation])
        self._relation = relation
        self._mechanisms: list[MechanismEvent] = []
        self._unaccounted = False

    def _maybe_compose(
        self, event: dpa.DpEvent, count: int, do_compose: bool
    ) -> dpa.PrivacyAccountant.CompositionErrorDetails | None:
        if isinstance(event, dpa.NoOpDpEvent):
            return None
        if isinstance(event, dpa.SelfComposedDpEvent):
            return self._maybe_compose(event.event, count * event.count, do_compose)
        if isinstance(event, dpa.ComposedDpEvent):
            errors = (self._maybe_compose(part, count, do_compose) for part in event.events)
            return next(filter(None, errors), None)
        if isinstance(event, dpa.NonPrivateDpEvent):
            self._unaccounted |= do_compose
            return None
        if isinstance(event, MechanismDpEvent) and event.mechanism.relation is self._relation:
            self._mechanisms += [event.mechanism] * (count if do_compose else 0)
            return None
        return self.CompositionErrorDetails(event, f"not a mechanism under {self._relation.value}")

    def get_epsilon(self, target_delta: float) -> float:
        """Return ε at δ, from above."""
        if self._unaccounted or not self._mechanisms:
            return math.inf if self._unaccounted else 0.0
        return _epsilon(compose(*self._mechanisms), target_delta)

    def get_delta(self, target_epsilon: float) -> float:
        """Return δ at ε, from above."""
        if self._unaccounted or not self._mechanisms:
            return 1.0 if self._unaccounted else 0.0
        return delta_pld(compose(*self._mechanisms), target_epsilon)


def noise_for(
    event_of: Callable[[float], MechanismEvent],
    target_epsilon: float,
    delta: float,
    alongside: MechanismEvent | None = None,
) -> float:
    """Return the smallest noise multiplier σ at which the event stays within (ε, δ).

    Args:
        event_of: the training's event at a noise multiplier σ.
        target_epsilon: ε > 0 that training, and whatever is `alongside`, may reach by PLD.
        delta: δ of the total.
        alongside: another release of the same plan (the vocabulary's event), composed with it.

    Raises:
        BadInput: no σ up to a million reaches the target (`alongside` alone may exceed it).
    """
    accountant, event, exceeds = _search(event_of, target_epsilon, delta, alongside)
    if exceeds(MOST_NOISE):
        raise BadInput(
            f"no noise reaches ε={target_epsilon:g} at δ={delta:g}",
            where="epsilon",
            fix="The releases composed with the training already spend it: raise ε or δ."
            if alongside
            else "Raise ε or δ, or make fewer updates.",
        )
    try:
        inverse = calibrate_dp_mechanism(
            accountant,
            lambda x: event(max(1 / x, LEAST_NOISE)),
            target_epsilon,
            delta,
            LowerEndpointAndGuess(1 / MOST_NOISE, 1.0),
            tol=_TOLERANCE,
        )
    except NoBracketIntervalFoundError:
        return LEAST_NOISE
    sigma = round_up(1 / inverse)
    while exceeds(sigma):
        sigma = round_up(sigma * (1 + 2 * 10.0**-DIGITS))
    return sigma


def steps_within(
    event_of: Callable[[int], MechanismEvent],
    target_epsilon: float,
    delta: float,
) -> int:
    """Return the largest number of updates within (ε, δ), at most ten million.

    Args:
        event_of: the training's event after a number of updates.
        target_epsilon, delta: as for `noise_for`.

    Raises:
        BadInput: not even one update fits.
    """
    accountant, event, exceeds = _search(event_of, target_epsilon, delta, None)
    if exceeds(1):
        raise BadInput(
            f"one update already passes ε={target_epsilon:g}",
            where="epsilon",
            fix="Raise the noise multiplier or lower the sampling rate.",
        )
    try:
        steps = calibrate_dp_mechanism(
            accountant,
            lambda n: event(min(n, _MOST_STEPS)),
            target_epsilon,
            delta,
            LowerEndpointAndGuess(1, 1000),
            discrete=True,
        )
    except NoBracketIntervalFoundError:
        return _MOST_STEPS
    while not exceeds(steps + 1):  # the search may end one update below the most
        steps += 1
    return int(steps)


def _search(
    event_of: Callable[[Any], MechanismEvent],
    target_epsilon: float,
    delta: float,
    alongside: MechanismEvent | None,
) -> tuple[
    Callable[[], PldAccountant], Callable[[float], MechanismDpEvent], Callable[[float], bool]
]:
    """Return the accountant factory, the event factory and a test whether a parameter exceeds ε.

    Raises:
        BadInput: ε is not above 0, or δ not between 0 and 1.
    """
    if not (target_epsilon > 0 and math.isfinite(target_epsilon)):
        raise BadInput(f"{target_epsilon} is not above 0", where="epsilon")
    if not 0 < delta < 1:
        raise BadInput(f"{delta} is not between 0 and 1", where="delta")

    def accountant() -> PldAccountant:
        return PldAccountant(event_of(1).relation)

    def event(parameter: float) -> MechanismDpEvent:
        training = event_of(parameter)
        return MechanismDpEvent(training if alongside is None else compose(alongside, training))

    def exceeds(parameter: float) -> bool:
        composed: PldAccountant = accountant().compose(event(parameter))
        return composed.get_epsilon(delta) > target_epsilon

    return accountant, event, exceeds


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
