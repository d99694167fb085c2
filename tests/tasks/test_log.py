import json
import logging
import sys
import warnings
from types import SimpleNamespace

import pytest

from dp_core.errors import BadInput
from tasks.protocol.messages import TrackedAt, parse
from tasks.protocol.specs import RunContext
from tasks.runtime.log import StepProgressReporter, configure, log, send, silence

CONTEXT = RunContext(run_key="dp_bert/manual__1", run_name="a run", task="dp_pretraining", point="")


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    for name in ("CONFIDE_LOG", "CONFIDE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.delenv("CONFIDE_LOG", raising=False)
    configure("")


@pytest.mark.parametrize("form", ["", "json"])
def test_line_is_written_with_its_end_in_one_call(monkeypatch, form):
    pieces = []
    monkeypatch.setenv("CONFIDE_LOG", form)
    configure("pretrain", CONTEXT)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=pieces.append, flush=lambda: None))
    log("two words" if not form else "two\nwords", "warning")
    (line,) = pieces
    if not form:
        assert line == "two words\n"
        return
    body = json.loads(line)
    assert line.endswith("}\n") and body.pop("time").endswith("+00:00")
    assert body == {
        "level": "warning",
        "step": "pretrain",
        "run": "dp_bert/manual__1",
        "task": "dp_pretraining",
        "point": "",
        "message": "two words",
    }


@pytest.mark.parametrize("form", ["", "text", "json"])
def test_silence_suppresses_lines_of_libraries(capsys, monkeypatch, form):
    monkeypatch.setenv("CONFIDE_LOG", form)
    configure("select", CONTEXT)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with silence():
            logging.getLogger("tensorflow").warning("5 out of the last 9 calls")
            warnings.warn("again", stacklevel=1)
            log("heard")
        logging.getLogger("tensorflow").warning("loud again")
    lines = capsys.readouterr().err.splitlines()
    if form == "json":
        lines = [json.loads(line)["message"] for line in lines]
    assert [line.split()[0] for line in lines] == ["heard", "tensorflow"]


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_locate_library_messages_without_quoting_them(capsys, monkeypatch, form):
    monkeypatch.setenv("CONFIDE_LOG", form)
    configure("corpus", CONTEXT)
    logging.getLogger("some.package").error("cannot parse %s", "zyxsecret")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("zyxsecret", stacklevel=1)
    output = capsys.readouterr().err
    assert "zyxsecret" not in output
    lines = output.splitlines()
    if form == "json":
        assert json.loads(lines[0])["level"] == "error"
        lines = [json.loads(line)["message"] for line in lines]
    assert lines[0].startswith("some.package (test_log.py:")
    assert lines[1].startswith("py.warnings (")


def test_unknown_log_form_is_refused(monkeypatch):
    monkeypatch.setenv("CONFIDE_LOG", "xml")
    with pytest.raises(BadInput, match="CONFIDE_LOG"):
        configure("pretrain")


def test_messages_are_written_to_their_channel_only(capsys, monkeypatch, tmp_path):
    file = tmp_path / "channel"
    for channel in (str(file), "stdout", ""):
        monkeypatch.setenv("CONFIDE_MESSAGES", channel)
        send(TrackedAt(url="http://127.0.0.1:5000/#/1"))
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out == file.read_text()
    assert parse(output.out) == TrackedAt(url="http://127.0.0.1:5000/#/1")


def test_progress_on_a_full_disk_does_not_end_the_step(tmp_path, capsys, monkeypatch):
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
