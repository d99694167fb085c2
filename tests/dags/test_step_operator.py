import pytest
from airflow.sdk.exceptions import AirflowFailException

from dags.launcher.step_operator import MlflowRunLink, ReportLink, failure
from tasks.protocol.messages import Follower, StepProgress, TrackedAt

URL = "http://127.0.0.1:5000/#/experiments/1/runs/ab12"


def test_buttons_lead_to_the_run_and_to_the_report(dags):
    task = dags["dp_bert"].get_task("report")
    assert [link.name for link in task.operator_extra_links] == ["MLflow run", "Report"]
    task.tracked_at = URL
    menus = "?workflowType=machine_learning"
    assert MlflowRunLink().get_link(task, ti_key=None) == URL + menus
    page = f"{URL}/artifacts/report/report.html{menus}"
    assert ReportLink().get_link(task, ti_key=None) == page
    task.tracked_at = ""
    assert ReportLink().get_link(task, ti_key=None) == ""


@pytest.mark.parametrize("name", ["dp_bert", "dp_sweep"])
def test_the_buttons_survive_the_way_to_the_server(dags, name):
    """The server knows only the names of a task's links, and reads the targets from XComs."""
    from airflow.serialization.serialized_objects import DagSerialization

    back = DagSerialization.from_dict(DagSerialization.to_dict(dags[name]))
    for task in back.tasks:
        if task.task_id.rpartition(".")[2] in ("vocabulary", "pretraining", "finetuning"):
            (link,) = task.operator_extra_links
            assert (link.name, link.xcom_key) == ("MLflow run", "mlflow_run")


def test_a_signal_is_a_fault_that_may_be_tried_again():
    error = failure(-9, "it ended")
    assert str(error) == "it ended (signal 9)"
    assert not isinstance(error, AirflowFailException)


@pytest.mark.parametrize(
    "line",
    [
        f"MLflow: {URL}",
        f'{{"message": "MLflow: {URL}"}}',
        TrackedAt(url=URL).model_dump_json().replace("http", "javascript"),
        TrackedAt(url=URL).model_dump_json().replace('":1', '":2'),
        TrackedAt(url=URL).model_dump_json()[:-1],
        f'{{"version": 1, "kind": "tracked_at", "url": "{URL} and more"}}',
        "{}",
    ],
)
def test_only_a_message_of_this_version_names_the_run(line):
    follower = Follower()
    assert not follower.hear(line)
    assert follower.tracked_at == ""
    assert follower.hear(TrackedAt(url=URL).model_dump_json())
    assert follower.tracked_at == URL


def test_a_channel_is_followed_line_by_line(tmp_path):
    follower = Follower(tmp_path / "channel")
    assert follower.look().progress == StepProgress(done=0, total=0)
    with (tmp_path / "channel").open("a") as channel:
        for piece, done in (('{"kind": "progress", "done": 1, ', 0), ('"total": 2}\nnoise\n', 1)):
            channel.write(piece)
            channel.flush()
            assert follower.look().progress.done == done
    assert follower.reason() == "it ended without a word: see its log"
