"""A training as commands are told of it: how batches are drawn, at which rates, for how long."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dp_core.errors import BadInput

if TYPE_CHECKING:
    from dp_core.privacy.mechanisms import MechanismEvent

NEIGHBOURS = {
    "add-or-remove-one": "one unit added or removed",
    "zero-out-one": "one unit's contribution replaced by nothing",
    "replace-one": "one unit replaced by another",
}
_LEAST_RATE = 1e-9  # one of the most units that a run may declare
_MOST = 10**12  # updates, units or rows: more are a slip of the keyboard
_LEAST_EPSILON, _MOST_EPSILON = 1e-6, 500.0
Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = [
    click.option("--sampling-rate", type=float, help="q: expected batch over units."),
    click.option("--steps", type=int, help="Number of updates."),
    click.option(
        "--phase",
        "phases",
        type=(float, int),
        multiple=True,
        metavar="RATE STEPS",
        help="A batch schedule: one for each phase, in place of --sampling-rate and --steps.",
    ),
    click.option(
        "--sampling",
        type=click.Choice(["poisson", "truncated-poisson", "fixed-size", "shuffled"]),
        default="poisson",
        show_default=True,
        help="How batches are drawn; each has its own ε, and its own neighbours.",
    ),
    click.option(
        "--units",
        type=int,
        help="Declared units; for truncated-poisson and fixed-size. δ is checked against it.",
    ),
    click.option("--cap", type=int, help="Largest batch; for truncated-poisson."),
]


def training_options(command: Command) -> Command:
    """Give a command the options that describe a training, apart from its noise and δ."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True)
class Batches:
    """How batches are drawn: what is known of a training before σ and the number of updates."""

    sampling: str
    units: int | None
    cap: int | None

    def event(self, schedule: list[tuple[float, int]], sigma: float) -> MechanismEvent:
        """Return the mechanism: phases of (rate, updates), at noise multiplier σ.

        Raises:
            BadInput: an impossible rate, σ or number; units or a cap that are missing, or belong to
                another sampling; a batch that is no whole number.
        """
        from dp_core.privacy import mechanisms as events

        phases = tuple((rate, sigma, n) for rate, n in schedule)
        poisson = events.PoissonGaussian(phases)  # checks rates, noise and steps for all of them
        check_count(self.cap, "--cap")
        if self.cap is not None and self.sampling != "truncated-poisson":
            raise BadInput(f"{self.sampling} batches have no cap", where="--cap")
        match self.sampling:
            case "truncated-poisson":
                units, cap = _given(self.units, "--units"), _given(self.cap, "--cap")
                return events.TruncatedPoissonGaussian(units, cap, phases)
            case "fixed-size":
                slots = _given(self.units, "--units")
                return events.FixedSizeGaussian(
                    slots, tuple((_whole_batch(q, slots), s, n) for q, s, n in phases)
                )
            case "shuffled":
                # whole batches only, as the trainer deals them: what is left sits the epoch out
                epochs = sum(math.ceil(n / math.floor(1 / rate + 1e-9)) for rate, n in schedule)
                return events.ShuffledGaussian(sigma, epochs)
            case _:
                return poisson


def schedule_of(
    rate: float | None, steps: int | None, phases: tuple[tuple[float, int], ...]
) -> list[tuple[float, int]]:
    """Return the phases, or the only one.

    Raises:
        BadInput: neither a rate and steps, nor phases; or both; or one that cannot be.
    """
    where = "--sampling-rate, --steps, --phase"
    if phases and (rate is not None or steps is not None):
        raise BadInput(
            "phases are given, and a rate or steps beside them",
            where=where,
            fix="Give one or the other: each phase has its own rate and steps.",
        )
    if not phases and (rate is None or steps is None):
        raise BadInput(
            "Missing option: a rate and steps, or phases",
            where=where,
            fix="Give --sampling-rate and --steps, or one --phase RATE STEPS for each phase.",
        )
    if rate is not None and steps is not None:
        check_rate(rate, "--sampling-rate")
        check_count(steps, "--steps")
        return [(rate, steps)]
    for phase_rate, phase_steps in phases:
        check_rate(phase_rate, "--phase")
        check_count(phase_steps, "--phase")
    return list(phases)


def check_epsilon(value: float) -> None:
    """Refuse a target ε that is none.

    Raises:
        BadInput: not finite, so small that no noise gives it, or so large that it promises nothing.
    """
    if not math.isfinite(value):
        raise BadInput(f"{value} is not finite", where="--epsilon")
    if not _LEAST_EPSILON <= value <= _MOST_EPSILON:
        what = f"{value:g} is not from {_LEAST_EPSILON:g} to {_MOST_EPSILON:g}"
        raise BadInput(what, where="--epsilon")


def check_noise(value: float) -> None:
    """Refuse a noise multiplier that no plan may have.

    Raises:
        BadInput: not finite, or out of range.
    """
    from dp_core.privacy.execution_plan import LEAST_NOISE, MOST_NOISE

    if not math.isfinite(value):
        raise BadInput(f"{value} is not finite", where="--noise-multiplier")
    if not LEAST_NOISE <= value <= MOST_NOISE:
        what = f"{value:g} is not from {LEAST_NOISE:g} to {MOST_NOISE:g}"
        raise BadInput(what, where="--noise-multiplier")


def check_count(value: int | None, option: str) -> None:
    """Refuse a number of things that is none, by the option's name.

    Raises:
        BadInput: given, and below 1; or more than anything is counted to.
    """
    if value is not None and value < 1:
        raise BadInput(f"{value} is not 1 or more", where=option)
    if value is not None and value > _MOST:
        raise BadInput(f"more than {_MOST:,}", where=option)


def check_rate(value: float, option: str) -> None:
    """Refuse a sampling rate that is none, by the option's name.

    Raises:
        BadInput: not above 0 (or next to it), or above 1.
    """
    if not 0 < value <= 1:
        raise BadInput(f"a sampling rate of {value:g} is not in (0, 1]", where=option)
    if value < _LEAST_RATE:
        raise BadInput(f"a sampling rate of {value:g} is below {_LEAST_RATE:g}", where=option)


def check_delta(delta: float, units: int | None) -> None:
    """Refuse a δ at which nothing would be promised.

    Raises:
        BadInput: not between 0 and 1, or not below 1/units; or a number of units that is none.
    """
    from dp_core.privacy.accounting import refuse_large_delta
    from dp_core.vocabulary.calibration import LEAST_DELTA

    check_count(units, "--units")
    if not 0 < delta < 1:
        raise BadInput(f"{delta} is not between 0 and 1", where="--delta")
    if delta < LEAST_DELTA:
        raise BadInput(f"{delta:g} is below {LEAST_DELTA:g}", where="--delta")
    if units is not None:
        refuse_large_delta([delta], units, "--delta")


def _whole_batch(rate: float, units: int) -> int:
    """Return rate · units. A batch rounded down would state an ε that is too small."""
    batch = round(rate * units)
    if batch < 1 or not math.isclose(batch, rate * units, rel_tol=1e-6):
        raise BadInput(
            f"{rate:g} of {units} units are {rate * units:g}, which is no whole batch",
            where="--sampling-rate",
            fix=f"For batches of {max(1, math.ceil(rate * units))} units give "
            f"{max(1, math.ceil(rate * units)) / units:g}.",
        )
    return batch


def _given(value: int | None, option: str) -> int:
    if value is None:
        raise BadInput("this sampling needs it", where=option)
    return value
