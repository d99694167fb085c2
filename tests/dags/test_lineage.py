import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.protocol.job import job_steps
from tasks.protocol.settings import JobSettings

pytest.importorskip("openlineage.client", reason="the provider is missing: make setup-dev")
CHECKOUT = Path(__file__).resolve().parents[2]
SECRET = "/srv/ward-7/jane-doe"
AT = "2026-01-01T00:00:00+00:00"
ID, ABOVE = "0191f0f0-0000-7000-8000-000000000001", "0191f0f0-0000-7000-8000-000000000002"


def test_names_ids_state_and_time_pass_and_all_else_stays():
    from openlineage.client.event_v2 import Dataset, Job, JobEvent, Run, RunEvent, RunState
    from openlineage.client.facet_v2 import (
        error_message_run,
        parent_run,
        schema_dataset,
        source_code_job,
    )
    from openlineage.client.serde import Serde

    from dags.launcher.lineage import STORE, NamesOnly

    schema = schema_dataset.SchemaDatasetFacet([schema_dataset.SchemaDatasetFacetFields(SECRET)])
    parent = parent_run.ParentRunFacet(
        run=parent_run.Run(runId=ABOVE), job=parent_run.Job(namespace="confide", name="dp_bert")
    ).with_additional_properties(note=SECRET)
    output = f"pretrain/{'0' * 16}"
    run_event = RunEvent(
        eventTime=AT,
        eventType=RunState.FAIL,
        run=Run(
            runId=ID,
            facets={
                "parent": parent,
                "errorMessage": error_message_run.ErrorMessageRunFacet(SECRET, "PYTHON", SECRET),
            },
        ),
        job=Job(
            namespace="confide",
            name="dp_bert.vocabulary",
            facets={"sourceCode": source_code_job.SourceCodeJobFacet("python", SECRET)},
        ),
        inputs=[
            Dataset(namespace="file", name=SECRET),
            Dataset(namespace=STORE, name=SECRET),
            Dataset(namespace=STORE, name=output, facets={"schema": schema}),
        ],
        outputs=[Dataset(namespace="gs://bucket", name=output)],
    )
    assert SECRET in Serde.to_json(run_event)
    sent = NamesOnly({}).transform(run_event)
    text = Serde.to_json(sent)
    assert SECRET not in text
    event = json.loads(text)
    assert (event["eventTime"], event["eventType"]) == (AT, "FAIL")
    assert event["run"]["runId"] == ID and set(event["run"]["facets"]) == {"parent"}
    assert event["run"]["facets"]["parent"]["run"]["runId"] == ABOVE
    assert event["job"]["name"] == "dp_bert.vocabulary" and not event["job"].get("facets")
    assert [(d["namespace"], d["name"]) for d in event["inputs"]] == [(STORE, output)]
    assert not event["inputs"][0].get("facets") and event["outputs"] == []
    job = JobEvent(eventTime=AT, job=Job(namespace="confide", name=SECRET))
    assert NamesOnly({}).transform(job) is None


@pytest.mark.cases
def test_no_event_of_a_private_selection_leaves(facets, conf, passes):
    from openlineage.client.event_v2 import Job, Run, RunEvent, RunState

    from dags.launcher.lineage import NamesOnly

    for task in ("", ".pretraining", ".report"):
        for facet in facets or ("none",):
            run_facets = {facet: SimpleNamespace(dagRun={"conf": conf})} if facets else {}
            event = RunEvent(
                eventTime=AT, eventType=RunState.COMPLETE, run=Run(runId=ID),
                job=Job(namespace="confide", name=f"dp_sweep{task}"),
            )  # fmt: skip
            event.run.facets = run_facets
            assert (NamesOnly({}).transform(event) is not None) is passes, (task, facet)


def test_selection_that_the_deployment_sets_by_default_is_private_too(monkeypatch, tmp_path):
    from dags.launcher.lineage import _may_select_privately

    file = tmp_path / "settings.json"
    file.write_text('{"selection": "random-count"}')
    monkeypatch.setenv("CONFIDE_SWEEP_SETTINGS", str(file))
    run = SimpleNamespace(facets={"airflow": SimpleNamespace(dagRun={"conf": {}})})
    assert _may_select_privately(SimpleNamespace(job=SimpleNamespace(name="dp_sweep"), run=run))


def test_a_step_reads_the_outputs_that_its_spec_names_and_writes_its_own():
    from dags.launcher.lineage import STORE, lineage_of

    steps = job_steps(JobSettings(private_path="", phrases_epsilon=2.0))
    known = {spec.output.removeprefix("store://") for spec in steps.values()}
    for name, spec in steps.items():
        lineage = lineage_of([spec])
        assert [d.name for d in lineage.outputs] == [spec.output.removeprefix("store://")]
        read = [d.name for d in lineage.inputs]
        assert set(read) <= known and len(set(read)) == len(read), name
        assert {d.namespace for d in [*lineage.inputs, *lineage.outputs]} == {STORE}
    vocabulary = [d.name.partition("/")[0] for d in lineage_of([steps["vocabulary"]]).inputs]
    assert sorted(vocabulary) == ["corpus", "corpus"]
    assert len(lineage_of([steps["report"]]).inputs) == len(steps) - 1


RUN = """
import json, sys
from airflow.utils.db import initdb
from airflow.dag_processing.dagbag import DagBag
initdb()
dag = DagBag(sys.argv[1]).dags["privacy_audit"]
dag.test(run_conf={"audited_model": sys.argv[2], "given_canaries": sys.argv[2] + "/c.txt"})
"""


@pytest.mark.slow
def test_events_of_a_run_contain_no_setting(tmp_path):
    events = tmp_path / "events"
    transport = {
        "type": "transform",
        "transformer_class": "dags.launcher.lineage.NamesOnly",
        "transport": {"type": "file", "log_file_path": str(events), "append": True},
    }
    environment = os.environ | {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{tmp_path}/airflow.db",
        "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps(transport),
        "AIRFLOW__OPENLINEAGE__NAMESPACE": "confide",
        "PYTHONPATH": str(CHECKOUT),
    }
    words = [sys.executable, "-c", RUN, str(CHECKOUT / "dags" / "privacy_audit.py"), SECRET]
    run = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert events.exists(), run.stdout[-2000:] + run.stderr[-2000:]
    text = events.read_text()
    assert "jane-doe" not in text and "CONFIDE" not in text
    emitted = [json.loads(line) for line in text.splitlines()]
    of_task = [event for event in emitted if event["job"]["name"] == "privacy_audit.privacy_audit"]
    assert [event["eventType"] for event in of_task] == ["START", "COMPLETE"]
    (written,) = of_task[-1]["outputs"]
    assert written["name"].startswith("privacy_audit/")
