"""`confide calibrate`: computes the noise for a privacy target."""

from __future__ import annotations

from typing import Any

import click

from dp_core.errors import BadInput
from dp_core.privacy.accounting.calibration import noise_for, steps_within
from dp_core.privacy.accounting.pld import epsilon_pld
from dp_core.privacy.accounting.rdp import epsilon_rdp
from dp_core.vocabulary.selection_calibration import (
    calibrate,
    delta_of,
    paper_parameters,
    paper_sigma,
)
from tasks.commands.epsilon_command import (
    Training,
    check_count,
    check_delta,
    check_epsilon,
    check_noise,
    check_rate,
    training_options,
)
from tasks.commands.output import as_json, write_json, write_pairs


@click.group("calibrate", invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Compute the noise for a privacy target of a training or of a vocabulary."""
    if context.invoked_subcommand is None:
        raise BadInput("choose training or vocabulary", where="calibrate")


@command.command("training")
@click.option("--epsilon", type=float, required=True, help="Target ε (PLD).")
@click.option("--delta", type=float, required=True, help="δ at which ε is stated.")
@training_options
@click.option(
    "--noise-multiplier", type=float, help="σ; computes the number of updates (without --steps)."
)
@as_json
def training(
    epsilon: float,
    delta: float,
    options: Training,
    noise_multiplier: float | None,
    as_json: bool,
) -> None:
    """Compute the smallest σ for a number of updates, or the most updates for a σ.

    Every way of drawing batches has its proven accounting.
    """
    check_epsilon(epsilon)
    check_delta(delta, options.units)
    if noise_multiplier is None:
        schedule = options.schedule
        noise_multiplier = noise_for(lambda s: options.event(schedule, s), epsilon, delta)
    elif options.sampling_rate is None or options.steps is not None or options.phases:
        raise BadInput(
            "a number of updates can only be computed for one rate",
            where="--noise-multiplier",
            fix="Give it only with --sampling-rate, or omit it to compute the noise.",
        )
    else:
        rate, sigma = options.sampling_rate, noise_multiplier
        check_rate(rate, "--sampling-rate")
        check_noise(sigma)
        most = steps_within(lambda n: options.event([(rate, n)], sigma), epsilon, delta)
        schedule = [(rate, most)]
    event = options.event(schedule, noise_multiplier)
    found = {
        "noise_multiplier": noise_multiplier,
        "steps": sum(n for _, n in schedule),
        "sampling_rate": schedule[0][0] if len(schedule) == 1 else None,
        "sampling": options.sampling,
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
    help="N: the largest number of distinct words that a unit contributes (256 in the paper).",
)
@click.option("--units", type=int, help="Declared units; δ must be below 1/units.")
@click.option(
    "--mode",
    type=click.Choice(["exact", "paper"]),
    default="exact",
    show_default=True,
    help="paper: by Corollary 1 of Hoory et al. 2021, with the δ that it truly gives.",
)
@as_json
def vocabulary(
    epsilon: float, delta: float, words: int, units: int | None, mode: str, as_json: bool
) -> None:
    """Compute the σ with the smallest threshold, which releases the most words."""
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
    plan = calibrate(epsilon, delta, words)
    return {
        "sigma": plan.sigma,
        "threshold": plan.threshold,
        "delta_earned": delta_of(words, plan.sigma, plan.threshold, epsilon),
    }


def _paper(epsilon: float, delta: float, words: int) -> dict[str, Any]:
    paper = paper_parameters(paper_sigma(epsilon, delta, words), delta, words)
    return {
        "sigma": paper.sigma,
        "threshold": paper.threshold,
        "delta_earned": paper.true_delta,
        "lone_word_passes": paper.lone_word,
        "right_threshold": paper.right_threshold,
        "delta_earned_at_right_threshold": paper.right_delta,
    }
