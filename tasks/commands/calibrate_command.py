"""`confide calibrate`: from a privacy target back to the noise."""

from __future__ import annotations

from typing import Any

import click

from dp_core.errors import BadInput
from tasks.commands.output import as_json, write_json, write_pairs
from tasks.commands.training_options import (
    Training,
    check_count,
    check_delta,
    check_epsilon,
    check_noise,
    check_rate,
    training_options,
)


@click.group("calibrate", invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Find the noise for a privacy target: of training, or of the vocabulary."""
    if context.invoked_subcommand is None:
        raise BadInput("choose training or vocabulary", where="calibrate")


@command.command("training")
@click.option("--epsilon", type=float, required=True, help="Target ε (PLD).")
@click.option("--delta", type=float, required=True, help="δ at which ε is stated.")
@training_options
@click.option(
    "--noise-multiplier", type=float, help="σ: asks for the number of updates, in place of --steps."
)
@as_json
def training(
    epsilon: float,
    delta: float,
    told: Training,
    noise_multiplier: float | None,
    as_json: bool,
) -> None:
    """Say the smallest σ for a number of updates, or the most updates for a σ.

    For every way of drawing batches, with what is proven for it.
    """
    from dp_core.privacy.accounting import epsilon_pld, epsilon_rdp
    from dp_core.privacy.accounting.calibration import noise_for, steps_within

    check_epsilon(epsilon)
    check_delta(delta, told.units)
    if noise_multiplier is None:
        schedule = told.schedule
        noise_multiplier = noise_for(lambda s: told.event(schedule, s), epsilon, delta)
    elif told.sampling_rate is None or told.steps is not None or told.phases:
        raise BadInput(
            "the noise asks for the number of updates at one rate",
            where="--noise-multiplier",
            fix="Give it with --sampling-rate alone; or leave it out, to be told the noise.",
        )
    else:
        rate, sigma = told.sampling_rate, noise_multiplier
        check_rate(rate, "--sampling-rate")
        check_noise(sigma)
        most = steps_within(lambda n: told.event([(rate, n)], sigma), epsilon, delta)
        schedule = [(rate, most)]
    event = told.event(schedule, noise_multiplier)
    found = {
        "noise_multiplier": noise_multiplier,
        "steps": sum(n for _, n in schedule),
        "sampling_rate": schedule[0][0] if len(schedule) == 1 else None,
        "sampling": told.sampling,
        "epsilon": epsilon_pld(event, delta),
        "epsilon_rdp": epsilon_rdp(event, delta),
        "delta": delta,
        "neighbours": event.relation.value,
    }
    if as_json:
        write_json({**found, "phases": [{"sampling_rate": q, "steps": n} for q, n in schedule]})
    else:
        said = event.relation.describe()
        write_pairs(f"DP-SGD with ε ≤ {epsilon:g} at δ = {delta:g}, where {said}", found)


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
@click.option("--units", type=int, help="Declared units; δ is checked against one in their number.")
@click.option(
    "--mode",
    type=click.Choice(["exact", "paper"]),
    default="exact",
    show_default=True,
    help="paper: by Corollary 1 of Hoory et al. 2021, beside the δ that it really gives.",
)
@as_json
def vocabulary(
    epsilon: float, delta: float, words: int, units: int | None, mode: str, as_json: bool
) -> None:
    """Say the σ and threshold that release most: the smallest threshold."""
    check_epsilon(epsilon)
    check_delta(delta, units)
    check_count(words, "--tuple-words")
    found = {"mode": mode, "tuple_words": words, "epsilon": epsilon, "delta": delta}
    found |= _paper(epsilon, delta, words) if mode == "paper" else _exact(epsilon, delta, words)
    if as_json:
        write_json(found)
    elif mode == "paper":
        write_pairs("Word histogram as the paper has it: its δ is delta_earned, not delta", found)
    else:
        write_pairs("Word histogram, discrete Gaussian noise", found)


def _exact(epsilon: float, delta: float, words: int) -> dict[str, Any]:
    from dp_core.vocabulary.calibration import calibrate, delta_of

    plan = calibrate(epsilon, delta, words)
    return {
        "sigma": plan.sigma,
        "threshold": plan.threshold,
        "delta_earned": delta_of(words, plan.sigma, plan.threshold, epsilon),
    }


def _paper(epsilon: float, delta: float, words: int) -> dict[str, Any]:
    from dp_core.vocabulary.hoory2021 import paper_parameters, paper_sigma

    paper = paper_parameters(paper_sigma(epsilon, delta, words), delta, words)
    return {
        "sigma": paper.sigma,
        "threshold": paper.threshold,
        "delta_earned": paper.true_delta,
        "lone_word_passes": paper.lone_word,
        "right_threshold": paper.right_threshold,
        "delta_earned_at_right_threshold": paper.right_delta,
    }
