"""From a task in Airflow to its run in MLflow, and the one line that says what failed."""

import json
from types import SimpleNamespace

import pytest

from dags.launcher.failures import one_line, say_what_failed
from dags.launcher.links import MlflowRun, Report, tracked_at
from dags.launcher.outcome import failure

URL = "http://127.0.0.1:5000/#/experiments/1/runs/ab12"


@pytest.mark.parametrize(
    ("line", "address"),
    [
        (f"MLflow: {URL}", URL),
        (json.dumps({"level": "info", "message": f"MLflow: {URL}"}), URL),
        ("MLflow: javascript:alert(1)", ""),
        (f"a note that says MLflow: {URL}", ""),
        (f"MLflow: {URL} and more", ""),
        ('{"message": ', ""),
        ("{}", ""),
    ],
)
def test_only_the_step_s_own_line_names_its_run(line, address):
    assert tracked_at(line) == address


def test_buttons_lead_to_the_run_and_to_the_report(dags):
    task = dags["dp_bert"].get_task("report")
    assert [link.name for link in task.operator_extra_links] == ["MLflow run", "Report"]
    task.tracked_at = URL
    menus = "?workflowType=machine_learning"
    assert MlflowRun().get_link(task, ti_key=None) == URL + menus
    page = f"{URL}/artifacts/report/report.html{menus}"
    assert Report().get_link(task, ti_key=None) == page
    task.tracked_at = ""
    assert Report().get_link(task, ti_key=None) == ""


@pytest.mark.parametrize("name", ["dp_bert", "dp_sweep"])
def test_the_buttons_survive_the_way_to_the_server(dags, name):
    """The server knows a task's links by name alone; what it shows lies in an XCom of that key."""
    from airflow.serialization.serialized_objects import DagSerialization

    back = DagSerialization.from_dict(DagSerialization.to_dict(dags[name]))
    for task in back.tasks:
        if task.task_id.rpartition(".")[2] in ("vocabulary", "dp_pretraining", "dp_finetuning"):
            (link,) = task.operator_extra_links
            assert (link.name, link.xcom_key) == ("MLflow run", "mlflow_run")


def test_every_step_says_what_failed(dags):
    for dag in dags.values():
        for task in dag.tasks:
            assert task.on_failure_callback, task.task_id


def context(**more):
    ti = SimpleNamespace(
        dag_id="dp_sweep",
        task_id="point.dp_pretraining",
        run_id="manual__1",
        map_index=2,
        log_url="http://127.0.0.1:8080/dags/dp_sweep/runs/manual__1/tasks/x",
    )
    return {"ti": ti, **more}


def test_one_line_says_what_failed_why_and_where_the_log_is(caplog):
    why = failure("pretrain", 3, "confide: pretrain: 2.1 of 2.0 would be spent")
    say_what_failed(context(exception=why, point_name="σ=1"))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        "FAILED dp_sweep · point.dp_pretraining [σ=1], run manual__1: 2.1 of 2.0 would be spent "
        "(exit code 3: privacy budget exceeded, not tried again). "
        "Log: http://127.0.0.1:8080/dags/dp_sweep/runs/manual__1/tasks/x"
    )


def test_a_task_whose_process_was_lost_is_named_too():
    line = one_line(context(exception=None))
    assert "[2]" in line
    assert "its process was lost" in line
    assert "\n" not in one_line(context(exception=ValueError("two\nlines")))


def test_a_reason_in_json_is_read():
    line = json.dumps({"level": "error", "message": "confide: pretrain: disk full"})
    assert str(failure("pretrain", 1, line)) == "disk full (exit code 1)"
