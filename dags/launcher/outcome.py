"""The last task of a run: it fails if the run failed or was cancelled before its report."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from airflow.sdk import get_current_context, task
from airflow.sdk.definitions.xcom_arg import XComArg
from airflow.sdk.exceptions import AirflowFailException

from dags.names import NAMES


def outcome(*last: str) -> XComArg:
    """Return the task that decides the state of its run.

    Args:
        last: names of the tasks of which one succeeds if the run does, such as the report.

    Airflow derives a run's state from the last tasks that are no teardowns. If a person cancels a
    run that has a teardown, Airflow skips these tasks and calls the run a success. This task is a
    teardown itself, so it runs in every case, and Airflow counts its failure.
    """

    @task(
        task_id="outcome",
        task_display_name=NAMES["outcome"],
        retries=0,
        doc_md="Fails if a task of this run failed, or if the run was cancelled.",
    )
    def fail_unless_succeeded() -> None:
        context = get_current_context()
        run, dag = context["run_id"], context["dag"].dag_id
        refuse(context["ti"].get_task_states(dag_id=dag, run_ids=[run]).get(run, {}), last)

    return fail_unless_succeeded().as_teardown(on_failure_fail_dagrun=True)


def refuse(states: Mapping[str, str | None], last: Collection[str]) -> None:
    """Raise if these states of a run's tasks are not those of a success.

    Args:
        states: by task.
        last: as for `outcome`.

    Raises:
        AirflowFailException: a task failed, or none of the last tasks succeeded.
    """
    failed = sorted(name for name, state in states.items() if state == "failed")
    if failed:
        raise AirflowFailException(f"failed: {', '.join(failed)}; see the log of the first one")
    if not any(states.get(name) == "success" for name in last):
        raise AirflowFailException(f"the run was cancelled before {' or '.join(last)}")
