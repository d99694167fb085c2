"""`confide advise`: recommends a plan for a budget and a corpus size, without spending any."""

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from dp_core.config.privacy import LEAST_EPSILON, MOST_EPSILON
from dp_core.errors import BadInput
from dp_core.privacy.accounting.accountants import epsilon_pld
from dp_core.privacy.ledger import AdmissionDecision, Ledger, Way
from dp_core.privacy.ledger.privacy_filter import pld_capacity
from tasks.commands.command_options import options_of
from tasks.commands.ledger_command import FITS
from tasks.commands.output import as_json, write_answer, write_pairs, write_table
from tasks.commands.settings_options import (
    settings_options,
    validated,
    values_of_options,
    write_settings,
)
from tasks.protocol.defaults import default_delta
from tasks.protocol.job import budget_of_run
from tasks.protocol.settings import MADE_UP, JobSettings
from tasks.releases import training_advice
from tasks.releases.charge import plans_of
from tasks.releases.deployment_ledger import killed_runs, least_terms, open_ledger
from tasks.releases.training_advice import (
    Advice,
    PrivacyBudget,
    RunReleases,
    changed,
    how_it_is_known,
)
from tasks.runtime.deployment import Deployment, sqlite_file

TARGET = ("target_epsilon", "target_delta")
NO_PATH = "/path"  # of text that the plan does not need


@click.command("advise")
@settings_options
@options_of("advise")
@as_json
def command(
    units: int | None,
    epsilon: float | None,
    delta: float | None,
    written: Path | None,
    **options: Any,
) -> None:
    """Recommend batch, noise and vocabulary for a privacy budget, with the expected result.

    A number of units and an ε are enough. The command starts from the same settings as
    `confide run`; epochs is the compute. The plan fits the registered budget of private_dataset,
    if one exists: all of it or the remaining part, unless --epsilon and --delta are smaller.
    Without any ε, the budget is the cost of the present settings. No private text is read, and
    nothing is charged.

    Example:
      confide advise --units 116 --epsilon 8
    """
    values = values_of_options(JobSettings, **options)
    values |= {} if units is None else {"declared_units": units}
    with Console(stderr=True).status("Comparing plans, for up to a minute"):
        advice = _advice(values, epsilon, delta)
    if written is not None:
        settings = advice.given.model_dump(mode="json", include=values.keys() - set(TARGET))
        write_settings(settings | advice.changes, written, "--write")
    answer = to_json(advice) | {"next": _next_commands(advice, written) if written else []}
    write_answer(answer, lambda: _show(advice, answer))


def _settings(values: dict[str, Any], **changes: Any) -> JobSettings:
    """Return the settings for a plan, which needs neither the paths nor the formats of the text.

    Raises:
        BadInput: out of range or inconsistent.
    """
    private = values.get("private_dataset", MADE_UP) != MADE_UP
    planned: dict[str, Any] = {"private_format": "jsonl"} if private else {}
    planned |= {name: value for name, value in values.items() if name not in TARGET} | changes
    for kind in ("private", "public"):
        if planned.get(f"{kind}_format", "synthetic") != "synthetic":
            planned.setdefault(f"{kind}_path", NO_PATH)
    return validated(JobSettings, planned)


def _advice(values: dict[str, Any], epsilon: float | None, delta: float | None) -> Advice:
    given = _settings(values)
    target = _settings(values, **{name: values.get(name) for name in TARGET})
    epsilon = target.target_epsilon if epsilon is None else epsilon
    delta = target.target_delta if delta is None else delta
    dataset, ledger = given.private_dataset, _ledger_with_budget(given)
    if ledger is None:
        if epsilon is None:
            now = RunReleases.of(given)
            epsilon, delta = now.epsilon, now.delta if delta is None else delta
        delta = default_delta(given.declared_units) if delta is None else delta
        budget = PrivacyBudget(epsilon, delta)
        advice = training_advice.advised(_starting_point(values, budget), budget)
        return replace(advice, given=given)
    _refuse_other_name(given, ledger)
    left, killed = ledger.remaining(dataset), killed_runs(Deployment.from_environment())
    assert left.capacity is not None and left.spent is not None  # noqa: S101 - it is limited
    registered = pld_capacity(left.budget)
    left_delta = left.capacity.delta - left.spent.delta  # all of a histogram's coins must fit
    most = left_delta if left.way is Way.SEQUENCE else registered.delta

    def decide(advised: JobSettings) -> AdmissionDecision:
        plans = plans_of(budget_of_run(advised).charged, ledger.datasets())
        return ledger.cost_of_plan(plans[left.budget.name], killed.__contains__)

    budget = PrivacyBudget(epsilon or registered.rho, delta or most)
    start = _starting_point(values, budget)
    return replace(training_advice.advised_within(start, budget, decide), given=given)


def _refuse_other_name(settings: JobSettings, ledger: Ledger) -> None:
    """Refuse to advise on labels that share the notes' budget: advice counts releases by name."""
    budgets, labels = ledger.datasets(), settings.entities_dataset
    shared = labels in budgets and budgets[labels].name == budgets[settings.private_dataset].name
    if shared and settings.finetune_privacy == "dp" and not settings.tunes_the_private_data_set:
        what = f"{labels} shares the budget of {settings.private_dataset}"
        raise BadInput(what, where="entities_dataset", fix="Leave it empty for advice.")


def _starting_point(values: dict[str, Any], budget: PrivacyBudget) -> JobSettings:
    """Return the settings that advice improves: the parts that a run with this target would have.

    A given σ, or private fine-tuning from the same budget, leaves the parts as they are set.
    """
    given = _settings(values)
    divided = given.finetune_privacy == "none" and "noise_multiplier" not in values
    if not divided or not LEAST_EPSILON <= budget.epsilon <= MOST_EPSILON:
        return given
    budget.check(given.declared_units)
    parts = _settings(values, target_epsilon=budget.epsilon, target_delta=budget.delta)
    return changed(parts, **dict.fromkeys(TARGET))


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
        "public_start": advice.public_start,
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


def _show(advice: Advice, answer: dict[str, Any]) -> None:
    settings, spending = advice.settings, advice.spending
    write_pairs(
        f"{settings.declared_units:,} units ({settings.unit}), ε ≤ {advice.budget.epsilon:.4g}, "
        f"δ ≤ {advice.budget.delta:.3g} for everything together",
        {
            "batch, expected units": settings.batch_size,
            "updates": settings.updates,
            "passes over the units": settings.epochs,
            "σ of training": settings.noise_multiplier,
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
        [list(part.values()) for part in answer["split"]],
    )
    quantities = list(advice.outlook[0].expected)
    write_table(
        "Expected share of the gain without privacy that is kept, with 95% interval",
        ["", "units", f"ε of {'phrases' if spending.phrases else 'training'}", *quantities],
        [
            [case.name, f"{case.declared_units:,}", case.epsilon, *map(str, case.expected.values())]
            for case in advice.outlook
        ],
    )
    click.echo(how_it_is_known(advice.spending.recipe))
    click.echo(advice.verdict)
    for note in filter(None, (*advice.public_start, advice.phrases_instead)):
        click.echo(note)
    if answer["next"]:
        click.echo("\n  ".join(["To run it:", *answer["next"]]))
    elif advice.changes:
        options = " ".join(f"--set {name}={value}" for name, value in advice.changes.items())
        click.echo(f"To run it:  confide run … {options}")
    else:
        click.echo("The settings are the advised ones already.")


def _next_commands(advice: Advice, written: Path) -> list[str]:
    """Return the commands that run the written plan, quoted for a shell."""
    settings, dataset = advice.settings, advice.settings.private_dataset
    run = f"confide run --settings {shlex.quote(str(written))}"
    if settings.private_path == NO_PATH:
        run += " --set private_format=FORMAT --set private_path=FILE  (confide init FILE --units N)"
    if advice.decision is not None or settings.made_up:
        return [run]
    plan = plans_of(budget_of_run(settings).charged, {})[dataset]
    return [f"confide ledger register {shlex.quote(dataset)} {least_terms(plan)}", run]
