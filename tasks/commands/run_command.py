"""`confide run`: runs a job's steps one after the other, each in a new process, as in Airflow."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import click

from tasks.commands import report_command
from tasks.commands.output import as_json, write_json, write_table
from tasks.commands.settings_options import (
    settings_from,
    settings_of_options,
    settings_options,
)
from tasks.context import omissions_of
from tasks.execution.run_job import Job, one_after_the_other, run_job, stops_on_signals
from tasks.protocol import (
    JobSettings,
    StepSpec,
    SweepSettings,
    job_steps,
    point_and_task,
    promotion,
)
from tasks.releases.deployment_ledger import plans_given_back
from tasks.runtime.deployment import Deployment
from tasks.tracking.mlflow import send_all


@click.command("run")
@click.argument("job", type=click.Choice(["dp_bert", "dp_sweep"]), default="dp_bert")
@settings_options
@click.option(
    "--show-settings", is_flag=True, help="Show the run's settings and their meaning, and exit."
)
@as_json
def command(job: str, show_settings: bool, as_json: bool, **options: Any) -> None:
    """Run a whole job on this machine: dp_bert (the default) or dp_sweep.

    A step whose result exists is not run again and is not charged again.
    """
    kind = SweepSettings if job == "dp_sweep" else JobSettings
    if show_settings:
        _show(settings_of_options(kind, **options), as_json=as_json)
        return
    settings = settings_from(kind, **options)
    deployment, rule = Deployment.from_environment(), promotion()
    steps: Iterable[tuple[str, str, StepSpec]]
    if isinstance(settings, SweepSettings) and settings.is_asked:
        from tasks.execution.asked_points import asked_steps, most_steps

        steps, number = asked_steps(settings, deployment), most_steps(settings)
    else:
        steps = [(*point_and_task(name), spec) for name, spec in job_steps(settings, rule).items()]
        number = len(steps)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    key = f"cli/{job}/{started.replace(' ', 'T')}/{time.time_ns() % 10**9}"
    work = Job(name=job, run_key=key, run_name=f"{job} {started}", steps=steps)
    try:
        with (
            stops_on_signals(),
            plans_given_back(deployment, key) as given_back,
            one_after_the_other(number) as watch,
        ):
            finished = run_job(work, deployment, watch)
    except SystemExit:
        click.echo("confide: stopped by a signal. The same command continues the run.", err=True)
        raise
    send_all(deployment)
    for name, result in finished.results.items():
        if (found := omissions_of(result)) is not None:
            click.echo(f"confide: warning: {name}: {found[0]}", err=True)
    if as_json:
        write_json(finished.summary())
    elif "report" in finished.outputs:  # also of a job whose model an audit contradicts
        report_command.show(finished.outputs["report"])
    if finished.exit_code:
        click.echo(f"confide: {finished.failed}", err=True)
        if given_back:
            click.echo(
                f"confide: nothing was released: {len(given_back)} planned releases are given back",
                err=True,
            )
        click.get_current_context().exit(finished.exit_code)


def _show(settings: JobSettings, *, as_json: bool) -> None:
    described = _described(settings)
    if as_json:
        write_json(described)
        return
    columns = ["setting", "value", "meaning"]
    for section in dict.fromkeys(one["section"] for one in described.values()):
        rows = [
            [name, str(one["value"]), one["meaning"]]
            for name, one in described.items()
            if one["section"] == section
        ]
        write_table(section, columns, rows, whole=["setting"], prose=["meaning"])


def _described(settings: JobSettings) -> dict[str, dict[str, Any]]:
    """Return each setting's value, default, section and description, in the form's order."""
    values = settings.model_dump(mode="json")
    fields = type(settings).model_json_schema()["properties"]
    return {
        name: {
            "value": values[name],
            "default": fields[name]["default"],
            "section": fields[name]["section"],
            "meaning": fields[name]["description"],
        }
        for name in sorted(fields, key=lambda name: str(fields[name]["section"]))
    }
