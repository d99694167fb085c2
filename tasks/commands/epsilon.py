"""`confide epsilon`: what a DP-SGD training costs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from dp_core.errors import BadInput
from tasks.commands.output import as_json, write_json, write_pairs

if TYPE_CHECKING:
    from dp_core.privacy.events import MechanismEvent

_RELATIONS = {
    "add-or-remove-one": "one unit added or removed",
    "zero-out-one": "one unit's contribution replaced by nothing",
    "replace-one": "one unit replaced by another",
}


@click.command("epsilon")
@click.option("--sampling-rate", type=float, help="q: expected batch over units.")
@click.option("--noise-multiplier", type=float, required=True, help="σ of one update, over C.")
@click.option("--steps", type=int, help="Number of updates.")
@click.option(
    "--phase",
    "phases",
    type=(float, int),
    multiple=True,
    metavar="RATE STEPS",
    help="A batch schedule: one for each phase, in place of --sampling-rate and --steps.",
)
@click.option("--delta", type=float, required=True, help="δ at which ε is stated.")
@click.option(
    "--sampling",
    type=click.Choice(["poisson", "truncated-poisson", "fixed-size", "shuffled"]),
    default="poisson",
    show_default=True,
    help="How batches are drawn; each has its own ε.",
)
@click.option("--units", type=int, help="Declared units; for truncated-poisson and fixed-size.")
@click.option("--cap", type=int, help="Largest batch; for truncated-poisson.")
@click.option(
    "--group", type=int, default=1, show_default=True, help="Also for that many units together."
)
@as_json
def command(
    sampling_rate: float | None,
    noise_multiplier: float,
    steps: int | None,
    phases: tuple[tuple[float, int], ...],
    delta: float,
    sampling: str,
    units: int | None,
    cap: int | None,
    group: int,
    as_json: bool,
) -> None:
    """Say ε of DP-SGD: by PLD (the claim), by RDP, and unamplified; also for groups of units."""
    from dp_core.privacy.accounting import (
        epsilon_pld,
        epsilon_rdp,
        epsilon_shuffled_replace_one,
        epsilon_unamplified,
        group_privacy,
    )

    schedule = _schedule(sampling_rate, steps, phases)
    event = _event(sampling, schedule, noise_multiplier, units, cap)
    claim = epsilon_pld(event, delta)
    found: dict[str, Any] = {
        "epsilon_pld": claim,
        "epsilon_rdp": epsilon_rdp(event, delta),
        "epsilon_unamplified": epsilon_unamplified(event, delta),
        "epsilon_unamplified_replace_one": epsilon_shuffled_replace_one(event, delta),
    }
    together = group_privacy(claim, delta, group)._asdict()
    if as_json:
        given: dict[str, Any] = {
            "noise_multiplier": noise_multiplier,
            "steps": sum(n for _, n in schedule),
            "delta": delta,
            "sampling": sampling,
            "neighbours": event.relation.value,
            "phases": [{"sampling_rate": rate, "steps": n} for rate, n in schedule],
            "group": together,
        }
        if len(schedule) == 1:
            given["sampling_rate"] = schedule[0][0]
        write_json({**found, **given})
        return
    shown = {
        "PLD (the claim)": claim,
        "RDP": found["epsilon_rdp"],
        "shuffled epochs, no amplification: zero-out": found["epsilon_unamplified"],
        "shuffled epochs, no amplification: replace-one": found["epsilon_unamplified_replace_one"],
    }
    if group > 1:
        shown[f"for {group} units together (δ = {together['delta']:.3g})"] = together["epsilon"]
    write_pairs(f"ε at δ = {delta:g}, {_RELATIONS[event.relation.value]}", shown)


def _schedule(
    rate: float | None, steps: int | None, phases: tuple[tuple[float, int], ...]
) -> list[tuple[float, int]]:
    if phases and rate is None and steps is None:
        return list(phases)
    if not phases and rate is not None and steps is not None:
        return [(rate, steps)]
    raise BadInput(
        "Missing option: a rate and steps, or phases",
        where="confide epsilon",
        fix="Give --sampling-rate and --steps, or one --phase RATE STEPS for each phase.",
    )


def _event(
    sampling: str,
    schedule: list[tuple[float, int]],
    sigma: float,
    units: int | None,
    cap: int | None,
) -> MechanismEvent:
    from dp_core.privacy.events import (
        FixedSizeGaussian,
        PoissonGaussian,
        ShuffledGaussian,
        TruncatedPoissonGaussian,
    )

    phases = tuple((rate, sigma, n) for rate, n in schedule)
    poisson = PoissonGaussian(phases)  # checks rates, noise and steps for all of them
    match sampling:
        case "truncated-poisson":
            return TruncatedPoissonGaussian(_given(units, "--units"), _given(cap, "--cap"), phases)
        case "fixed-size":
            slots = _given(units, "--units")
            return FixedSizeGaussian(slots, tuple((round(q * slots), s, n) for q, s, n in phases))
        case "shuffled":
            # whole batches only, as the trainer deals them: what is left sits the epoch out
            epochs = sum(math.ceil(n / math.floor(1 / rate + 1e-9)) for rate, n in schedule)
            return ShuffledGaussian(sigma, epochs)
        case _:
            return poisson


def _given(value: int | None, option: str) -> int:
    if value is None:
        raise BadInput("this sampling needs it", where=option)
    return value
