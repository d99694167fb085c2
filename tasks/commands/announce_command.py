"""`confide announce`: announces a corpus's new version to Airflow, which trains on it."""

from __future__ import annotations

import click

from dp_core.errors import BadInput
from tasks.commands.output import as_json, write_json
from tasks.local.stack import connected
from tasks.runtime.deployment import Deployment


@click.command("announce")
@click.argument("corpus")
@click.argument("version")
@as_json
def command(corpus: str, version: str, as_json: bool) -> None:
    """Announce a new VERSION of the private data set CORPUS to Airflow.

    The DAG `new_corpus` then checks both values and starts `dp_bert` with the data set's settings
    (`CONFIDE_CORPORA`).
    """
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
