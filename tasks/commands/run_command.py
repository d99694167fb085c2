"""`confide run`: runs a job's steps one after the other, each in a new process, as in Airflow."""

import shlex
import signal
import sys
import time
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import click

from dp_core.errors import BadInput
from tasks.commands import export_command, report_command
from tasks.commands.command_options import options_of
from tasks.commands.output import as_json, is_json, write_answer, write_json, write_table
from tasks.commands.settings_options import (
    JOBS,
    job_argument,
    settings_from,
    settings_of_options,
    settings_options,
)
from tasks.context import omissions_of
from tasks.execution.run_job import Job, one_after_the_other, run_and_give_back
from tasks.protocol.job import job_steps, point_and_task
from tasks.protocol.settings import JobSettings
from tasks.protocol.settings_file import promotion
from tasks.protocol.specs import StepSpec
from tasks.protocol.sweep import SweepSettings
from tasks.releases.deployment_ledger import charged_by_run
from tasks.runtime.deployment import Deployment


@click.command("run")
@job_argument
@settings_options
@options_of("run")
@as_json
def command(job: str, show_settings: bool, **options: Any) -> int:
    """Run a whole job on this machine: dp_bert (the default) or dp_sweep.

    A step whose result exists is not run again and is not charged again: after a stop, the same
    command continues the run.

    Example:
      confide run --settings settings.json
      confide run --preset demo --set epochs=2
    """
    if show_settings:
        settings = settings_of_options(JOBS[job], **options)
        described = _described(settings)
        write_answer(described, lambda: _show(described))
        return 0
    try:
        settings = settings_from(JOBS[job], **options)
    except BadInput as error:
        fix = ". ".join(filter(None, (error.fix.removesuffix("."), "Nothing was spent.")))
        raise BadInput(error.what, where=error.where, fix=fix) from None
    deployment, rule = Deployment.from_environment(), promotion()
    steps: Iterable[tuple[str, str, StepSpec]]
    if isinstance(settings, SweepSettings) and settings.is_asked:
        from tasks.execution.asked_points import asked_steps, most_steps

        steps, number = asked_steps(settings, deployment), most_steps(settings)
    else:
        steps = [(*point_and_task(name), spec) for name, spec in job_steps(settings, rule).items()]
        number = len(steps)
    begun, work = time.monotonic(), Job.now(job, steps)
    again = shlex.join(["confide", *sys.argv[1:]])
    try:
        with one_after_the_other(number, shows_times=settings.made_up) as watch:
            finished = run_and_give_back(work, deployment, watch)
    except (KeyboardInterrupt, SystemExit) as stop:
        _warn(f"stopped. The same command continues the run: {again}")
        sys.exit(stop.code if isinstance(stop, SystemExit) else 128 + signal.SIGINT)
    for name, result in finished.results.items():
        if (omissions := omissions_of(result)) is not None:
            _warn(f"warning: {name}: {omissions[0]}")
    if is_json():
        write_json(finished.summary())
    elif "report" in finished.outputs:  # also of a job whose model an audit contradicts
        report_command.show(finished.outputs["report"])
        export_command.show_next(finished.outputs["report"], settings.private_dataset)
        if settings.made_up:
            click.echo(f"Took {time.monotonic() - begun:.0f} s.")
    if finished.exit_code:
        _warn(finished.failed)
        charged = charged_by_run(deployment, work.run_key)
        _warn(f"this run charged {charged} releases. The same command continues it: {again}")
    return finished.exit_code


def _warn(line: str) -> None:
    click.echo(f"confide: {line}", err=True)


def _described(settings: JobSettings) -> dict[str, dict[str, Any]]:
    """Return the JSON schema and the value of each setting, in the order of the form's sections."""
    values = settings.model_dump(mode="json")  # younger settings are left out at their default
    fields = type(settings).form_schema()
    return {n: field | {"value": values.get(n, field["default"])} for n, field in fields.items()}


def _show(described: dict[str, dict[str, Any]]) -> None:
    columns = ["setting", "value", "meaning"]
    for section, fields in groupby(described.items(), lambda field: str(field[1]["section"])):
        rows = [[name, str(field["value"]), field["description"]] for name, field in fields]
        write_table(section, columns, rows)
