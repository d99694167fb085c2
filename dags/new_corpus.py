"""Train when a private corpus has a new version.

Each private data set in `CONFIDE_CORPORA` (a JSON file: data set → settings of `dp_bert`) is an
**asset** of the same name. Announce a version with

    ./confide announce ward-notes 2026-11

or on the asset's page (*Create asset event*, extra `{"data_version": "2026-11"}`), or through the
REST API. This DAG checks the event and starts `dp_bert` with the data set's settings and the new
version: vocabulary, pre-training, fine-tuning, exposure. **Training on a new version is a new
release and is charged to the same budget.** If it does not fit, the ledger refuses the run.

A version that was announced before starts no run. Runs of `dp_bert` wait for each other.
"""

from collections.abc import Mapping
from typing import Any

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import Asset, AssetAny, dag, get_current_context, task, task_group
from airflow.sdk.exceptions import AirflowFailException
from pydantic import ValidationError

from dags.launcher.form import configured_object
from dags.launcher.step_operator import defaults
from dp_core.config.fields import one_line
from tasks.protocol.settings import MADE_UP, JobSettings

GROUP = "confide-corpus"
_OF_AIRFLOW = {"from_rest_api", "from_trigger"}  # keys that Airflow itself adds to an event


def corpora() -> dict[str, dict[str, Any]]:
    """Return the settings of the job that a new version starts, by private data set.

    `CONFIDE_CORPORA` holds them as a JSON object, or names its file.

    Raises:
        ValueError: the settings are invalid; Airflow shows the line as an import error.
    """
    # By default, the project's made-up notes show the effect of a new version.
    given = configured_object("CONFIDE_CORPORA") or {MADE_UP: {}}
    for name, settings in given.items():
        if not isinstance(settings, dict):
            raise ValueError(f"CONFIDE_CORPORA: {name}: not an object of settings")
        if fixed := {"private_dataset", "data_version"} & set(settings):
            raise ValueError(f"CONFIDE_CORPORA: {name}: {sorted(fixed)[0]} comes with the event")
        try:
            job_of(name, settings, "1")
        except ValidationError as error:
            raise ValueError(f"CONFIDE_CORPORA: {name}: {one_line(error)}") from None
    return given


def job_of(corpus: str, settings: dict[str, Any], version: str) -> JobSettings:
    """Return the job that a version of a corpus starts.

    Raises:
        ValidationError: the name, the settings or the version are invalid.
    """
    named = {"private_dataset": corpus, "data_version": version}
    return JobSettings.model_validate({**settings, **named})


CORPORA = corpora()


def run_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run that an event starts: its id, and the settings of its form.

    The event is untrusted input: only a version that the settings allow is used.

    Raises:
        AirflowFailException: the event is invalid; another try cannot help.
    """
    corpus, extra = str(event["corpus"]), dict(event["extra"])
    version = extra.pop("data_version", "")
    if unknown := sorted(set(extra) - _OF_AIRFLOW):
        raise AirflowFailException(
            f"{corpus}: the event holds {len(unknown)} keys besides data_version"
        )
    if corpus not in CORPORA:
        raise AirflowFailException(f"{corpus}: CONFIDE_CORPORA has no such data set")
    if not version:
        raise AirflowFailException(f'{corpus}: the event needs {{"data_version": "…"}}')
    try:
        job = job_of(corpus, CORPORA[corpus], version)
    except ValidationError as error:
        raise AirflowFailException(f"{corpus}: {one_line(error)}") from None
    return {
        "run_id": f"corpus__{corpus}__{job.data_version}",
        "conf": {**CORPORA[corpus], "private_dataset": corpus, "data_version": job.data_version},
    }


@dag(
    dag_id="new_corpus",
    dag_display_name="new_corpus · train on a new version of a corpus",
    description="An asset event of a private data set → a run of dp_bert with the new version",
    schedule=AssetAny(
        *(Asset(name=name, uri=f"confide://corpus/{name}", group=GROUP) for name in sorted(CORPORA))
    ),
    catchup=False,
    max_active_runs=1,
    default_args=defaults(),
    tags=["confide", "differential privacy", "assets"],
    doc_md=__doc__,
)
def new_corpus() -> None:
    """Define the graph: each event starts a run of `dp_bert`."""

    @task(task_display_name="Read the announcements")
    def events() -> list[dict[str, Any]]:
        """List the events that started this run: each data set with its new version."""
        triggering = get_current_context()["triggering_asset_events"]
        return [
            {"corpus": event.asset.name, "extra": dict(event.extra)}
            for of_asset in triggering.values()
            for event in of_asset
        ]

    @task_group
    def version(event: dict[str, Any]) -> None:
        @task(
            retries=0, map_index_template="{{ corpus }}", task_display_name="Check the announcement"
        )
        def job(event: dict[str, Any]) -> dict[str, Any]:
            """Check the data set and the version of the event."""
            get_current_context()["corpus"] = str(event["corpus"])  # type: ignore[typeddict-unknown-key]
            return run_of(event)

        run = job(event)
        TriggerDagRunOperator(
            task_id="train",
            task_display_name="Start dp_bert",
            trigger_dag_id="dp_bert",
            trigger_run_id=run["run_id"],
            conf=run["conf"],
            logical_date=None,
            skip_when_already_exists=True,
            doc_md="Starts `dp_bert`; skipped if this version was announced before.",
        )

    version.expand(event=events())


new_corpus()
