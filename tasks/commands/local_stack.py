"""`confide demo`, `up`, `down` and `announce`: Airflow and MLflow, without Docker."""

from __future__ import annotations

import dataclasses
import time

import click
from rich.console import Console

from dp_core.errors import BadInput
from tasks.commands.output import as_json, write_json
from tasks.commands.settings_options import (
    SettingsOptions,
    settings_from,
    settings_of_options,
    settings_options,
)
from tasks.runtime.deployment import Deployment


@click.command()
@settings_options
def demo(options: SettingsOptions) -> None:
    """Run the preset `demo` (or another job) through Airflow and show its report."""
    from tasks.commands.report_command import show
    from tasks.local.demo import run
    from tasks.protocol import JobSettings

    if not (options.preset or options.file):
        options = dataclasses.replace(options, preset="demo")
    started = time.monotonic()
    console = Console()
    deployment = Deployment.from_environment()
    # The files and devices of containers cannot be checked from this machine.
    read = settings_from if deployment.launcher == "process" else settings_of_options
    report = run(deployment, read(JobSettings, options), console)
    show(report)
    console.print(f"Took {time.monotonic() - started:.0f} s. `make up` serves the pages.")


@click.command()
def up() -> None:
    """Serve the Airflow and MLflow pages on this machine, until `confide down`."""
    from tasks.local import stack as local
    from tasks.local.airflow_configuration import USER, airflow_home, runs_page

    console = Console(highlight=False)
    deployment = Deployment.from_environment()
    stack = local.running(deployment)
    if stack is None or set(stack.components) != set(local.PAGES):
        stack = local.start(deployment, local.PAGES, console.print)
    console.print(f"Airflow  {stack.airflow_url}   user {USER}, password {stack.password}")
    runs = runs_page(stack.mlflow_url, stack.mlflow_password)
    console.print(f"MLflow   {runs}   user {USER}, password {stack.mlflow_password}")
    console.print(f"The passwords are kept in {airflow_home(deployment) / 'secrets.json'}")
    console.print("Both answer on this machine only. Stop them with `make down`.")


@click.command()
def down() -> None:
    """Stop the services that `up` started, and remains of an earlier command."""
    from tasks.local.stack import stop

    stopped = stop(Deployment.from_environment())
    click.echo("Stopped." if stopped else "Nothing was running.")


@click.command()
@click.argument("corpus")
@click.argument("version")
@as_json
def announce(corpus: str, version: str, as_json: bool) -> None:
    """Announce a new VERSION of the private data set CORPUS to Airflow.

    The DAG `new_corpus` then checks both values and starts `dp_bert` with the data set's settings
    (`CONFIDE_CORPORA`).
    """
    from tasks.local.stack import connected

    api = connected(Deployment.from_environment())
    if api is None:
        raise BadInput(
            "no Airflow runs here", fix="Run `make up`, or set CONFIDE_AIRFLOW_API to one."
        )
    api.announce(corpus, version)
    if as_json:
        write_json({"corpus": corpus, "data_version": version, "announced": True})
    else:
        click.echo(f"Announced {corpus} {version}: follow the DAG new_corpus in Airflow.")
