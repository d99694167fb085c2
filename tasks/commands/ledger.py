"""`confide ledger`: what was spent of each data set's privacy budget, and what is left."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tasks.commands.output import as_json, write_json, write_pairs, write_table
from tasks.deployment import Deployment

if TYPE_CHECKING:
    from dp_core.privacy.events import MechanismEvent
    from dp_core.privacy.ledger import Entry, Ledger
    from tasks.specs import JobSettings


def _open() -> Ledger:
    from dp_core.privacy.ledger import Ledger

    deployment = Deployment.from_environment()
    deployment.prepare()
    return Ledger.open(deployment.ledger)


@click.group("ledger", invoke_without_command=True)
@as_json
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """Show every data set's budget; with a subcommand, more of it, or register a new one."""
    if context.invoked_subcommand is not None:
        return
    ledger = _open()
    standing = {name: ledger.remaining(name) for name in ledger.datasets()}
    if as_json:
        write_json({name: remaining.to_json() for name, remaining in standing.items()})
        return
    write_table(
        "Privacy budgets",
        ["data set", "unit", "ε", "δ", "spent", "releases", "unsettled", "operator's"],
        [
            [
                name,
                r.budget.unit or "made up",
                r.budget.epsilon,
                r.budget.delta,
                "–" if r.budget.made_up else f"{r.share:.1%}",
                r.charged_entries,
                r.unsettled,
                r.operator_releases,
            ]
            for name, r in standing.items()
        ],
    )


@command.command("register")
@click.argument("dataset")
@click.option("--unit", type=click.Choice(["example", "document", "patient"]), required=True)
@click.option("--epsilon", type=float, required=True, help="For everything ever released of it.")
@click.option("--delta", type=float, required=True, help="Of the same guarantee.")
@click.option("--shares-budget-with", help="A registered data set that may hold the same people.")
@as_json
def register(
    dataset: str,
    unit: str,
    epsilon: float,
    delta: float,
    shares_budget_with: str | None,
    as_json: bool,
) -> None:
    """Open the budget of a private data set. It cannot be raised later."""
    from dp_core.privacy.units import PrivacyUnit

    ledger = _open()
    ledger.register_dataset(
        dataset, PrivacyUnit(unit), epsilon, delta, shares_budget_with=shares_budget_with
    )
    _show_remaining(ledger, dataset, as_json)


@command.command("remaining")
@click.argument("dataset")
@as_json
def remaining(dataset: str, as_json: bool) -> None:
    """Show how a data set's budget stands."""
    _show_remaining(_open(), dataset, as_json)


@command.command("history")
@click.argument("dataset")
@as_json
def history(dataset: str, as_json: bool) -> None:
    """Show every release of a data set, and of those that share its budget."""
    entries = _open().history(dataset)
    records = [_record(entry) for entry in entries]
    if as_json:
        write_json(records)
        return
    write_table(
        f"Releases of {dataset}",
        ["entry", "release", "ε (PLD)", "δ", "state", "reserved", "run"],
        [
            [
                r["id"][:8],
                r["release"],
                r["epsilon"],
                r["delta"],
                r["state"],
                r["reserved_at"][:16].replace("T", " "),
                r["run"],
            ]
            for r in records
        ],
    )


@command.command("next-cost")
@click.option("--set", "words", multiple=True, metavar="KEY=VALUE", help="Change one setting.")
@click.option(
    "--settings",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A JSON object of settings, as for `confide run`.",
)
@as_json
def next_cost(words: tuple[str, ...], file: Path | None, as_json: bool) -> None:
    """Say what a job with these settings would cost its data set, before it is run."""
    from tasks.commands.settings import settings_from
    from tasks.specs import JobSettings

    settings = settings_from(JobSettings, file, words)
    cost = _open().cost_of_next(settings.private_dataset, planned_releases(settings))
    found = {
        "dataset": settings.private_dataset,
        "fits": cost.fits,
        "share_of_budget": cost.share,
        "left_after": cost.left_after,
        "more_of_the_same": cost.more_of_the_same,
    }
    if as_json:
        write_json(found)
    else:
        write_pairs("The next run, unless its results are there already", found)


def planned_releases(settings: JobSettings) -> list[tuple[MechanismEvent, float]]:
    """Return (event, δ) of every release that a job makes: vocabulary, then training."""
    from dp_core.privacy.plan import TrainingPlan
    from dp_core.privacy.units import PrivacyUnit
    from dp_core.vocab.calibration import calibrate

    unit = PrivacyUnit(settings.unit)
    histogram = calibrate(
        settings.vocabulary_epsilon,
        settings.vocabulary_delta,
        settings.words_per_unit,
        unit=unit,
        declared_units=settings.declared_units,
    )
    training = TrainingPlan.poisson(
        unit=unit,
        declared_units=settings.declared_units,
        expected_batch=settings.batch_size,
        steps=settings.updates,
        noise_multiplier=settings.noise_multiplier,
        clip_norm=settings.clip_norm,
        delta=settings.delta,
        examples_per_step=settings.examples_per_step,
    )
    return [(histogram.event(), settings.vocabulary_delta), (training.event(), settings.delta)]


def _show_remaining(ledger: Ledger, dataset: str, as_json: bool) -> None:
    found = ledger.remaining(dataset)
    if as_json:
        write_json(found.to_json())
    else:
        write_pairs(f"Budget of {dataset}", found.to_json())


def _record(entry: Entry) -> dict[str, Any]:
    from dp_core.privacy.accounting import epsilon_pld, epsilon_rdp
    from dp_core.privacy.mechanism_words import describe
    from tasks.statements import release_in_words

    epsilon = epsilon_pld(entry.event, entry.delta) if entry.accounted else float("inf")
    rdp = epsilon_rdp(entry.event, entry.delta) if entry.accounted else None
    words: dict[str, Any] = {
        "release": release_in_words(entry.event),
        "mechanism": describe(entry.event),
        "epsilon": epsilon,
        "epsilon_rdp": rdp,
    }
    return entry.to_json() | words
