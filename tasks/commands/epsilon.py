"""`confide epsilon`: what a DP-SGD training costs."""

from __future__ import annotations

import click

from tasks.commands.output import as_json, write_json, write_pairs


@click.command("epsilon")
@click.option("--sampling-rate", type=float, required=True, help="q: expected batch over units.")
@click.option("--noise-multiplier", type=float, required=True, help="σ of one update, over C.")
@click.option("--steps", type=int, required=True, help="Number of updates.")
@click.option("--delta", type=float, required=True, help="δ at which ε is stated.")
@as_json
def command(
    sampling_rate: float, noise_multiplier: float, steps: int, delta: float, as_json: bool
) -> None:
    """Say ε of DP-SGD with Poisson sampling: by PLD (the claim), by RDP, and unamplified."""
    from dp_core.privacy.accounting import epsilon_pld, epsilon_rdp, epsilon_unamplified
    from dp_core.privacy.events import PoissonGaussian

    event = PoissonGaussian.single(sampling_rate, noise_multiplier, steps)
    found = {
        "epsilon_pld": epsilon_pld(event, delta),
        "epsilon_rdp": epsilon_rdp(event, delta),
        "epsilon_unamplified": epsilon_unamplified(event, delta),
    }
    if as_json:
        given = {
            "sampling_rate": sampling_rate,
            "noise_multiplier": noise_multiplier,
            "steps": steps,
            "delta": delta,
        }
        write_json({**found, **given})
    else:
        write_pairs(
            f"ε at δ = {delta:g}, one unit added or removed",
            {
                "PLD (the claim)": found["epsilon_pld"],
                "RDP": found["epsilon_rdp"],
                "without amplification by sampling": found["epsilon_unamplified"],
            },
        )
