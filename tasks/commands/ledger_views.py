"""Views of the ledger: budgets, latest releases, and the cost of the next run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tasks.commands.output import write_pairs, write_table

if TYPE_CHECKING:
    from dp_core.privacy.ledger import AdmissionDecision, Entry, Ledger, PublicSource

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
_NEIGHBOURS = {
    "add-or-remove-one": "add/remove",
    "zero-out-one": "zero out",
    "replace-one": "replace",
}


def overview(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """Return each data set's budget, latest releases, and the cost of repeating the last run."""
    found = {}
    for name in ledger.datasets():
        entries = ledger.history(name)
        standing = ledger.remaining(name).to_json()
        found[name] = {
            **standing,
            "left": None if standing["epsilon"] is None else max(0.0, 1 - standing["share"]),
            "history": [record(entry) for entry in entries[-LATEST:]],
            "like_the_last_run": _like_the_last(ledger, name, entries),
            "same_files_as": list(ledger.sources.same_files_as(name)),
        }
    return found


def show_overview(found: dict[str, dict[str, Any]]) -> None:
    """Write the overview as tables, and a line for every run that may not fit again."""
    columns = ["data set", "unit", "neighbours", "ε", "δ", "spent", "releases", "open"]
    free = any(one["operator_releases"] for one in found.values())
    write_table(
        "Privacy budgets",
        [*columns, "operator's"] if free else columns,
        [
            [
                name,
                one["unit"] or "made up",
                _NEIGHBOURS.get(one["relation"], "–"),
                one["epsilon"],
                one["delta"],
                "–" if one["left"] is None else f"{one['share']:.1%}",
                one["charged_entries"],
                one["unsettled"],
                *([one["operator_releases"]] if free else []),
            ]
            for name, one in found.items()
        ],
        whole=["data set"],
    )
    seen = {r["id"]: r for one in found.values() for r in one["history"]}
    if seen:
        latest = sorted(seen.values(), key=lambda r: str(r["reserved_at"]))[-LATEST:]
        show_history("Latest releases", latest, with_dataset=len(found) > 1)
    for name, one in found.items():
        if said := _warning(name, one["like_the_last_run"]):
            click.echo(said)
        if others := one["same_files_as"]:
            click.echo(
                f"WARNING: {name} and {', '.join(others)} were read from the same files and have "
                "separate budgets: the sum of the budgets can be spent on the same people."
            )
    click.echo(
        "All releases: confide ledger history NAME. Before a run: confide ledger cost."
        if found
        else "No data set is registered yet: confide ledger register --help."
    )


def public_source(source: PublicSource) -> dict[str, Any]:
    """Return a declaration as JSON data."""
    return {
        "source": source.label,
        "digest": source.mark,
        "declared_at": source.declared_at,
        "private_in": list(source.private_in),
        "holds": source.holds,
    }


def show_public(found: list[dict[str, Any]]) -> None:
    """Write the table of sources that are declared public."""
    write_table(
        "Declared public",
        ["source", "digest", "declared", "read as private in", "holds"],
        [
            [
                one["source"],
                one["digest"],
                one["declared_at"][:16].replace("T", " "),
                ", ".join(one["private_in"]),
                "yes" if one["holds"] else "NO: declare it with --known-private",
            ]
            for one in found
        ],
        whole=["digest"],
        prose=["source", "holds"],
    )


def show_history(title: str, records: list[dict[str, Any]], *, with_dataset: bool = False) -> None:
    """Write one release per row, then the runs' full names, which `withdraw` needs."""
    columns = ["entry", "release", "ε (PLD)", "δ", "state", "reserved", "run"]
    names = dict.fromkeys(r["run"] for r in records if r["run"])
    runs = {run: number for number, run in enumerate(names, start=1)}
    write_table(
        title,
        ["data set", *columns] if with_dataset else columns,
        [
            [
                *([r["dataset"]] if with_dataset else []),
                r["id"][:8],
                r["release"] + (", ε by RDP" if r["epsilon_by"] == "rdp" else ""),
                r["epsilon"],
                r["delta"],
                r["state"],
                r["reserved_at"][:16].replace("T", " "),
                runs.get(r["run"]),
            ]
            for r in records
        ],
        whole=["entry", "ε (PLD)", "δ", "state", "run"],
        prose=["release"],
    )
    for run, number in runs.items():
        click.echo(f"run {number}: {run}")
    if records:
        click.echo(
            "planned: nothing read yet, can be withdrawn; reserved: begun; settled: released."
        )


def record(entry: Entry) -> dict[str, Any]:
    """Return a release with its ε, computed from the recorded mechanism."""
    from dp_core.privacy.accounting import epsilon_pld, epsilon_rdp

    epsilon = epsilon_pld(entry.event, entry.delta) if entry.accounted else float("inf")
    rdp = epsilon_rdp(entry.event, entry.delta) if entry.accounted else None
    words: dict[str, Any] = {
        "release": entry.event.title,
        "mechanism": entry.event.describe(),
        "epsilon": epsilon,
        "epsilon_by": "rdp" if entry.event.claimed_by_rdp else "pld",  # no PLD is known
        "epsilon_rdp": rdp,
    }
    return entry.to_json() | words


def cost_in_json(cost: AdmissionDecision) -> dict[str, Any]:
    """Return the cost of a run as JSON data."""
    return {
        "fits": cost.fits,
        "way": cost.way,
        "refusal": cost.refusal,
        "share_of_budget": cost.share,
        "left_after": cost.left_after,
        "more_of_the_same": cost.more_of_the_same,
        "new_releases": cost.new_releases,
        "limited": cost.charge is not None,
    }


def show_standing(dataset: str, found: dict[str, Any]) -> None:
    """Write a budget: its terms, the capacity of both ways, and the spent part."""
    if found["epsilon"] is None:
        rows: dict[str, object] = {"budget": "none: the data are made up"}
    else:
        way = found["way"]
        plan, filtered = (found["ways"][name] for name in ("one plan", "any sequence"))
        infinite = found["renyi_order"] == "infinity"
        order = "" if infinite else f" at Rényi order {found['renyi_order']:g}"
        rows = {
            "unit": found["unit"],
            "neighbours": found["relation"],
            "ε": found["epsilon"],
            "δ": found["delta"],
            "one plan, fixed before its first release": (
                f"ε up to {plan['rho']:g} at δ {plan['delta']:g}, by PLD; then closed"
            ),
            "or any sequence of releases": (
                f"{'ε' if infinite else 'ρ'} up to {filtered['rho']:.4g}{order}, "
                f"δ up to {filtered['delta']:.3g}"
            ),
            "admits": _ADMITS[way],
            "spent": f"{found['share']:.1%}",
        }
        if way == "any sequence":
            spent = found["spent"]
            rows[f"{'ε' if infinite else 'ρ'} spent"] = f"{spent['rho']:.4g}"
            rows["δ spent"] = f"{spent['delta']:.3g}"
    rows |= {
        "releases": found["charged_entries"],
        "of them not settled": found["unsettled"],
        "the operator's, without guarantee": found["operator_releases"],
    }
    if found["budget"] != dataset:
        rows = {"shares the budget of": found["budget"], **rows}
    write_pairs(f"Budget of {dataset}", rows)


def show_cost(job: str, found: dict[str, Any]) -> None:
    """Write the cost of the next run to one data set."""
    limited, new = found["limited"], found["new_releases"]
    said = "DOES NOT FIT: it would be refused before it begins"
    if found["fits"]:
        said = "fits" if not limited else FITS[found["way"]]
    if not new:
        said = "nothing new: the ledger holds all of it"
    rows = {
        "releases": found["releases"],
        "of them new": new,
        "ε of them together": found["epsilon"],
        "δ of them together": found["delta"],
        "share of the budget": f"{found['share_of_budget']:.1%}" if limited else "no limit",
        "left after it": f"{found['left_after']:.1%}" if limited else "no limit",
    }
    if limited and new:
        rows["how many such runs fit from now on"] = found["more_of_the_same"]
    write_pairs(f"The next {job} on {found['dataset']}: {said}", rows)
    if found["refusal"]:
        click.echo(f"Why: {found['refusal']}.")


def _like_the_last(ledger: Ledger, name: str, entries: list[Entry]) -> dict[str, Any] | None:
    """Return the cost of repeating all releases of the last run, or None without releases."""
    charged = [e for e in entries if e.charged]
    if not charged or ledger.datasets()[name].made_up:
        return None
    last = charged[-1]
    run = [e for e in charged if e.whole_plan and e.plan_key == last.plan_key] or [last]
    cost = ledger.cost_of_next(name, [(e.event, e.delta) for e in run])
    return {"run": last.run, "releases": len(run), **cost_in_json(cost)}


def _warning(name: str, cost: dict[str, Any] | None) -> str:
    if cost is None:
        return ""
    said = f"{name}: a run like the last one ({cost['run'] or 'no name'})"
    share = f"{cost['share_of_budget']:.1%} of the budget"
    if not cost["fits"]:
        return f"{said} would be REFUSED: it takes {share}, and less is left."
    return f"{said} would take {share}; {cost['more_of_the_same']} more would fit."
