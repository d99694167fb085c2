"""`confide run`: runs a job's steps one after the other, each in a new process, as in Airflow."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import click

from tasks.commands import report_command
from tasks.commands.output import as_json, is_json, write_answer, write_json, write_table
from tasks.commands.settings_options import (
    JOBS,
    job_argument,
    settings_from,
    settings_of_options,
    settings_options,
)
from tasks.context import omissions_of
from tasks.execution.run_job import Job, one_after_the_other, run_job, stops_on_signals
from tasks.protocol.job import job_steps, point_and_task
from tasks.protocol.settings import JobSettings
from tasks.protocol.settings_file import promotion
from tasks.protocol.specs import StepSpec
from tasks.protocol.sweep import SweepSettings
from tasks.releases.deployment_ledger import plans_given_back
from tasks.runtime.deployment import Deployment
from tasks.tracking.mlflow import send_all


@click.command("run")
@job_argument
@settings_options
@click.option(
    "--show-settings", is_flag=True, help="Show the run's settings and their meaning, and exit."
)
@as_json
def command(job: str, show_settings: bool, **options: Any) -> int:
    """Run a whole job on this machine: dp_bert (the default) or dp_sweep.

    A step whose result exists is not run again and is not charged again.
    """
    if show_settings:
        settings = settings_of_options(JOBS[job], **options)
        described = _described(settings)
        write_answer(described, lambda: _show(described))
        return 0
    settings = settings_from(JOBS[job], **options)
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
    if is_json():
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
    return finished.exit_code


def _described(settings: JobSettings) -> dict[str, dict[str, Any]]:
    """Return the JSON schema and the value of each setting, in the order of the form's sections."""
    values = settings.model_dump(mode="json")
    fields = type(settings).form_schema()
    ordered = sorted(fields, key=lambda name: str(fields[name]["section"]))
    return {name: fields[name] | {"value": values[name]} for name in ordered}


def _show(described: dict[str, dict[str, Any]]) -> None:
    columns = ["setting", "value", "meaning"]
    for section, fields in groupby(described.items(), lambda field: str(field[1]["section"])):
        rows = [[name, str(field["value"]), field["description"]] for name, field in fields]
        write_table(section, columns, rows, whole=["setting"], prose=["meaning"])
