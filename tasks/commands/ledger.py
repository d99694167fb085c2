"""`confide ledger`: what was spent of each data set's privacy budget, and what is left."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dp_core.errors import BadInput
from tasks.commands.ledger_views import (
    cost_in_json,
    overview,
    record,
    show_cost,
    show_history,
    show_overview,
    show_standing,
)
from tasks.commands.output import as_json, write_json
from tasks.deployment import Deployment

if TYPE_CHECKING:
    from dp_core.privacy.ledger import Ledger, Reservation
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
    """Show every data set's budget, what was released lately, and what a run like the last takes.

    With a subcommand: all of a data set's history, what a run would cost, a new budget.
    """
    if context.invoked_subcommand is not None:
        return
    found = overview(_open())
    if as_json:
        write_json(found)
    else:
        show_overview(found)


@command.command("register")
@click.argument("dataset")
@click.option("--unit", type=click.Choice(["example", "document", "patient"]), required=True)
@click.option("--epsilon", type=float, required=True, help="For everything ever released of it.")
@click.option(
    "--delta", type=float, required=True, help="Of the same guarantee; far below 1/units."
)
@click.option(
    "--relation",
    type=click.Choice(["add-or-remove-one", "zero-out-one", "replace-one"]),
    default="add-or-remove-one",
    show_default=True,
    help="Neighbours: zero-out-one for shuffled, replace-one for fixed-size batches.",
)
@click.option(
    "--order",
    type=float,
    help="Rényi order of the filter, or inf to add up (ε, δ), a run as one; the default has "
    "most room for Gaussian mechanisms.",
)
@click.option("--shares-budget-with", help="A registered data set that may hold the same people.")
@as_json
def register(
    dataset: str,
    unit: str,
    epsilon: float,
    delta: float,
    relation: str,
    order: float | None,
    shares_budget_with: str | None,
    as_json: bool,
) -> None:
    """Open the budget of a private data set. It cannot be raised later."""
    from dp_core.privacy.events import Relation
    from dp_core.privacy.units import PrivacyUnit

    _check_name(dataset)
    ledger = _open()
    ledger.register_dataset(
        dataset,
        PrivacyUnit(unit),
        epsilon,
        delta,
        relation=Relation(relation),
        order=order,
        shares_budget_with=shares_budget_with,
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
    records = [record(entry) for entry in _open().history(dataset)]
    if as_json:
        write_json(records)
    else:
        show_history(f"Releases of {dataset}", records)


@command.command("cost")
@click.argument("job", type=click.Choice(["dp_bert", "dp_sweep"]), default="dp_bert")
@click.option("--set", "words", multiple=True, metavar="KEY=VALUE", help="Change one setting.")
@click.option(
    "--settings",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A JSON object of settings, as for `confide run`.",
)
@as_json
def cost(job: str, words: tuple[str, ...], file: Path | None, as_json: bool) -> None:
    """Say what a run with these settings would cost each data set, before it is started.

    What the ledger holds already (a vocabulary that an earlier run made) costs nothing again.
    """
    from tasks.commands.settings import settings_told
    from tasks.specs import JobSettings, SweepSettings

    settings = settings_told(SweepSettings if job == "dp_sweep" else JobSettings, file, words)
    planned = _planned(settings)
    found = [_cost(name, own, made_up=settings.made_up) for name, own in planned.items()]
    if as_json:
        write_json({**found[0], "others": found[1:]})
        return
    for one in found:
        show_cost(job, one)


@command.command("withdraw")
@click.argument("dataset")
@click.argument("run")
@as_json
def withdraw(dataset: str, run: str, as_json: bool) -> None:
    """Give back what RUN registered of DATASET and never began (no data was read for it).

    The entries stay in the history, as withdrawn; asked for again, they are charged again.
    """
    ledger = _open()
    plans = {e.plan_key for e in ledger.history(dataset) if e.run == run and e.whole_plan}
    gone = [entry for plan in sorted(plans) for entry in ledger.withdraw_plan(dataset, plan)]
    if not gone:
        raise BadInput("that run has registered nothing", where=f"ledger withdraw {run}")
    if as_json:
        write_json([record(entry) for entry in gone])
    else:
        click.echo(f"{len(gone)} planned releases of {dataset} are given back.")


def _check_name(dataset: str) -> None:
    """Refuse a name that no run could use as its `private_dataset`.

    Raises:
        BadInput: it is none.
    """
    from tasks.specs.fields import IN_WORDS, NAME

    if not re.fullmatch(NAME, dataset):
        raise BadInput(
            f"{dataset!r} is no name of a data set",
            where="ledger register",
            fix=f"It must be {IN_WORDS[NAME]}.",
        )


def _planned(settings: JobSettings) -> dict[str, list[Reservation]]:
    """Return every release that a run would register, by data set."""
    from dp_core.privacy.ledger import Reservation
    from tasks.plans import planned_release
    from tasks.specs import BudgetSpec, SweepSettings, dp_bert_steps, sweep_point_steps

    root = Deployment.from_environment().store
    if isinstance(settings, SweepSettings):
        budget = sweep_point_steps(settings, settings.points()[0], root)["budget"]
    else:
        budget = dp_bert_steps(settings, root)["budget"]
    assert isinstance(budget, BudgetSpec)  # noqa: S101 - narrows the type
    planned: dict[str, list[Reservation]] = {}
    for spec in budget.charged:
        release = planned_release(spec)
        reservation = Reservation(spec_hash=spec.digest(), **vars(release))
        planned.setdefault(release.dataset, []).append(reservation)
    return planned


def _cost(dataset: str, planned: list[Reservation], *, made_up: bool) -> dict[str, Any]:
    from dp_core.privacy.ledger import Cost
    from dp_core.privacy.statement import total_epsilon
    from tasks.specs.data_settings import MADE_UP

    ledger = _open()
    if (made_up or dataset == MADE_UP) and dataset not in ledger.datasets():
        # The run registers it, without a limit: nobody has to.
        cost = Cost(None, 0.0, True, 1.0, None, len(planned))
    else:
        cost = ledger.cost_of_plan(planned)
    delta = sum(release.delta for release in planned)
    return {
        "dataset": dataset,
        "releases": len(planned),
        "epsilon": total_epsilon([release.event for release in planned], delta),
        "delta": delta,
        **cost_in_json(cost),
    }


def _show_remaining(ledger: Ledger, dataset: str, as_json: bool) -> None:
    found = ledger.remaining(dataset)
    if as_json:
        write_json(found.to_json())
    else:
        show_standing(dataset, found.to_json())
