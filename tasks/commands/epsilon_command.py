"""`confide epsilon`: computes the ε of a DP-SGD training."""

from __future__ import annotations

from typing import Any

import click

from tasks.commands.output import as_json, write_json, write_pairs
from tasks.commands.training_options import (
    Training,
    check_count,
    check_delta,
    check_noise,
    training_options,
)


@click.command("epsilon")
@click.option("--noise-multiplier", type=float, required=True, help="σ of one update, over C.")
@training_options
@click.option("--delta", type=float, required=True, help="δ at which ε is stated.")
@click.option(
    "--group", type=int, default=1, show_default=True, help="Also for a group of so many units."
)
@as_json
def command(
    options: Training, noise_multiplier: float, delta: float, group: int, as_json: bool
) -> None:
    """Compute ε of DP-SGD: by PLD (the claim), by RDP, unamplified, and for groups of units."""
    from dp_core.privacy.accounting import (
        epsilon_pld,
        epsilon_rdp,
        epsilon_unamplified,
        group_privacy,
    )

    check_noise(noise_multiplier)
    check_delta(delta, options.units)
    check_count(group, "--group")
    schedule = options.schedule
    event = options.event(schedule, noise_multiplier)
    claim = epsilon_pld(event, delta)
    found: dict[str, Any] = {
        "epsilon_pld": claim,
        "epsilon_rdp": epsilon_rdp(event, delta),
        "epsilon_unamplified": epsilon_unamplified(event, delta),
        "epsilon_unamplified_replace_one": epsilon_unamplified(event, delta, sensitivity=2.0),
    }
    together = group_privacy(claim, delta, group)._asdict()
    if as_json:
        given: dict[str, Any] = {
            "noise_multiplier": noise_multiplier,
            "steps": sum(n for _, n in schedule),
            "delta": delta,
            "sampling": options.sampling,
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
    write_pairs(f"ε at δ = {delta:g}, where {event.relation.describe()}", shown)
