"""`confide advise`: recommends a plan for a budget and a corpus size, without spending any."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.ledger import AdmissionDecision, Ledger, Way
from dp_core.privacy.ledger.privacy_filter import pld_capacity
from tasks.commands.epsilon_command import EPSILON
from tasks.commands.ledger_command import FITS
from tasks.commands.output import as_json, write_answer, write_pairs, write_table
from tasks.commands.settings_options import (
    settings_of_options,
    settings_options,
    write_settings,
)
from tasks.protocol.job import budget_of_run
from tasks.protocol.settings import MADE_UP, JobSettings
from tasks.releases import training_advice
from tasks.releases.charge import plans_of
from tasks.releases.deployment_ledger import killed_runs, open_ledger
from tasks.releases.training_advice import Advice, PrivacyBudget, RunReleases, how_it_is_known
from tasks.runtime.deployment import Deployment, sqlite_file


@click.command("advise")
@settings_options
@click.option("--epsilon", type=EPSILON, help="Total ε of all releases of the run.")
@click.option("--delta", type=float, help="Total δ of all releases; below 1/units.")
@click.option(
    "--write",
    "written",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the settings to this file, for `confide run --settings`.",
)
@as_json
def command(
    epsilon: float | None, delta: float | None, written: Path | None, **options: Any
) -> None:
    """Recommend batch, noise and vocabulary for a privacy budget, with the expected result.

    The command starts from the same settings as `confide run`: declared_units is the corpus size,
    and epochs is the compute. The plan fits the registered budget of private_dataset, if one
    exists: all of it or the remaining part, unless --epsilon and --delta are smaller. Otherwise,
    the budget is the cost of the present settings. No private text is read, and nothing is charged.

    Example:
      confide advise --set declared_units=50000 --epsilon 8 --delta 1e-6
    """
    settings = settings_of_options(JobSettings, **options)
    advice = _advice(settings, epsilon, delta)
    if written is not None:
        changed = advice.settings.model_dump(mode="json", exclude_defaults=True)
        write_settings(changed, written, "--write")
    answer = to_json(advice)
    write_answer(answer, lambda: _show(advice, answer["split"], written))


def _advice(settings: JobSettings, epsilon: float | None, delta: float | None) -> Advice:
    dataset, ledger = settings.private_dataset, _ledger_with_budget(settings)
    if ledger is None:
        now = RunReleases.of(settings)
        budget = PrivacyBudget(
            now.epsilon if epsilon is None else epsilon, now.delta if delta is None else delta
        )
        return training_advice.advised(settings, budget)
    left, killed = ledger.remaining(dataset), killed_runs(Deployment.from_environment())
    assert left.capacity is not None and left.spent is not None  # noqa: S101 - it is limited
    registered = pld_capacity(left.budget)
    left_delta = left.capacity.delta - left.spent.delta  # all of a histogram's coins must fit
    most = left_delta if left.way is Way.SEQUENCE else registered.delta

    def decide(advised: JobSettings) -> AdmissionDecision:
        plans = plans_of(budget_of_run(advised).charged)
        return ledger.cost_of_plan(plans[dataset], killed.__contains__)

    budget = PrivacyBudget(epsilon or registered.rho, delta or most)
    return training_advice.advised_within(settings, budget, decide)


def _ledger_with_budget(settings: JobSettings) -> Ledger | None:
    """Return the ledger if it limits the private data set; advice must not create a ledger."""
    deployment = Deployment.from_environment()
    file = sqlite_file(deployment.ledger)
    made_up = settings.made_up or settings.private_dataset == MADE_UP
    if made_up or (file is not None and not file.exists()):
        return None
    ledger = open_ledger(deployment)
    budget = ledger.datasets().get(settings.private_dataset)
    return None if budget is None or budget.made_up else ledger


def to_json(advice: Advice) -> dict[str, Any]:
    """Return the advice as plain JSON data."""
    settings, spending = advice.settings, advice.spending
    planned = ("batch_size", "updates", "epochs", "examples_per_step", "noise_multiplier")
    return {
        "budget": {"epsilon": advice.budget.epsilon, "delta": advice.budget.delta},
        "registered": advice.decision.to_json() if advice.decision else None,
        "unit": settings.unit,
        "declared_units": settings.declared_units,
        "plan": {
            **{name: getattr(settings, name) for name in planned},
            "first_batch_size": settings.first_batch_size or None,
            "noise_to_signal": spending.noise_to_signal,
            "noise_bands": spending.training.strategy.bands,
            "epsilon": spending.epsilon,
            "delta": spending.delta,
        },
        "split": _split(advice),
        "expected": [
            asdict(case) | {"share_of_gain": {q: asdict(e) for q, e in case.expected.items()}}
            for case in advice.outlook
        ],
        "beats_public_only": all(
            share.beats_public_only for share in advice.outlook[0].expected.values()
        ),
        "verdict": advice.verdict,
        "known_from": how_it_is_known(advice.spending.recipe),
        "released_phrases": advice.phrases_instead,
        "settings": advice.changes,
    }


def _split(advice: Advice) -> list[dict[str, Any]]:
    """Return every release of the run with its separate ε and δ.

    The sum of the separate ε exceeds the total ε by composition.
    """
    training = advice.spending.training
    releases = [(r.event.title, r.event, r.delta) for r in advice.spending.alongside]
    releases.append(("DP pre-training", training.event(), training.delta))
    return [
        {"release": title, "epsilon": epsilon_pld(event, delta), "delta": delta}
        for title, event, delta in releases
    ]


def _show(advice: Advice, split: list[dict[str, Any]], written: Path | None) -> None:
    settings, spending = advice.settings, advice.spending
    write_pairs(
        f"{settings.declared_units:,} units ({settings.unit}), ε ≤ {advice.budget.epsilon:.4g}, "
        f"δ ≤ {advice.budget.delta:.3g} for everything together",
        {
            "batch, expected units": settings.batch_size,
            "updates": settings.updates,
            "passes over the units": settings.epochs,
            "noise multiplier σ": settings.noise_multiplier,
            "bands of noise": spending.training.strategy.bands,
            "ε in total, as charged": spending.epsilon,
            "δ in total": spending.delta,
        },
    )
    if advice.decision is not None:
        click.echo(f"A run of this plan {FITS[advice.decision.way]} (registered budget).")
    write_table(
        "Separate ε and δ of each release (the total is their composition)",
        ["release", "ε", "δ"],
        [list(part.values()) for part in split],
    )
    quantities = list(advice.outlook[0].expected)
    of = "phrases" if spending.phrases else "training"
    write_table(
        "Expected share of the gain without privacy that is kept, with 95% interval",
        ["", "units", f"ε of {of}", "σ", *quantities],
        [
            [
                case.name,
                f"{case.declared_units:,}",
                case.epsilon,
                case.noise_multiplier,
                *map(str, case.expected.values()),
            ]
            for case in advice.outlook
        ],
    )
    click.echo(how_it_is_known(advice.spending.recipe))
    click.echo(advice.verdict)
    if advice.phrases_instead:
        click.echo(advice.phrases_instead)
    if advice.changes:
        options = " ".join(f"--set {name}={value}" for name, value in advice.changes.items())
        click.echo(f"To run it:  confide run … {options}")
    else:
        click.echo("The settings are the advised ones already.")
    if written is not None:
        click.echo(f"Written: {written}  (confide run --settings {written})")
