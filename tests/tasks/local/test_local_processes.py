"""Starting and stopping: nothing is left, and nobody else's process is touched."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.local import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sessions are read from /proc")
CHECKOUT = Path(__file__).resolve().parents[3]
STUBBORN_CHILD = "trap '' TERM; (trap '' TERM; exec sleep 60) & echo $! > {0}/child; wait; sleep 60"


def start(tmp_path, script, **options):
    return processes.start(
        ["/bin/sh", "-c", script.format(tmp_path)],
        os.environ,
        tmp_path,
        tmp_path / "log",
        **({"end_with_us": False} | options),
    )


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def child_of(tmp_path) -> int:
    file = tmp_path / "child"
    wait_for(lambda: file.exists() and file.read_text().strip())
    return int(file.read_text())


def test_output_goes_to_the_log(tmp_path):
    started = start(tmp_path, "echo word; echo another >&2")
    wait_for(lambda: not processes.is_alive(started))
    assert (tmp_path / "log").read_text() == "word\nanother\n"


def test_stopping_ends_a_stubborn_process_and_its_child(tmp_path):
    started = start(tmp_path, STUBBORN_CHILD)
    child = child_of(tmp_path)
    assert processes.is_alive(started)
    processes.stop([started], patience=0.1)
    assert not processes.is_alive(started)
    assert not running(child)


def test_children_are_found_after_their_parent_was_killed(tmp_path):
    started = start(tmp_path, STUBBORN_CHILD)
    child = child_of(tmp_path)
    os.kill(started.pid, signal.SIGKILL)
    wait_for(lambda: not processes.is_alive(started))
    assert running(child)
    processes.stop([started], patience=0.1)
    assert not running(child)


def test_a_pid_that_was_used_anew_is_left_alone(tmp_path):
    other = start(tmp_path, "exec sleep 60")
    stale = replace(other, birth="1")  # what an old state file may say
    try:
        assert not processes.is_alive(stale)
        processes.stop([stale], patience=0.1)
        assert processes.is_alive(other)
    finally:
        processes.stop([other], patience=0.1)


def test_what_an_earlier_boot_started_is_left_alone(tmp_path):
    """By then the same pid, born as long after the start of the machine, may be anybody's."""
    other = start(tmp_path, STUBBORN_CHILD)
    child = child_of(tmp_path)
    stale = replace(other, boot="0b6e2a52-of-another-boot")
    try:
        assert not processes.is_alive(stale)
        processes.stop([stale], patience=0.1)
        assert processes.is_alive(other)
        os.kill(other.pid, signal.SIGKILL)
        wait_for(lambda: not processes.is_alive(other))
        processes.stop([stale], patience=0.1)  # now the session alone bears the number
        assert running(child)
    finally:
        processes.stop([other], patience=0.1)
    assert not running(child)


def test_a_process_may_be_made_to_end_with_its_starter(tmp_path):
    program = (
        "import os, pathlib, time\n"
        "from tasks.local import processes\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "p = processes.start(['sleep', '60'], os.environ, here, here / 'log', end_with_us=True)\n"
        "(here / 'child').write_text(str(p.pid))\n"
        "time.sleep(60)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], cwd=CHECKOUT)
    child = child_of(tmp_path)
    assert running(child)
    starter.kill()
    starter.wait()
    wait_for(lambda: not running(child))
