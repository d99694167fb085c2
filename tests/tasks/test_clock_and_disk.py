"""A clock that jumps, and a disk that is full: nothing lost, nothing doubled, no time runs back."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from pathlib import Path

import pytest

from dp_core.labels import Public
from dp_core.privacy.ledger import Ledger, Reservation
from dp_core.privacy.mechanisms import PrivacyUnit, Unaccounted
from tasks.runtime.deployment import Deployment
from tasks.runtime.log import StepProgressReporter
from tasks.storage import journal
from tasks.tracking.event_log import EventLog, Identity, Tag
from tasks.tracking.mlflow import PUBLIC, _client
from tasks.tracking.tracker import Tracker

WHO = Identity("dp_bert/1", "a run", "canaries", "", "canaries", "ab12", made_up=True)


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock that somebody sets: a day ahead, two days back, an hour ahead, and so on."""
    true, jumps = time.time, itertools.cycle([0.0, 86_400.0, -172_800.0, 3_600.0])
    monkeypatch.setattr(time, "time", lambda: true() + next(jumps))


def test_numbers_arrive_once_each_in_the_order_of_their_steps(
    tracked: Deployment, jumping: None
) -> None:
    tracker = Tracker(tracked, WHO)
    tracker.begin()
    for step in range(8):
        tracker.measure("loss", Public(float(step)), step)
        tracker.deliver()
    tracker.end("FINISHED", also=("parent",))
    api = _client(tracked)
    (experiment,) = [e for e in api.search_experiments() if e.name == PUBLIC]
    runs = api.search_runs([experiment.experiment_id])
    assert len(runs) == 2
    for run in runs:
        assert run.info.end_time >= run.info.start_time
    (own,) = [run for run in runs if run.info.run_name == "canaries"]
    history = api.get_metric_history(own.info.run_id, "loss")
    assert sorted((m.step, m.value) for m in history) == [(s, float(s)) for s in range(8)]
    assert EventLog.all(tracked.events) == []


def test_the_ledger_counts_by_number_and_not_by_time(tmp_path: Path, jumping: None) -> None:
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.db")
    ledger.register_made_up("notes")
    made = [
        ledger.reserve(
            Reservation(
                dataset="notes",
                unit=PrivacyUnit.PATIENT,
                event=Unaccounted("made up", unit=PrivacyUnit.PATIENT),
                delta=0.0,
                spec_hash=f"{number}",
                plan_key="run",
                run="run",
            )
        ).id
        for number in range(6)
    ]
    assert [entry.id for entry in ledger.history("notes")] == made


def test_how_long_a_step_took_is_not_read_off_the_wall(jumping: None, capsys) -> None:
    said = StepProgressReporter("step")
    for done in range(1, 6):
        said(done, 5)
    printed = capsys.readouterr().err.splitlines()
    assert printed[0].startswith("step: 1/5")  # then silence for ten seconds of a clock that runs
    assert printed[1:] == ["step: 5/5"]


class TornDisk:
    """Takes half of a line, and has no room for the rest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._true, self._taken = os.write, False
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor: int, content: bytes) -> int:
        if self._taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._taken = True
        return self._true(descriptor, content[: len(content) // 2])


def test_half_an_event_is_taken_back_and_the_next_one_is_whole(tmp_path: Path) -> None:
    log = EventLog.of(tmp_path, WHO)
    log.append(Tag(name="a", value=""))
    with pytest.MonkeyPatch.context() as patch:
        TornDisk(patch)
        with pytest.raises(OSError, match="No space left"):
            log.append(Tag(name="lost", value=""))
    log.append(Tag(name="b", value=""))
    assert [event.name for event in log.read()[0]] == ["a", "b"]


def test_a_torn_end_is_no_line_and_is_cut_off_before_the_next(tmp_path: Path) -> None:
    """A power cut leaves half a line; the next one must not be glued to it."""
    file = tmp_path / "lines.jsonl"
    journal.append(file, "1")
    with file.open("a") as stream:
        stream.write('{"b": 2')
    assert journal.read(file) == (["1"], 2)
    journal.append(file, "2")
    assert journal.read(file) == (["1", "2"], 4)
    assert journal.read(file, 2) == (["2"], 4)
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("end", ["\u2028", "\u0085", "\r"])
def test_a_name_with_an_end_of_line_of_its_own_cuts_no_line(tmp_path: Path, end: str) -> None:
    log = EventLog.of(tmp_path, WHO)
    for _ in range(2):
        log.append(Tag(name=f"f1/a{end}b", value=""))
    assert [event.name for event in log.read()[0]] == [f"f1/a{end}b"] * 2


def test_a_line_that_waits_for_a_file_that_goes_away_is_written_anew(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    journal.append(file, "1")
    waiting = threading.Thread(target=journal.append, args=(file, "2"))
    with journal.exclusive(file):
        waiting.start()
        time.sleep(0.2)  # it has opened the file, most likely
        file.rename(tmp_path / "gone")
    waiting.join()
    assert journal.read(file)[0] == ["2"]
