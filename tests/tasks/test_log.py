"""The log: the same words as a line for people or as an object for programs, and no message."""

import io
import json
import logging
import sys
import warnings
from pathlib import Path

import pytest

from dp_core.errors import BadInput
from tasks.execution import contract
from tasks.protocol import RunContext
from tasks.protocol.messages import TrackedAt, parse
from tasks.runtime.log import StepProgressReporter, configure, log, send, silence

CONTEXT = RunContext(run_key="dp_bert/manual__1", run_name="a run", task="dp_pretraining", point="")


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    for name in ("CONFIDE_LOG", "CONFIDE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.delenv("CONFIDE_LOG", raising=False)
    configure("")


def test_lines_are_for_people_unless_programs_are_asked_for(capsys):
    configure("pretrain", CONTEXT)
    log("dp_pretraining: 3/10")
    assert capsys.readouterr().err == "dp_pretraining: 3/10\n"


def test_a_line_and_its_end_are_written_at_once(monkeypatch):
    class Unbuffered(io.StringIO):
        def __init__(self):
            super().__init__()
            self.pieces = []

        def write(self, piece):
            self.pieces.append(piece)
            return len(piece)

    stream = Unbuffered()
    monkeypatch.setattr(sys, "stderr", stream)
    log("one")
    log("two")
    assert stream.pieces == ["one\n", "two\n"]


def test_in_json_every_line_says_who_when_and_how_bad(capsys, monkeypatch):
    monkeypatch.setenv("CONFIDE_LOG", "json")
    configure("pretrain", CONTEXT)
    log("two\nlines", "warning")
    (line,) = capsys.readouterr().err.splitlines()
    body = json.loads(line)
    assert body.pop("time").endswith("+00:00")
    assert body == {
        "level": "warning",
        "step": "pretrain",
        "run": "dp_bert/manual__1",
        "task": "dp_pretraining",
        "point": "",
        "message": "two lines",
    }


@pytest.mark.parametrize("form", ["", "text", "json"])
def test_in_silence_libraries_leave_no_line(capsys, monkeypatch, form):
    monkeypatch.setenv("CONFIDE_LOG", form)
    configure("select", CONTEXT)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with silence():
            logging.getLogger("tensorflow").warning("5 out of the last 9 calls")
            warnings.warn("again", stacklevel=1)
            log("heard")
        logging.getLogger("tensorflow").warning("loud again")
    said = capsys.readouterr().err.splitlines()
    if form == "json":
        said = [json.loads(line)["message"] for line in said]
    assert [line.split()[0] for line in said] == ["heard", "tensorflow"]


def test_lines_for_people_quote_no_library_either(capsys):
    configure("corpus", CONTEXT)
    logging.getLogger("some.package").error("cannot parse %s", "zyxsecret")
    said = capsys.readouterr().err
    assert said.startswith("some.package (test_log.py:") and "zyxsecret" not in said


def test_what_libraries_log_is_placed_but_not_quoted(capsys, monkeypatch):
    monkeypatch.setenv("CONFIDE_LOG", "json")
    configure("corpus", CONTEXT)
    logging.getLogger("some.package").error("cannot parse %s", "zyxsecret")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("zyxsecret", stacklevel=1)
    said = capsys.readouterr().err
    assert "zyxsecret" not in said
    levels = [
        (json.loads(line)["level"], json.loads(line)["message"]) for line in said.splitlines()
    ]
    assert levels[0][0] == "error"
    assert levels[0][1].startswith("some.package (test_log.py:")
    assert levels[1][1].startswith("py.warnings (")


def test_another_form_is_refused(monkeypatch):
    monkeypatch.setenv("CONFIDE_LOG", "xml")
    with pytest.raises(BadInput, match="CONFIDE_LOG"):
        configure("pretrain")


def test_a_step_that_fails_says_so_in_the_form_that_was_asked_for(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CONFIDE_LOG", "json")
    monkeypatch.setenv("CONFIDE_HOME", str(tmp_path))
    assert contract.main("pretrain", "data:,{}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["level"] == "error"
    assert json.loads(line)["message"].startswith("confide: pretrain: ")


def test_messages_go_to_their_channel_and_not_to_the_log(capsys, monkeypatch, tmp_path):
    file = tmp_path / "channel"
    for channel in (str(file), "stdout", ""):
        monkeypatch.setenv("CONFIDE_MESSAGES", channel)
        send(TrackedAt(url="http://127.0.0.1:5000/#/1"))
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out == file.read_text()
    assert parse(said.out) == TrackedAt(url="http://127.0.0.1:5000/#/1")


def test_progress_that_cannot_be_kept_ends_no_step(tmp_path, capsys, monkeypatch):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "channel").symlink_to("/dev/full")  # every write meets a full disk
    monkeypatch.setenv("CONFIDE_MESSAGES", str(tmp_path / "channel"))
    report = StepProgressReporter("step")
    for done in range(1, 4):
        report(done, 3)
    printed = capsys.readouterr().err.splitlines()
    assert [line for line in printed if "not kept" in line] == [
        "messages are not kept (No space left on device)"
    ]
    assert printed[-1] == "step: 3/3"
