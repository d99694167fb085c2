"""`confide calibrate`: from a privacy target back to the noise."""

from __future__ import annotations

import click

from dp_core.errors import BadInput
from tasks.commands.output import as_json, write_json, write_pairs


@click.group("calibrate")
def command() -> None:
    """Find the noise for a privacy target: of training, or of the vocabulary."""


@command.command("training")
@click.option("--epsilon", type=float, required=True, help="Target ε (PLD).")
@click.option("--delta", type=float, required=True, help="δ at which ε is stated.")
@click.option("--sampling-rate", type=float, required=True, help="q: expected batch over units.")
@click.option("--steps", type=int, help="Number of updates: asks for the noise.")
@click.option("--noise-multiplier", type=float, help="σ: asks for the number of updates.")
@as_json
def training(
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int | None,
    noise_multiplier: float | None,
    as_json: bool,
) -> None:
    """Say the smallest σ for a number of updates, or the most updates for a σ."""
    from dp_core.privacy.accounting import epsilon_pld
    from dp_core.privacy.calibration import noise_multiplier_for, steps_for
    from dp_core.privacy.events import PoissonGaussian

    if steps is not None and noise_multiplier is None:
        noise_multiplier = noise_multiplier_for(
            epsilon, delta, sampling_rate=sampling_rate, steps=steps
        )
    elif noise_multiplier is not None and steps is None:
        steps = steps_for(
            epsilon, delta, sampling_rate=sampling_rate, noise_multiplier=noise_multiplier
        )
    if steps is None or noise_multiplier is None:
        raise BadInput("give one of them", where="--steps, --noise-multiplier")
    reached = epsilon_pld(PoissonGaussian.single(sampling_rate, noise_multiplier, steps), delta)
    found = {
        "noise_multiplier": noise_multiplier,
        "steps": steps,
        "sampling_rate": sampling_rate,
        "epsilon": reached,
        "delta": delta,
    }
    if as_json:
        write_json(found)
    else:
        write_pairs(f"DP-SGD with ε ≤ {epsilon:g} at δ = {delta:g}", found)


@command.command("vocabulary")
@click.option("--epsilon", type=float, required=True, help="Target ε.")
@click.option("--delta", type=float, required=True, help="Target δ.")
@click.option(
    "--tuple-words",
    "words",
    type=int,
    required=True,
    help="N: the most distinct words of a unit that count (256 in the paper).",
)
@as_json
def vocabulary(epsilon: float, delta: float, words: int, as_json: bool) -> None:
    """Say the σ and threshold that release most: the smallest threshold."""
    from dp_core.vocab.calibration import calibrate, delta_of

    plan = calibrate(epsilon, delta, words)
    found = {
        "sigma": plan.sigma,
        "threshold": plan.threshold,
        "tuple_words": words,
        "epsilon": epsilon,
        "delta": delta,
        "delta_earned": delta_of(words, plan.sigma, plan.threshold, epsilon),
    }
    if as_json:
        write_json(found)
    else:
        write_pairs("Word histogram, discrete Gaussian noise", found)
