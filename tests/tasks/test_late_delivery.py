"""What arrives late, in whatever order: a job that has ended stays ended, and nothing is lost."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient  # noqa: TID251 - looks at what tracking.py left there

from dp_core.errors import Unfinished
from dp_core.labels import Operator, Public
from tasks.execution.contract import Stopped, _end_tracking
from tasks.runtime.deployment import Deployment
from tasks.tracking import event_log
from tasks.tracking.event_log import Ended, EventLog, Identity, Tag, metric
from tasks.tracking.mlflow import (
    KEY_TAG,
    OPERATOR,
    PUBLIC,
    Delivery,
    send_all,
    unsent,
)
from tasks.tracking.tracker import Tracker

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's and SQLAlchemy's own

DONE = Identity("run-1", "dp_bert today", "corpus", "", "corpus", "a" * 64, True)
KILLED = replace(DONE, task="canaries", step="canaries", spec_hash="b" * 64)
REPORT = replace(DONE, task="report", step="report", spec_hash="c" * 64)


def _left_behind(deployment: Deployment) -> None:
    """Keep what a finished step, a killed one and the last one could not send."""
    down = replace(deployment, tracking="http://127.0.0.1:9")
    for identity in (DONE, KILLED, REPORT):
        tracker = Tracker(down, identity)
        tracker.begin()
        if identity is not KILLED:
            tracker.end("FINISHED", also=("parent",) if identity is REPORT else ())


def _statuses(
    deployment: Deployment, identity: Identity, target: str, experiment: str = PUBLIC
) -> list[str]:
    client = MlflowClient(deployment.tracking)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return []
    key = identity.key(target)
    runs = client.search_runs([found.experiment_id], f"tags.`{KEY_TAG}` = '{key}'")
    return [str(run.info.status) for run in runs]


def _status(
    deployment: Deployment, identity: Identity, target: str, experiment: str = PUBLIC
) -> str:
    (status,) = _statuses(deployment, identity, target, experiment)
    return status


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_job_that_has_ended_is_not_shown_as_running(
    tracked: Deployment, monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    _left_behind(tracked)
    found = EventLog.all(tracked.events)
    monkeypatch.setattr(EventLog, "all", lambda parent: [found[place] for place in order])
    assert send_all(tracked) == 0
    assert _status(tracked, REPORT, "parent") == "FINISHED"
    assert _status(tracked, DONE, "step") == "FINISHED"
    assert _status(tracked, KILLED, "step") == "RUNNING"


def test_a_step_that_is_over_makes_no_job_run_again(tracked: Deployment) -> None:
    _left_behind(tracked)
    for identity in (REPORT, DONE):  # each by a process of its own
        Delivery(tracked).deliver(EventLog.of(tracked.events, identity))
    assert _status(tracked, REPORT, "parent") == "FINISHED"


def test_what_another_run_measured_since_makes_no_job_run_again(tracked: Deployment) -> None:
    """Both are told of one work; the first one's job has ended meanwhile."""
    down = replace(tracked, tracking="http://127.0.0.1:9")
    first = Tracker(down, DONE)
    first.begin()
    first.leave("KILLED", closed=False)
    Tracker(tracked, REPORT).end("FINISHED", also=("parent",))
    again = Tracker(tracked, replace(DONE, run_key="run-2"))
    again.begin()
    again.measure("loss", Public(1.0), 1)
    assert _status(tracked, DONE, "parent") == "FINISHED"
    assert _status(tracked, DONE, "step") == "KILLED"


@pytest.mark.parametrize("status", ["FINISHED", "FAILED"])
def test_the_last_step_sends_what_was_left_behind_before_its_end(
    tracked: Deployment, status: str
) -> None:
    Tracker(replace(tracked, tracking="http://127.0.0.1:9"), KILLED).begin()
    last = Tracker(tracked, REPORT)
    last.begin()
    last.end(status, also=("parent",))
    send_all(tracked)
    assert _status(tracked, REPORT, "parent") == status


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_a_step_with_nothing_for_the_operator_ends_the_job_there_too(
    tracked: Deployment, status: str, down: bool
) -> None:
    told = replace(tracked, tracking="http://127.0.0.1:9") if down else tracked
    point = replace(DONE, made_up=False, model="σ=1")
    first = Tracker(told, point)
    first.measure("loss", Operator(1.0))
    first.events.append(metric("loss", Operator(1.0), target="model"))
    first.end("FINISHED")
    last = Tracker(told, replace(point, task="report", step="report", spec_hash="c" * 64))
    last.begin()
    (last.leave if status == "KILLED" else last.end)(status, also=("model", "parent"))
    assert send_all(tracked) == 0
    for target in ("parent", "model"):
        for experiment in (PUBLIC, OPERATOR):
            assert _status(tracked, point, target, experiment) == status
    assert _status(tracked, point, "step", OPERATOR) == "FINISHED"


def test_an_operators_number_after_the_end_makes_no_job_run_again(tracked: Deployment) -> None:
    failed = Tracker(tracked, replace(DONE, made_up=False))
    failed.begin()
    other = Tracker(tracked, replace(KILLED, made_up=False))  # at work at the same time
    other.begin()
    failed.end("FAILED", also=("parent",))
    other.measure("loss", Operator(1.0))
    other.end("FINISHED")
    for experiment in (PUBLIC, OPERATOR):
        assert _status(tracked, replace(DONE, made_up=False), "parent", experiment) == "FAILED"
    Tracker(tracked, replace(DONE, made_up=False)).begin()
    for experiment in (PUBLIC, OPERATOR):
        assert _status(tracked, replace(DONE, made_up=False), "parent", experiment) == "RUNNING"


def test_nothing_is_made_in_an_experiment_to_end_it_there(tracked: Deployment) -> None:
    other = Tracker(tracked, replace(KILLED, made_up=False, run_key="run-2"))
    other.measure("loss", Operator(1.0))
    last = Tracker(tracked, replace(REPORT, made_up=False))
    last.begin()
    last.end("FINISHED", also=("parent",))
    for target in ("parent", "step"):
        assert _status(tracked, replace(REPORT, made_up=False), target) == "FINISHED"
        assert _statuses(tracked, replace(REPORT, made_up=False), target, OPERATOR) == []


@pytest.mark.parametrize("made_up", [True, False])
def test_a_retry_is_shown_as_running(tracked: Deployment, made_up: bool) -> None:
    identity = replace(DONE, made_up=made_up)
    first = Tracker(tracked, identity)
    first.begin()
    first.measure("loss", Operator(1.0))
    first.end("FAILED", also=("parent",))
    Tracker(tracked, identity).begin()
    for experiment in (PUBLIC,) if made_up else (PUBLIC, OPERATOR):
        assert _status(tracked, identity, "parent", experiment) == "RUNNING"


def test_a_cancelled_job_is_not_shown_as_running_until_it_is_tried_again(
    tracked: Deployment,
) -> None:
    first = Tracker(tracked, DONE)
    first.begin()
    _end_tracking(first, Stopped(), closed=True)
    send_all(tracked)
    assert [_status(tracked, DONE, t) for t in ("parent", "step")] == ["KILLED", "KILLED"]
    again = Tracker(tracked, DONE)
    again.begin()
    assert _status(tracked, DONE, "parent") == "RUNNING"
    _end_tracking(again, Unfinished("time is up"), closed=False)  # its time was up: the job goes on
    send_all(tracked)
    assert [_status(tracked, DONE, t) for t in ("parent", "step")] == ["RUNNING", "KILLED"]


def test_a_step_that_has_said_all_does_not_wait(tracked: Deployment) -> None:
    """A step that runs, or was killed, has an outbox as long as nothing ends it."""
    tracker = Tracker(tracked, KILLED)
    tracker.begin()
    Delivery(tracked).deliver(EventLog.of(tracked.events, KILLED))
    assert EventLog.all(tracked.events) and unsent(tracked) == 0
    down = Tracker(replace(tracked, tracking="http://127.0.0.1:9"), DONE)
    down.measure("epsilon", Public(1.0))
    assert unsent(tracked) == 1


def _told(parent: Path) -> EventLog:
    """Return a log whose work is over, and whose run was told so."""
    log = EventLog.of(parent, DONE)
    log.append(Ended(status="FINISHED"))
    log.confirm(DONE, log.undelivered(DONE)[1])
    return log


def test_a_log_that_was_removed_stays_removed(tmp_path: Path) -> None:
    """Made anew by its sender, it would belong to nobody, and take a new try's events with it."""
    log = _told(tmp_path)
    late = EventLog.all(tmp_path)[0]
    log.remove_if_told()
    with late.delivering() as ours:
        assert not ours
    assert not late.folder.exists()
    EventLog.of(tmp_path, DONE).append(Tag(name="a", value=""))
    assert EventLog.all(tmp_path)[0].runs() == [DONE]


def test_a_log_whose_removal_was_interrupted_waits_for_nobody(
    tracked: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = _told(tracked.events)
    with monkeypatch.context() as killed:
        killed.setattr(event_log.shutil, "rmtree", lambda *_, **__: None)
        log.remove_if_told()
    assert list(tracked.events.glob("*.removed"))
    assert EventLog.all(tracked.events) == [] and unsent(tracked) == 0
    assert send_all(tracked) == 0
    assert list(tracked.events.glob("*.removed")) == []


def test_who_holds_the_lock_of_a_removed_log_does_not_send_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog.of(tmp_path, DONE)
    opened = Path.open

    def removed_meanwhile(file: Path, *arguments: Any, **named: Any) -> Any:
        stream = opened(file, *arguments, **named)
        if file.name == "lock":
            log.folder.rename(tmp_path / "gone")
            EventLog.of(tmp_path, DONE)
        return stream

    monkeypatch.setattr(Path, "open", removed_meanwhile)
    with log.delivering() as ours:
        assert not ours


def test_a_file_kept_after_the_removal_is_kept_with_its_run(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("page")
    log = EventLog.of(tmp_path / "events", DONE)
    log.folder.rename(tmp_path / "gone")
    name = log.keep(page)
    (found,) = EventLog.all(tmp_path / "events")
    assert found.runs() == [DONE] and found.kept(name).read_text() == "page"


def test_a_log_that_goes_while_a_run_subscribes_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, gone = event_log.journal.exclusive, []

    def taken_away(file: Path) -> Any:
        if not gone:
            gone.append(file.parent.rename(tmp_path / "gone"))
        return locked(file)

    monkeypatch.setattr(event_log.journal, "exclusive", taken_away)
    assert EventLog.of(tmp_path / "events", DONE).runs() == [DONE]


def test_the_log_of_unfinished_work_stays_with_it(tracked: Deployment) -> None:
    """A retry goes on from its numbers; and one that was killed said no end."""
    Tracker(tracked, KILLED).begin()
    stopped = Tracker(tracked, DONE)
    stopped.end("FAILED", closed=False)
    assert send_all(tracked) == unsent(tracked) == 0
    assert len(EventLog.all(tracked.events)) == 2
    stopped.end("FINISHED")
    assert send_all(tracked) == 0
    (left,) = EventLog.all(tracked.events)
    assert left.runs() == [KILLED]


def test_the_log_of_abandoned_work_goes(
    tracked: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = Tracker(tracked, DONE)
    stopped.begin()
    stopped.end("FAILED", closed=False)
    (log,) = EventLog.all(tracked.events)
    at, day = time.time(), 24 * 3600
    for days, left in ((29, [log.folder]), (31, [])):
        monkeypatch.setattr(time, "time", lambda days=days: at + days * day)
        send_all(tracked)
        assert [each.folder for each in EventLog.all(tracked.events)] == left


def test_a_try_that_goes_on_is_not_shown_as_the_failed_one_before_it(tracked: Deployment) -> None:
    """What the earlier one could not send is sent with the later one's first lines."""
    failed = Tracker(replace(tracked, tracking="http://127.0.0.1:9"), DONE)
    failed.begin()
    failed.end("FAILED", also=("parent",))
    Tracker(tracked, DONE).begin()
    send_all(tracked)
    assert [_status(tracked, DONE, target) for target in ("parent", "step")] == ["RUNNING"] * 2
