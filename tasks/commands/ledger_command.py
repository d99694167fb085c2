"""`confide ledger`: registers privacy budgets; shows budgets, releases, and the next run's cost."""

import re
from typing import Any

import click

from dp_core.config.fields import IN_WORDS, NAME
from dp_core.errors import BadInput, BudgetExceeded
from dp_core.privacy.ledger import AdmissionDecision, Entry, Ledger, PublicSource, Way
from dp_core.privacy.statement import epsilons, total_epsilon
from tasks.commands.command_options import options_of
from tasks.commands.output import as_json, write_answer, write_pairs, write_prose, write_records
from tasks.commands.settings_options import (
    JOBS,
    absolute,
    job_argument,
    settings_of_options,
    settings_options,
)
from tasks.protocol.job import budget_of_run
from tasks.protocol.settings import MADE_UP, JobSettings
from tasks.releases import declarations
from tasks.releases.charge import plans_of
from tasks.releases.deployment_ledger import killed_runs, open_ledger, refuse_other_standing
from tasks.runtime.deployment import Deployment

LATEST = 20  # releases that the overview shows: an ε takes a moment to compute
FITS: dict[str | None, str] = {
    "one plan": "fits as the budget's one plan, which closes it",
    "any sequence": "fits next to later runs",
}
_ADMITS: dict[str | None, str] = {
    None: "one or the other: decided by the first run, before its first release",
    "one plan": "nothing more: it is closed for its one plan",
    "any sequence": "any sequence of releases that the filter admits",
}


def _open() -> Ledger:
    deployment = Deployment.from_environment()
    deployment.prepare()
    return open_ledger(deployment)


@click.group("ledger", invoke_without_command=True)
@as_json
@click.pass_context
def command(context: click.Context) -> None:
    """Show each data set's budget and its latest releases.

    Subcommands show a data set's history or the cost of a run, and register a new budget.

    Example:
      confide ledger
      confide ledger register ward-notes --unit patient --epsilon 8 --delta 1e-5
    """
    if context.invoked_subcommand is not None:
        return
    ledger = _open()
    budgets, public = overview(ledger), ledger.sources.public()
    write_answer(budgets, lambda: show_overview(budgets, public))


@command.command("register")
@click.argument("dataset")
@options_of("ledger register")
@as_json
def register(dataset: str, public: bool, **terms: Any) -> None:
    """Register the budget of a private data set. It cannot be raised later.

    A public data set has no budget (--public); declare its files by declare-public.

    Example:
      confide ledger register ward-notes --unit patient --epsilon 8 --delta 1e-5
    """
    check_name(dataset)
    ledger = _open()
    if public:
        if set(terms.values()) != {None}:
            raise BadInput("a public data set has no budget", where="ledger register --public")
        ledger.register_made_up(dataset)
    else:
        if None in (terms["unit"], terms["budget_epsilon"], terms["budget_delta"]):
            raise BadInput(
                "a private data set needs --unit, --epsilon and --delta",
                where=f"ledger register {dataset}",
            )
        ledger.register_dataset(dataset, **terms)
    _write_standing(ledger, dataset)


@command.command("declare-public")
@click.argument("paths", nargs=-1)
@options_of("ledger declare-public")
@as_json
def declare_public(paths: tuple[str, ...], known_private: bool) -> None:
    """Declare files and folders public (local or gs://).

    Without PATHS, the declarations are listed. Runs read only declared files as public
    (public_path, entities_public, public_model, all_public). A declaration holds for the content:
    declare changed files again.

    Example:
      confide ledger declare-public wikipedia/
    """
    deployment = Deployment.from_environment()
    deployment.prepare()
    for path in paths:
        uri = path if "://" in path else absolute("declare-public", path)
        declarations.declare_public(uri, deployment, known_private=known_private)
    public = _open().sources.public()
    write_answer([public_source(source) for source in public], lambda: show_public(public))


@command.command("withdraw-public")
@click.argument("digest")
def withdraw_public(digest: str) -> None:
    """Withdraw the declaration of a public file or folder.

    The table of declare-public shows its DIGEST. No step reads the file as public from now on.
    Existing outputs remain.

    Example:
      confide ledger withdraw-public 3f9a2c
    """
    click.echo(f"{_open().sources.withdraw_public(digest).label} is no longer declared public.")


@command.command("remaining")
@click.argument("dataset")
@as_json
def remaining(dataset: str) -> None:
    """Show the spent and the remaining part of a budget.

    Example:
      confide ledger remaining ward-notes
    """
    _write_standing(_open(), dataset)


def _write_standing(ledger: Ledger, dataset: str) -> None:
    standing = ledger.remaining(dataset).to_json()
    write_answer(standing, lambda: show_standing(dataset, standing))


@command.command("history")
@click.argument("dataset")
@as_json
def history(dataset: str) -> None:
    """Show every release that is charged to a budget.

    The list also has the releases of the data sets that share the budget of DATASET.

    Example:
      confide ledger history ward-notes
    """
    records = [record(entry) for entry in _open().history(dataset)]
    write_answer(records, lambda: show_history(f"Releases of {dataset}", records))


@command.command("cost")
@job_argument
@settings_options
@as_json
def cost(job: str, **options: Any) -> int:
    """Show a run's cost to each budget, without starting it.

    Releases that the ledger holds already (such as an earlier run's vocabulary) are free. The exit
    code is 3 if the run would be refused.

    Example:
      confide ledger cost --settings settings.json
    """
    settings = settings_of_options(JOBS[job], **options)
    ledger = _open()
    plans = plans_of(budget_of_run(settings).charged, ledger.datasets())
    costs = [_cost(ledger, plan, made_up=settings.made_up) for plan in plans.values()]
    answer = {**costs[0], "others": costs[1:]}
    write_answer(answer, lambda: _show_costs(job, settings, costs))
    return 0 if all(cost["fits"] for cost in costs) else BudgetExceeded.exit_code


def _show_costs(job: str, settings: JobSettings, costs: list[dict[str, Any]]) -> None:
    for cost in costs:
        show_cost(job, cost)
    if settings.vocabulary_source == "nonprivate":
        write_prose(
            "The vocabulary is of exact private counts: nothing made with it has a finite ε, and"
            " all of it stays with the operator."
        )
    elif not settings.releases_private_words:
        write_prose("The vocabulary costs nothing (ε 0): it is made of public text alone.")


@command.command("withdraw")
@click.argument("dataset")
@click.argument("run")
@as_json
def withdraw(dataset: str, run: str) -> None:
    """Give back the planned releases of a run.

    RUN registered them for DATASET and never began to compute them. The entries remain in the
    history as withdrawn. If the run is repeated, they are charged again.

    Example:
      confide ledger withdraw ward-notes cli/dp_bert/2026-11-26T09:30:00/123456789
    """
    ledger = _open()
    plans = {e.plan_key for e in ledger.history(dataset) if e.run == run and e.whole_plan}
    gone = [entry for plan in sorted(plans) for entry in ledger.withdraw_plan(dataset, plan)]
    if not gone:
        raise BadInput("that run has registered nothing", where=f"ledger withdraw {run}")
    said = f"{len(gone)} planned releases of {dataset} are given back."
    write_answer([record(entry) for entry in gone], lambda: click.echo(said))


def check_name(dataset: str) -> None:
    """Refuse a name that is not allowed as a run's `private_dataset`.

    Raises:
        BadInput: the name is invalid or reserved.
    """
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


def _cost(ledger: Ledger, planned: list[Entry], *, made_up: bool) -> dict[str, Any]:
    datasets, budgets = dict.fromkeys(r.dataset for r in planned), ledger.datasets()
    if MADE_UP in datasets and MADE_UP not in budgets:
        # The run registers it, without a limit.
        cost = AdmissionDecision(Way.SEQUENCE, None, 0.0, 1.0, None, len(planned))
    else:
        for name in datasets:
            refuse_other_standing(budgets.get(name), name, made_up=made_up, plan=planned)
        # The run would first give back the plans of killed ones.
        killed = killed_runs(Deployment.from_environment())
        cost = ledger.cost_of_plan(planned, killed.__contains__)
    delta = sum(release.delta for release in planned)
    return {
        "dataset": " and ".join(datasets),
        "releases": len(planned),
        "epsilon": total_epsilon([release.event for release in planned], delta),
        "delta": delta,
        **cost.to_json(),
    }


# --- views


def overview(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """Return each data set's budget and its latest releases."""
    budgets = {}
    for name in ledger.datasets():
        entries = ledger.history(name)
        standing = ledger.remaining(name).to_json()
        budgets[name] = {
            **standing,
            "left": None if standing["epsilon"] is None else max(0.0, 1 - standing["share"]),
            "history": [record(entry) for entry in entries[-LATEST:]],
            "same_files_as": list(ledger.sources.same_files_as(name)),
        }
    return budgets


def show_overview(budgets: dict[str, dict[str, Any]], public: list[PublicSource]) -> None:
    """Write budgets, releases and public sources."""
    columns = {
        "data set": lambda row: row[0],
        "unit": lambda row: row[1]["unit"] or "made up",
        "neighbours": lambda row: row[1]["relation"],
        "ε": lambda row: row[1]["epsilon"],
        "δ": lambda row: row[1]["delta"],
        "spent": lambda row: None if row[1]["left"] is None else f"{row[1]['share']:.1%}",
        "releases": lambda row: row[1]["charged_entries"],
    }
    write_records("Privacy budgets", columns, budgets.items())
    seen = {r["id"]: r for budget in budgets.values() for r in budget["history"]}
    if latest := sorted(seen.values(), key=lambda r: str(r["reserved_at"]))[-LATEST:]:
        show_history("Latest releases", latest)
    for name, budget in budgets.items():
        if others := budget["same_files_as"]:
            write_prose(
                f"WARNING: {name} and {', '.join(others)} were read from the same files and have "
                "separate budgets: the sum of the budgets can be spent on the same people."
            )
    write_prose(
        "More: confide ledger remaining NAME, history NAME. Before a run: confide ledger cost."
        if budgets
        else "No data set is registered yet: confide ledger register --help."
    )
    if public:
        show_public(public)


def public_source(source: PublicSource) -> dict[str, Any]:
    """Return a declaration as JSON data."""
    return {
        "source": source.label,
        "digest": source.mark,
        "declared_at": source.declared_at,
        "private_in": list(source.private_in),
        "holds": source.holds,
    }


def show_public(sources: list[PublicSource]) -> None:
    """Write the table of sources that are declared public."""
    columns = {
        "source": lambda source: source.label,
        "digest": lambda source: source.mark,
        "declared": lambda source: _minute(source.declared_at),
        "read as private in": lambda source: ", ".join(source.private_in),
        "holds": lambda source: "yes" if source.holds else "NO: declare it with --known-private",
    }
    write_records("Declared public", columns, sources)


def _minute(moment: str) -> str:
    return moment[:16].replace("T", " ")


def show_history(title: str, records: list[dict[str, Any]]) -> None:
    """Write one release per row, then the runs' full names, which `withdraw` needs."""
    names = dict.fromkeys(r["run"] for r in records if r["run"])
    runs = {run: number for number, run in enumerate(names, start=1)}
    columns = {
        "entry": lambda r: r["id"][:8],
        "data set": lambda r: r["dataset"],
        "release": lambda r: r["release"] + (", ε by RDP" if r["epsilon_by"] == "rdp" else ""),
        "ε (PLD)": lambda r: r["epsilon"],
        "δ": lambda r: r["delta"],
        "state": lambda r: r["state"],
        "reserved": lambda r: _minute(r["reserved_at"]),
        "run": lambda r: runs.get(r["run"]),
    }
    write_records(title, columns, records)
    for run, number in runs.items():
        click.echo(f"run {number}: {run}")
    if records:
        click.echo(
            "planned: nothing read yet, can be withdrawn; reserved: begun; settled: released."
        )


def record(entry: Entry) -> dict[str, Any]:
    """Return a release with its ε, computed from the recorded mechanism."""
    by_pld, by_rdp = epsilons(entry.event, entry.delta)
    return entry.to_json() | {
        "release": entry.event.title,
        "mechanism": entry.event.describe(),
        "epsilon": by_pld,
        "epsilon_by": "rdp" if entry.event.claimed_by_rdp else "pld",  # no PLD is known
        "epsilon_rdp": by_rdp,
    }


def show_standing(dataset: str, standing: dict[str, Any]) -> None:
    """Write a budget: its terms, the capacity of both ways, and the spent part."""
    if standing["epsilon"] is None:
        rows: dict[str, object] = {"budget": "none: the data are made up"}
    else:
        way = standing["way"]
        plan, filtered = (standing["ways"][name] for name in ("one plan", "any sequence"))
        infinite = standing["renyi_order"] == "infinity"
        unit = "ε" if infinite else "ρ"
        order = "" if infinite else f" at Rényi order {standing['renyi_order']:g}"
        kept = " (a study: everything stays with the operator)" if standing["of_study"] else ""
        rows = {
            "unit": standing["unit"],
            "neighbours": standing["relation"],
            "ε": f"{standing['epsilon']:g}{kept}",
            "δ": standing["delta"],
            "one plan, fixed before its first release": (
                f"ε up to {plan['rho']:g} at δ {plan['delta']:g}, by PLD; then closed"
            ),
            "or any sequence of releases": (
                f"{unit} up to {filtered['rho']:.4g}{order}, δ up to {filtered['delta']:.3g}"
            ),
            "admits": _ADMITS[way],
            "spent": f"{standing['share']:.1%}",
        }
        if way == "any sequence":
            spent = standing["spent"]
            rows |= {f"{unit} spent": spent["rho"], "δ spent": spent["delta"]}
    rows |= {
        "releases": standing["charged_entries"],
        "of them not settled": standing["unsettled"],
        "the operator's, without guarantee": standing["operator_releases"],
    }
    if standing["budget"] != dataset:
        rows = {"shares the budget of": standing["budget"], **rows}
    write_pairs(f"Budget of {dataset}", rows)


def show_cost(job: str, cost: dict[str, Any]) -> None:
    """Write the cost of the next run to one data set."""
    limited, new = cost["charge"] is not None, cost["new_releases"]
    said = "DOES NOT FIT: it would be refused before it begins"
    if cost["fits"]:
        said = "fits" if not limited else FITS[cost["way"]]
    if not new:
        said = "nothing new: the ledger holds all of it"
    rows = {
        "releases": cost["releases"],
        "of them new": new,
        "ε of them together": cost["epsilon"],
        "δ of them together": cost["delta"],
        "share of the budget": f"{cost['share']:.1%}" if limited else "no limit",
        "left after it": f"{cost['left_after']:.1%}" if limited else "no limit",
    }
    if limited and new:
        rows["how many such runs fit from now on"] = cost["more_of_the_same"]
    write_pairs(f"The next {job} on {cost['dataset']}: {said}", rows)
    if cost["refusal"]:
        write_prose(f"Why: {cost['refusal']}.")
