import itertools
import time
from dataclasses import replace

import pytest
from mlflow.tracking import MlflowClient  # noqa: TID251 - reads the runs that tracking wrote

from dp_core.errors import BudgetExceeded, PrivateTextRefusal, Unfinished
from dp_core.labels import Operator, Public
from tasks.execution.contract import Stopped, _end_tracking
from tasks.runtime.deployment import Deployment
from tasks.tracking import event_log
from tasks.tracking.event_log import AttemptEnded, Begun, EventLog, Identity, metric
from tasks.tracking.mlflow import KEY_TAG, OPERATOR, PUBLIC, send_all, unsent
from tasks.tracking.tracker import Tracker

pytestmark = pytest.mark.filterwarnings("ignore")  # Warnings of MLflow and SQLAlchemy.

DONE = Identity("run-1", "dp_bert today", "corpus", "", "corpus", "a" * 64, True)
KILLED = replace(DONE, task="canaries", step="canaries", spec_hash="b" * 64)
REPORT = replace(DONE, task="report", step="report", spec_hash="c" * 64)


def _down(deployment: Deployment) -> Deployment:
    return replace(deployment, tracking="http://127.0.0.1:9")


def _statuses(
    deployment: Deployment, identity: Identity, target: str, experiment: str = PUBLIC
) -> list[str]:
    client = MlflowClient(deployment.tracking)
    experiment_info = client.get_experiment_by_name(experiment)
    if experiment_info is None:
        return []
    key = identity.key(target)
    runs = client.search_runs([experiment_info.experiment_id], f"tags.`{KEY_TAG}` = '{key}'")
    return [str(run.info.status) for run in runs]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_finished_job_is_not_shown_as_running(tracked, monkeypatch, order):
    for identity in (DONE, KILLED, REPORT):
        tracker = Tracker(_down(tracked), identity)
        tracker.begin()
        if identity is not KILLED:
            tracker.end("FINISHED", also=("parent",) if identity is REPORT else ())
    logs = EventLog.all(tracked.events)
    monkeypatch.setattr(EventLog, "all", lambda parent: [logs[place] for place in order])
    assert send_all(tracked) == 0
    assert _statuses(tracked, REPORT, "parent") == ["FINISHED"]
    assert _statuses(tracked, DONE, "step") == ["FINISHED"]
    assert _statuses(tracked, KILLED, "step") == ["RUNNING"]


def test_metrics_of_another_run_do_not_restart_a_finished_job(tracked):
    first = Tracker(_down(tracked), DONE)
    first.begin()
    first.leave("KILLED", closed=False)
    Tracker(tracked, REPORT).end("FINISHED", also=("parent",))
    again = Tracker(tracked, replace(DONE, run_key="run-2"))
    again.begin()
    again.measure("loss", Public(1.0), 1)
    assert _statuses(tracked, DONE, "parent") == ["FINISHED"]
    assert _statuses(tracked, DONE, "step") == ["KILLED"]


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_last_step_ends_the_job_in_both_experiments(tracked, status, down):
    target_deployment = _down(tracked) if down else tracked
    point = replace(DONE, made_up=False, model="σ=1")
    Tracker(_down(tracked), replace(KILLED, made_up=False, model="σ=1")).begin()
    first = Tracker(target_deployment, point)
    first.measure("loss", Operator(1.0))
    first.events.append(metric("loss", Operator(1.0), target="model"))
    first.end("FINISHED")
    last = Tracker(
        target_deployment, replace(point, task="report", step="report", spec_hash="c" * 64)
    )
    last.begin()
    (last.leave if status == "KILLED" else last.end)(status, also=("model", "parent"))
    assert send_all(tracked) == 0
    for target in ("parent", "model"):
        assert _statuses(tracked, point, target, OPERATOR) == [status]
        assert _statuses(tracked, point, target) == [status.replace("FAILED", "KILLED")]
    assert _statuses(tracked, point, "step", OPERATOR) == ["FINISHED"]


def test_late_operator_metric_does_not_restart_a_finished_job(tracked):
    failed = Tracker(tracked, replace(DONE, made_up=False))
    failed.begin()
    other = Tracker(tracked, replace(KILLED, made_up=False))  # a step that runs at the same time
    other.begin()
    failed.end("FAILED", also=("parent",))
    other.measure("loss", Operator(1.0))
    other.end("FINISHED")
    for experiment, status in ((PUBLIC, "KILLED"), (OPERATOR, "FAILED")):
        assert _statuses(tracked, replace(DONE, made_up=False), "parent", experiment) == [status]
    Tracker(tracked, replace(DONE, made_up=False)).begin()
    for experiment in (PUBLIC, OPERATOR):
        assert _statuses(tracked, replace(DONE, made_up=False), "parent", experiment) == ["RUNNING"]


def test_ending_a_job_creates_no_run_in_an_unused_experiment(tracked):
    other = Tracker(tracked, replace(KILLED, made_up=False, run_key="run-2"))
    other.measure("loss", Operator(1.0))
    last = Tracker(tracked, replace(REPORT, made_up=False))
    last.begin()
    last.end("FINISHED", also=("parent",))
    for target in ("parent", "step"):
        assert _statuses(tracked, replace(REPORT, made_up=False), target) == ["FINISHED"]
        assert _statuses(tracked, replace(REPORT, made_up=False), target, OPERATOR) == []


@pytest.mark.parametrize("made_up", [True, False])
@pytest.mark.parametrize("down", [True, False])
def test_retry_is_shown_as_running(tracked, made_up, down):
    identity = replace(DONE, made_up=made_up)
    first = Tracker(_down(tracked) if down else tracked, identity)
    first.begin()
    first.measure("loss", Operator(1.0))
    first.end("FAILED", also=("parent",))
    Tracker(tracked, identity).begin()
    send_all(tracked)
    for experiment in (PUBLIC,) if made_up else (PUBLIC, OPERATOR):
        assert _statuses(tracked, identity, "parent", experiment) == ["RUNNING"]
        assert _statuses(tracked, identity, "step", experiment) == ["RUNNING"]


def test_cancelled_job_is_shown_as_killed_until_its_retry(tracked):
    first = Tracker(tracked, DONE)
    first.begin()
    _end_tracking(first, Stopped(), closed=True)
    send_all(tracked)
    assert [_statuses(tracked, DONE, t) for t in ("parent", "step")] == [["KILLED"], ["KILLED"]]
    again = Tracker(tracked, DONE)
    again.begin()
    assert _statuses(tracked, DONE, "parent") == ["RUNNING"]
    # its time was up, so the job will continue
    _end_tracking(again, Unfinished("time is up"), closed=False)
    send_all(tracked)
    assert [_statuses(tracked, DONE, t) for t in ("parent", "step")] == [["RUNNING"], ["KILLED"]]


def test_public_runs_of_a_failure_on_private_data_are_those_of_a_stopped_step(tracked):
    """Whether the texts could be read is the operator's alone, and so is every other failure."""
    errors = (PrivateTextRefusal("a source"), BudgetExceeded("ε"), ValueError("a text"), Stopped())
    for number, error in enumerate(errors):
        identity = replace(DONE, made_up=False, run_key=f"{number}")
        tracker = Tracker(tracked, identity)
        tracker.begin()
        _end_tracking(tracker, error, closed=True)
        send_all(tracked)
        for target in ("parent", "step"):
            true = [] if isinstance(error, Stopped) else ["FAILED"]
            assert _statuses(tracked, identity, target, OPERATOR) == true
            assert _statuses(tracked, identity, target) == ["KILLED"]
    client = MlflowClient(tracked.tracking)
    public = client.get_experiment_by_name(PUBLIC).experiment_id
    assert len(client.search_runs([public])) == 2 * len(errors)  # none is above refused jobs


def test_log_is_kept_until_its_work_is_finished_or_30_days_old(tracked, monkeypatch):
    Tracker(tracked, KILLED).begin()
    stopped = Tracker(tracked, DONE)
    stopped.end("FAILED", closed=False)
    assert send_all(tracked) == unsent(tracked) == 0
    assert len(EventLog.all(tracked.events)) == 2
    stopped.end("FINISHED")
    assert send_all(tracked) == 0
    down = Tracker(_down(tracked), REPORT)
    down.measure("epsilon", Public(1.0))
    assert unsent(tracked) == 1  # a log whose events are all delivered is not counted
    now, day = time.time(), 24 * 3600
    for days, left in ((29, {KILLED, REPORT}), (31, set())):
        monkeypatch.setattr(time, "time", lambda days=days: now + days * day)
        send_all(tracked)
        assert {log.identity for log in EventLog.all(tracked.events)} == left


def test_interrupted_removal_of_a_log_is_completed(tracked, monkeypatch):
    log = EventLog.of(tracked.events, DONE)
    log.append(AttemptEnded(status="FINISHED"))
    log.confirm(log.undelivered()[1])
    with monkeypatch.context() as killed:
        killed.setattr(event_log.shutil, "rmtree", lambda *_, **__: None)
        log.remove_if_delivered()
    assert list(tracked.events.glob("*.removed"))
    assert EventLog.all(tracked.events) == [] and unsent(tracked) == 0
    assert send_all(tracked) == 0
    assert list(tracked.events.glob("*.removed")) == []


def test_retry_in_another_run_continues_unfinished_work_only(tmp_path):
    for run, closed in (("run-2", True), ("run-3", False)):
        log = EventLog.of(tmp_path, replace(DONE, run_key=run))
        log.append(Begun(), metric(run, Public(1.0)), AttemptEnded(status="FAILED", closed=closed))
    for _ in range(2):
        again = EventLog.of(tmp_path, DONE)
        again.take_over(tmp_path)
        assert [number.name for number in again.metrics()] == ["run-3"]
    assert all(log.is_over() for log in EventLog.all(tmp_path) if log.identity != DONE)
