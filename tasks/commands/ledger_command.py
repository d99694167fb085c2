"""`confide ledger`: shows and registers the privacy budgets of data sets."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from dp_core.errors import BadInput, BudgetExceeded
from tasks.commands.ledger_views import (
    cost_in_json,
    overview,
    public_source,
    record,
    show_cost,
    show_history,
    show_overview,
    show_public,
    show_standing,
)
from tasks.commands.output import as_json, write_json
from tasks.commands.settings_options import (
    SettingsOptions,
    absolute,
    settings_of_options,
    settings_options,
)
from tasks.commands.training_options import check_delta, check_epsilon
from tasks.runtime.deployment import Deployment

if TYPE_CHECKING:
    from dp_core.privacy.ledger import Ledger, Reservation
    from tasks.protocol import JobSettings


def _open() -> Ledger:
    from tasks.releases.deployment_ledger import open_ledger

    deployment = Deployment.from_environment()
    deployment.prepare()
    return open_ledger(deployment)


@click.group("ledger", invoke_without_command=True)
@as_json
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """Show each data set's budget, its latest releases, and the cost of repeating the last run.

    Subcommands show a data set's history or the cost of a run, and register a new budget.
    """
    if context.invoked_subcommand is not None:
        return
    ledger = _open()
    found = overview(ledger)
    if as_json:
        write_json(found)
        return
    show_overview(found)
    if public := ledger.sources.public():
        show_public([public_source(source) for source in public])


@command.command("register")
@click.argument("dataset")
@click.option("--unit", type=click.Choice(["example", "document", "patient"]))
@click.option("--epsilon", type=float, help="ε of all releases of the data set together.")
@click.option("--delta", type=float, help="δ of the same guarantee; far below 1/units.")
@click.option(
    "--public",
    is_flag=True,
    help="The data set is public or made up: no budget, for runs with all_public.",
)
@click.option(
    "--relation",
    type=click.Choice(["add-or-remove-one", "zero-out-one", "replace-one"]),
    default="add-or-remove-one",
    show_default=True,
    help="Neighbouring relation. Confide's trainings need the default.",
)
@click.option(
    "--order",
    type=float,
    help="Rényi order of the filter, or inf to add up (ε, δ) run by run; the default admits the "
    "most Gaussian mechanisms.",
)
@click.option("--shares-budget-with", help="A registered data set that may hold the same people.")
@as_json
def register(
    dataset: str,
    unit: str | None,
    epsilon: float | None,
    delta: float | None,
    public: bool,
    relation: str,
    order: float | None,
    shares_budget_with: str | None,
    as_json: bool,
) -> None:
    """Register the budget of a private data set. It cannot be raised later.

    A public data set has no budget (--public); declare its files by declare-public.
    """
    from dp_core.privacy.mechanisms import NeighboringRelation, PrivacyUnit

    _check_name(dataset)
    ledger = _open()
    if public:
        if {unit, epsilon, delta, order, shares_budget_with} != {None}:
            raise BadInput("a public data set has no budget", where="ledger register --public")
        ledger.register_made_up(dataset)
        _show_remaining(ledger, dataset, as_json)
        return
    if unit is None or epsilon is None or delta is None:
        raise BadInput(
            "a private data set needs --unit, --epsilon and --delta",
            where=f"ledger register {dataset}",
        )
    check_epsilon(epsilon)
    check_delta(delta, None)
    ledger.register_dataset(
        dataset,
        PrivacyUnit(unit),
        epsilon,
        delta,
        relation=NeighboringRelation(relation),
        order=order,
        shares_budget_with=shares_budget_with,
    )
    _show_remaining(ledger, dataset, as_json)


@command.command("declare-public")
@click.argument("paths", nargs=-1)
@click.option(
    "--known-private", is_flag=True, help="Allow files that were read as private text before."
)
@as_json
def declare_public(paths: tuple[str, ...], known_private: bool, as_json: bool) -> None:
    """Declare files and folders public (local or gs://); without PATHS, list the declarations.

    Runs read only declared files as public (public_path, entities_public, public_model,
    all_public). A declaration holds for the content: declare changed files again.
    """
    from tasks.releases import declarations

    deployment = Deployment.from_environment()
    deployment.prepare()
    for path in paths:
        uri = path if "://" in path else absolute("declare-public", path)
        declarations.declare_public(uri, deployment, known_private=known_private)
    found = [public_source(source) for source in _open().sources.public()]
    if as_json:
        write_json(found)
    else:
        show_public(found)


@command.command("withdraw-public")
@click.argument("digest")
def withdraw_public(digest: str) -> None:
    """Withdraw the declaration of a public file or folder by the DIGEST that declare-public shows.

    No step reads the file as public from now on. Existing outputs remain.
    """
    click.echo(f"{_open().sources.withdraw_public(digest).label} is no longer declared public.")


@command.command("remaining")
@click.argument("dataset")
@as_json
def remaining(dataset: str, as_json: bool) -> None:
    """Show the spent and the remaining part of a data set's budget."""
    _show_remaining(_open(), dataset, as_json)


@command.command("history")
@click.argument("dataset")
@as_json
def history(dataset: str, as_json: bool) -> None:
    """Show every release of a data set and of the data sets that share its budget."""
    records = [record(entry) for entry in _open().history(dataset)]
    if as_json:
        write_json(records)
    else:
        show_history(f"Releases of {dataset}", records)


@command.command("cost")
@click.argument("job", type=click.Choice(["dp_bert", "dp_sweep"]), default="dp_bert")
@settings_options
@as_json
def cost(job: str, options: SettingsOptions, as_json: bool) -> None:
    """Show the cost of a run with these settings to each data set, without starting it.

    Releases that the ledger holds already (such as an earlier run's vocabulary) are free. The exit
    code is 3 if the run would be refused.
    """
    from tasks.protocol import JobSettings, SweepSettings

    settings = settings_of_options(SweepSettings if job == "dp_sweep" else JobSettings, options)
    planned = _planned(settings)
    costs = [_cost(name, plan, made_up=settings.made_up) for name, plan in planned.items()]
    if as_json:
        write_json({**costs[0], "others": costs[1:]})
    else:
        _show_costs(job, settings, costs)
    if not all(cost["fits"] for cost in costs):
        click.get_current_context().exit(BudgetExceeded.exit_code)


def _show_costs(job: str, settings: JobSettings, costs: list[dict[str, Any]]) -> None:
    for cost in costs:
        show_cost(job, cost)
    if settings.vocabulary_source == "nonprivate":
        click.echo(
            "The vocabulary is of exact private counts: nothing made with it has a finite ε, and"
            " all of it stays with the operator."
        )
    elif not settings.releases_private_words:
        click.echo("The vocabulary costs nothing (ε 0): it is made of public text alone.")


@command.command("withdraw")
@click.argument("dataset")
@click.argument("run")
@as_json
def withdraw(dataset: str, run: str, as_json: bool) -> None:
    """Give back the releases of DATASET that RUN registered and never began to compute.

    The entries remain in the history as withdrawn. If the run is repeated, they are charged again.
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
    """Refuse a name that is not allowed as a run's `private_dataset`.

    Raises:
        BadInput: the name is invalid or reserved.
    """
    from dp_core.config.fields import IN_WORDS, NAME
    from tasks.protocol.settings import MADE_UP

    if not re.fullmatch(NAME, dataset):
        raise BadInput(
            f"{dataset!r} is no name of a data set",
            where="ledger register",
            fix=f"It must be {IN_WORDS[NAME]}.",
        )
    if dataset.casefold() == MADE_UP:
        raise BadInput(
            "the project's own made-up notes have that name",
            where=f"ledger register {dataset}",
            fix="Choose another name for your data set.",
        )


def _planned(settings: JobSettings) -> dict[str, list[Reservation]]:
    """Return every release that a run would register, by data set."""
    from tasks.protocol import budget_of_run
    from tasks.releases.charge import reservations_of

    return reservations_of(budget_of_run(settings).charged)


def _cost(dataset: str, planned: list[Reservation], *, made_up: bool) -> dict[str, Any]:
    from dp_core.privacy.ledger import AdmissionDecision, Way
    from dp_core.privacy.statement import total_epsilon
    from tasks.protocol.settings import MADE_UP
    from tasks.releases.deployment_ledger import refuse_other_standing
    from tasks.releases.unfinished_runs import killed_runs

    ledger = _open()
    budget = ledger.datasets().get(dataset)
    if dataset == MADE_UP and budget is None:
        # The run registers it, without a limit.
        cost = AdmissionDecision(Way.SEQUENCE, None, 0.0, 1.0, None, len(planned))
    else:
        refuse_other_standing(budget, dataset, made_up=made_up)
        # The run would first give back the plans of killed ones.
        killed = killed_runs(Deployment.from_environment())
        cost = ledger.cost_of_plan(planned, killed.__contains__)
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
