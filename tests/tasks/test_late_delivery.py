"""What arrives late, in whatever order: a job that has ended stays ended, and nothing is lost."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient  # noqa: TID251 - looks at what tracking.py left there

from dp_core.labels import Operator, Public
from tasks.runtime.deployment import Deployment
from tasks.tracking import outbox
from tasks.tracking.mlflow import (
    KEY_TAG,
    OPERATOR,
    PUBLIC,
    Delivery,
    Tracker,
    send_all,
    unsent,
)
from tasks.tracking.outbox import Identity, Outbox
from tasks.tracking.recording import end_tracking

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
            tracker.finish("FINISHED", also=("parent",) if identity is REPORT else ())


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
    found = Outbox.all(tracked.outbox)
    monkeypatch.setattr(Outbox, "all", lambda parent: [found[place] for place in order])
    assert send_all(tracked) == 0
    assert _status(tracked, REPORT, "parent") == "FINISHED"
    assert _status(tracked, DONE, "step") == "FINISHED"
    assert _status(tracked, KILLED, "step") == "RUNNING"


def test_a_step_that_is_over_makes_no_job_run_again(tracked: Deployment) -> None:
    _left_behind(tracked)
    for identity in (REPORT, DONE):  # each by a process of its own
        Delivery(tracked).deliver(Outbox.create(tracked.outbox, identity))
    assert _status(tracked, REPORT, "parent") == "FINISHED"


@pytest.mark.parametrize("status", ["FINISHED", "FAILED"])
def test_the_last_step_sends_what_was_left_behind_before_its_end(
    tracked: Deployment, status: str
) -> None:
    Tracker(replace(tracked, tracking="http://127.0.0.1:9"), KILLED).begin()
    last = Tracker(tracked, REPORT)
    last.begin()
    last.finish(status, also=("parent",))
    send_all(tracked)
    assert _status(tracked, REPORT, "parent") == status


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_a_step_with_nothing_for_the_operator_ends_the_job_there_too(
    tracked: Deployment, status: str, down: bool
) -> None:
    told = replace(tracked, tracking="http://127.0.0.1:9") if down else tracked
    point = replace(DONE, made_up=False, point="σ=1")
    first = Tracker(told, point)
    first.operator({"loss": Operator(1.0)})
    first.operator({"loss": Operator(1.0)}, target="point")
    first.finish("FINISHED")
    last = Tracker(told, replace(point, task="report", step="report", spec_hash="c" * 64))
    last.begin()
    (last.leave if status == "KILLED" else last.finish)(status, also=("point", "parent"))
    assert send_all(tracked) == 0
    for target in ("parent", "point"):
        for experiment in (PUBLIC, OPERATOR):
            assert _status(tracked, point, target, experiment) == status
    assert _status(tracked, point, "step", OPERATOR) == "FINISHED"


def test_an_operators_number_after_the_end_makes_no_job_run_again(tracked: Deployment) -> None:
    failed = Tracker(tracked, replace(DONE, made_up=False))
    failed.begin()
    other = Tracker(tracked, replace(KILLED, made_up=False))  # at work at the same time
    other.begin()
    failed.finish("FAILED", also=("parent",))
    other.operator({"loss": Operator(1.0)})
    other.finish("FINISHED")
    for experiment in (PUBLIC, OPERATOR):
        assert _status(tracked, replace(DONE, made_up=False), "parent", experiment) == "FAILED"
    Tracker(tracked, replace(DONE, made_up=False)).begin()
    for experiment in (PUBLIC, OPERATOR):
        assert _status(tracked, replace(DONE, made_up=False), "parent", experiment) == "RUNNING"


def test_nothing_is_made_in_an_experiment_to_end_it_there(tracked: Deployment) -> None:
    other = Tracker(tracked, replace(KILLED, made_up=False, run_key="run-2"))
    other.operator({"loss": Operator(1.0)})
    last = Tracker(tracked, replace(REPORT, made_up=False))
    last.begin()
    last.finish("FINISHED", also=("parent",))
    for target in ("parent", "step"):
        assert _status(tracked, replace(REPORT, made_up=False), target) == "FINISHED"
        assert _statuses(tracked, replace(REPORT, made_up=False), target, OPERATOR) == []


@pytest.mark.parametrize("made_up", [True, False])
def test_a_retry_is_shown_as_running(tracked: Deployment, made_up: bool) -> None:
    identity = replace(DONE, made_up=made_up)
    first = Tracker(tracked, identity)
    first.begin()
    first.operator({"loss": Operator(1.0)})
    first.finish("FAILED", also=("parent",))
    Tracker(tracked, identity).begin()
    for experiment in (PUBLIC,) if made_up else (PUBLIC, OPERATOR):
        assert _status(tracked, identity, "parent", experiment) == "RUNNING"


def test_a_cancelled_job_is_not_shown_as_running_until_it_is_tried_again(
    tracked: Deployment,
) -> None:
    first = Tracker(tracked, DONE)
    first.begin()
    end_tracking(first, stopped=True, goes_on=False)
    send_all(tracked)
    assert [_status(tracked, DONE, t) for t in ("parent", "step")] == ["KILLED", "KILLED"]
    again = Tracker(tracked, DONE)
    again.begin()
    assert _status(tracked, DONE, "parent") == "RUNNING"
    end_tracking(again, stopped=False, goes_on=True)  # its time was up: the job goes on
    send_all(tracked)
    assert [_status(tracked, DONE, t) for t in ("parent", "step")] == ["RUNNING", "KILLED"]


def test_a_step_that_has_said_all_does_not_wait(tracked: Deployment) -> None:
    """A step that runs, or was killed, has an outbox as long as nothing ends it."""
    tracker = Tracker(tracked, KILLED)
    tracker.begin()
    Delivery(tracked).deliver(Outbox.create(tracked.outbox, KILLED))
    assert Outbox.all(tracked.outbox) and unsent(tracked) == 0
    down = Tracker(replace(tracked, tracking="http://127.0.0.1:9"), DONE)
    down.publishable({"epsilon": Public(1.0)})
    assert unsent(tracked) == 1


def test_an_outbox_that_was_removed_stays_removed(tmp_path: Path) -> None:
    """Made anew by its sender, it would belong to nobody, and take a new try's lines with it."""
    box = Outbox.create(tmp_path, DONE)
    box.add(kind="end", status="FINISHED")
    box.confirm(1)
    late = Outbox.all(tmp_path)[0]
    box.remove()
    with late.sending() as mine:
        assert not mine
    assert not late.folder.exists()
    again = Outbox.create(tmp_path, DONE)
    again.add(kind="tag", key="a")
    assert Outbox.all(tmp_path)[0].identity == DONE


def test_an_outbox_whose_removal_was_interrupted_waits_for_nobody(
    tracked: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Outbox.create(tracked.outbox, DONE)
    box.add(kind="end", status="FINISHED")
    box.confirm(1)
    with monkeypatch.context() as killed:
        killed.setattr(outbox.shutil, "rmtree", lambda *_, **__: None)
        box.remove()
    (box.folder.with_name(f"{box.folder.name}.sent") / "sent").unlink()  # as far as it came
    assert Outbox.all(tracked.outbox) == [] and unsent(tracked) == 0
    assert send_all(tracked) == 0
    assert list(tracked.outbox.glob("*.sent")) == []


def test_who_holds_the_lock_of_a_removed_outbox_does_not_send_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = Outbox.create(tmp_path, DONE)
    opened = Path.open

    def removed_meanwhile(file: Path, *arguments: Any, **named: Any) -> Any:
        stream = opened(file, *arguments, **named)
        if file.name == "lock":
            box.folder.rename(tmp_path / "gone")
            Outbox.create(tmp_path, DONE)
        return stream

    monkeypatch.setattr(Path, "open", removed_meanwhile)
    with box.sending() as mine:
        assert not mine


def test_a_file_kept_after_the_removal_is_kept_with_its_owner(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("page")
    box = Outbox.create(tmp_path / "outbox", DONE)
    box.folder.rename(tmp_path / "gone")
    name = box.keep(page)
    (found,) = Outbox.all(tmp_path / "outbox")
    assert found.identity == DONE and found.file(name).read_text() == "page"


def test_an_outbox_that_goes_while_it_is_opened_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, gone = outbox._replace, []

    def taken_away(file: Path, content: str) -> None:
        if not gone:
            gone.append(file.parent.rename(tmp_path / "gone"))
        written(file, content)

    monkeypatch.setattr(outbox, "_replace", taken_away)
    assert Outbox.create(tmp_path / "outbox", DONE).identity == DONE


def test_the_outbox_of_a_step_that_was_killed_goes_in_the_end(tracked: Deployment) -> None:
    Tracker(tracked, KILLED).begin()
    (box,) = Outbox.all(tracked.outbox)
    send_all(tracked)
    assert Outbox.all(tracked.outbox), "a step that is at work may be silent for days"
    before = time.time() - outbox.FORGOTTEN - 60
    for file in box.folder.iterdir():
        os.utime(file, (before, before))
    send_all(tracked)
    assert Outbox.all(tracked.outbox) == []
    Outbox.create(tracked.outbox, DONE)  # and a new one, which has said nothing yet, does not
    send_all(tracked)
    assert Outbox.all(tracked.outbox)


def test_a_try_that_goes_on_is_not_shown_as_the_failed_one_before_it(tracked: Deployment) -> None:
    """What the earlier one could not send is sent with the later one's first lines."""
    failed = Tracker(replace(tracked, tracking="http://127.0.0.1:9"), DONE)
    failed.begin()
    failed.finish("FAILED", also=("parent",))
    Tracker(tracked, DONE).begin()
    send_all(tracked)
    assert [_status(tracked, DONE, target) for target in ("parent", "step")] == ["RUNNING"] * 2
