import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from jinja2 import Template
from sqlalchemy import select

from dp_core.errors import BadInput
from tasks.protocol.settings_file import promotion

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def asked(monkeypatch):
    from airflow.dag_processing.dagbag import DagBag

    monkeypatch.setenv("CONFIDE_PROMOTE", "approved")
    bag = DagBag(CHECKOUT / "dags" / "dp_bert.py")
    assert not bag.import_errors
    return bag.dags["dp_bert"]


def test_without_the_approval_rule_the_dag_has_no_approval_task(dags):
    assert not {"approval", "promote"} & set(dags["dp_bert"].task_ids)


def test_promotion_waits_for_the_person_who_reads_the_report_s_verdict(asked):
    assert asked.get_task("approval").upstream_task_ids == {"report"}
    assert asked.get_task("promote").upstream_task_ids == {"approval"}
    for name in ("approval", "promote"):
        assert asked.get_task(name).trigger_rule == "all_success"  # not if an audit contradicts
    specs = asked.get_task("promote").plan({}, None)
    assert specs["report"].promotion == "approved"
    assert specs["promote"].report_uri == specs["report"].output
    task = asked.get_task("approval")
    answer = {"verdicts": {"With DP / pretraining": "ε = 4: consistent with Bound."}}
    body = Template(task.body).render(ti=SimpleNamespace(xcom_pull=lambda **_: answer))
    assert "**With DP / pretraining**: ε = 4: consistent with Bound." in body
    nothing = Template(task.body).render(ti=SimpleNamespace(xcom_pull=lambda **_: None))
    assert "no model" in nothing
    assert task.options == ["Approve", "Reject"] and task.defaults is None


def test_an_unknown_rule_is_an_import_error_in_one_line(monkeypatch):
    monkeypatch.setenv("CONFIDE_PROMOTE", "always")
    with pytest.raises(BadInput, match="CONFIDE_PROMOTE: unknown rule 'always'"):
        promotion()


class Person:
    """The user who answers through Airflow's route, like the page *Required actions*."""

    def get_id(self):
        return "reviewer"

    def get_name(self):
        return "A reviewer"


def answer_when_asked(dag_id, option, questions):
    """Wait until the task awaits an answer, record its text, and answer."""
    from airflow.api_fastapi.core_api.datamodels.hitl import UpdateHITLDetailPayload
    from airflow.api_fastapi.core_api.routes.public.hitl import update_hitl_detail
    from airflow.models.hitl import HITLDetail
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session

    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with create_session() as session:
            query = select(HITLDetail).join(TaskInstance, TaskInstance.id == HITLDetail.ti_id)
            waiting = TaskInstance.state == "awaiting_input"
            asked = session.scalars(query.where(TaskInstance.dag_id == dag_id, waiting)).first()
            if asked:
                questions.append((asked.subject, asked.body, asked.task_instance.run_id))
                payload = UpdateHITLDetailPayload(chosen_options=[option])
                run_id = asked.task_instance.run_id
                update_hitl_detail(dag_id, run_id, "approval", payload, Person(), session)
                return
        time.sleep(0.5)


SMALL = """
from airflow.sdk import DAG, task

from dags.launcher.outcome import approval

with DAG("asks", schedule=None):

    @task
    def report():
        return {"verdicts": {"With DP / pretraining": "ε = 4: consistent with Bound."}}

    @task
    def promote():
        return "promoted"

    report() >> approval() >> promote()
"""


@pytest.fixture
def small(database, tmp_path):
    """A DAG of report, approval and promotion, which Airflow reads from a file."""
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db

    DagBundlesManager().sync_bundles_to_db()
    file = tmp_path / "asks.py"
    file.write_text(SMALL)
    bag = DagBag(file)
    sync_bag_to_db(bag, "dags-folder", None)
    return bag.dags["asks"]


@pytest.mark.parametrize(("option", "promoted"), [("Approve", "success"), ("Reject", "skipped")])
def test_airflow_waits_for_a_person_and_follows_the_decision(small, option, promoted):
    questions = []
    person = threading.Thread(target=answer_when_asked, args=("asks", option, questions))
    person.start()
    done = small.test()
    person.join()
    states = {ti.task_id: ti.state for ti in done.get_task_instances()}
    assert states == {"report": "success", "approval": "success", "promote": promoted}
    ((subject, body, run_id),) = questions
    assert subject == f"Promote the model of {run_id}?"
    assert "**With DP / pretraining**: ε = 4: consistent with Bound." in body
