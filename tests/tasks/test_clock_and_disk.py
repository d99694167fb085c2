import errno
import itertools
import os
import threading
import time

import pytest

from dp_core.labels import Public
from dp_core.privacy.ledger import Entry, Ledger
from dp_core.privacy.mechanisms import PrivacyUnit, Unaccounted
from tasks.runtime.log import StepProgressReporter
from tasks.storage import journal
from tasks.tracking.event_log import EventLog, Identity, Tag
from tasks.tracking.mlflow import PUBLIC, _client
from tasks.tracking.tracker import Tracker

IDENTITY = Identity("dp_bert/1", "a run", "canaries", "", "canaries", "ab12", made_up=True)


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock that is reset repeatedly: a day ahead, two days back, an hour ahead."""
    true, jumps = time.time, itertools.cycle([0.0, 86_400.0, -172_800.0, 3_600.0])
    monkeypatch.setattr(time, "time", lambda: true() + next(jumps))


def test_metrics_are_delivered_once_in_order_under_a_jumping_clock(tracked, jumping):
    tracker = Tracker(tracked, IDENTITY)
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
    (step_run,) = [run for run in runs if run.info.run_name == "canaries"]
    history = api.get_metric_history(step_run.info.run_id, "loss")
    assert sorted((m.step, m.value) for m in history) == [(s, float(s)) for s in range(8)]
    assert EventLog.all(tracked.events) == []


def test_ledger_orders_entries_by_number_under_a_jumping_clock(tmp_path, jumping):
    ledger = Ledger.open(f"sqlite:///{tmp_path}/ledger.db")
    ledger.register_made_up("notes")
    patient = PrivacyUnit.PATIENT
    event = Unaccounted("made up", unit=patient)
    made = [ledger.reserve(Entry("notes", patient, event, 0.0, str(n))).id for n in range(6)]
    assert [entry.id for entry in ledger.history("notes")] == made


def test_progress_intervals_use_a_monotonic_clock(jumping, capsys):
    report = StepProgressReporter("step")
    for done in range(1, 6):
        report(done, 5)
    printed = capsys.readouterr().err.splitlines()
    assert printed[0].startswith("step: 1/5")  # then no output for ten seconds of a steady clock
    assert printed[1:] == ["step: 5/5"]


class TornDisk:
    """A disk that writes half of a line and then has no space left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._true, self._taken = os.write, False
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor: int, content: bytes) -> int:
        if self._taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._taken = True
        return self._true(descriptor, content[: len(content) // 2])


def test_half_written_event_is_removed_before_the_next(tmp_path):
    log = EventLog.of(tmp_path, IDENTITY)
    log.append(Tag(name="a", value=""))
    with pytest.MonkeyPatch.context() as patch:
        TornDisk(patch)
        with pytest.raises(OSError, match="No space left"):
            log.append(Tag(name="lost", value=""))
    log.append(Tag(name="b", value=""))
    assert [event.name for event in log.read()[0]] == ["a", "b"]


def test_torn_last_line_is_ignored_and_removed(tmp_path):
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
def test_line_separators_in_names_do_not_split_events(tmp_path, end):
    log = EventLog.of(tmp_path, IDENTITY)
    for _ in range(2):
        log.append(Tag(name=f"f1/a{end}b", value=""))
    assert [event.name for event in log.read()[0]] == [f"f1/a{end}b"] * 2


def test_line_waiting_for_a_renamed_file_is_written_to_a_new_file(tmp_path):
    file = tmp_path / "lines.jsonl"
    journal.append(file, "1")
    waiting = threading.Thread(target=journal.append, args=(file, "2"))
    with journal.exclusive(file):
        waiting.start()
        time.sleep(0.2)  # the thread has most likely opened the file by now
        file.rename(tmp_path / "gone")
    waiting.join()
    assert journal.read(file)[0] == ["2"]
