"""OpenLineage events by Airflow's provider: runs of tasks, with their inputs and outputs.

Events are off until the deployment sets a transport (`AIRFLOW__OPENLINEAGE__TRANSPORT`,
docs/operate.md). The provider would send more than names: a run's parameters with its paths, error
messages, and additions of later versions. `NamesOnly` filters the events before the transport. It
passes names of DAGs and tasks, ids of runs, states, times, and outputs of the store by step and
hash. Events of a private selection are dropped, because their times would reveal the number of
trainings. This file is only imported if the provider is configured.
"""

import re
from collections.abc import Collection
from typing import Any

from airflow.sdk.exceptions import AirflowFailException
from openlineage.client.event_v2 import Dataset, Job, Run, RunEvent
from openlineage.client.facet_v2 import parent_run
from openlineage.client.transport.transform.transform import EventTransformer

from tasks.protocol.specs import STORE_SCHEME, StepSpec
from tasks.protocol.sweep import SweepSettings

STORE = "confide-store"  # the namespace of outputs
_OUTPUT = re.compile(r"[a-z_]+/[0-9a-f]{16}")
_NAMED = re.compile(f'"{STORE_SCHEME}({_OUTPUT.pattern})"')  # the addresses in a spec's JSON


class NamesOnly(EventTransformer):
    """Reduces events of runs to names, ids, states and times, and drops all other events."""

    def transform(self, event: Any) -> RunEvent | None:
        """Return the event reduced to names, ids, state and time, or None to drop it."""
        if not isinstance(event, RunEvent) or _may_select_privately(event):
            return None
        above = (event.run.facets or {}).get("parent")
        facets = {}
        if above:
            named = parent_run.Job(namespace=above.job.namespace, name=above.job.name)
            run = parent_run.Run(runId=above.run.runId)
            facets["parent"] = parent_run.ParentRunFacet(run=run, job=named)
        return RunEvent(
            eventTime=event.eventTime,
            eventType=event.eventType,
            run=Run(runId=event.run.runId, facets=facets),
            job=Job(namespace=event.job.namespace, name=event.job.name),
            inputs=_outputs(event.inputs),
            outputs=_outputs(event.outputs),
            producer=event.producer,
        )


def _may_select_privately(event: Any) -> bool:
    """Return whether the event may belong to a sweep with `selection=random-count`.

    A sweep without readable settings is assumed to have this selection.
    """
    from dags.launcher import form

    if event.job.name.partition(".")[0] != "dp_sweep":
        return False
    facets = event.run.facets or {}
    run = facets.get("airflow") or facets.get("airflowDagRun")
    if run is None:
        return True
    given = {**form.form_defaults("SWEEP"), **(run.dagRun.get("conf") or {})}
    try:
        return form.settings_from(SweepSettings, given).selection != "publish-all"
    except AirflowFailException:
        return True


def _outputs(datasets: Any) -> list[Dataset]:
    """Return only the data sets that are outputs of the store; other names may be private paths."""
    return [
        Dataset(namespace=STORE, name=dataset.name)
        for dataset in datasets or ()
        if dataset.namespace == STORE and _OUTPUT.fullmatch(dataset.name)
    ]


def lineage_of(specs: Collection[StepSpec]) -> Any:
    """Return the inputs and outputs of a task's steps in the store, for the provider."""
    from airflow.providers.openlineage.extractors import OperatorLineage

    written = [spec.output.removeprefix(STORE_SCHEME) for spec in specs]
    named = [name for spec in specs for name in _NAMED.findall(spec.model_dump_json())]
    read = dict.fromkeys(name for name in named if name not in written)
    return OperatorLineage(
        inputs=[Dataset(namespace=STORE, name=name) for name in read],
        outputs=[Dataset(namespace=STORE, name=name) for name in written],
    )
