import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from child_processes import alive, wait_for

from tasks.protocol import supervisor
from tasks.protocol.supervisor import Process

CHECKOUT = Path(__file__).resolve().parents[2]
STUBBORN_CHILD = "trap '' TERM; (trap '' TERM; exec sleep 60) & echo $! > {0}/child; wait; sleep 60"


def start(folder: Path, script: str, *, end_with_us: bool = False) -> Process:
    words = ["/bin/sh", "-c", script.format(folder)]
    with (folder / "log").open("ab") as output:
        process = supervisor.start(words, os.environ, folder, output, end_with_us=end_with_us)
    return supervisor.released(process)


def child_of(tmp_path: Path) -> int:
    file = tmp_path / "child"
    wait_for(lambda: file.exists() and file.read_text().strip())
    return int(file.read_text())


@pytest.mark.parametrize("parent_is_killed", [False, True])
def test_stop_kills_a_process_that_ignores_sigterm_and_its_child(tmp_path, parent_is_killed):
    started = start(tmp_path, STUBBORN_CHILD)
    child = child_of(tmp_path)
    assert started.is_alive()
    if parent_is_killed:
        os.kill(started.pid, signal.SIGKILL)
        wait_for(lambda: not started.is_alive())
        assert alive(child)
    supervisor.stop([started], 0.1, for_the_rest=0.1)
    assert not started.is_alive()
    assert not alive(child)


def test_reused_pid_is_not_stopped(tmp_path):
    other = start(tmp_path, "exec sleep 60")
    stale = replace(other, birth="1")  # as an old state file may record it
    try:
        assert not stale.is_alive()
        supervisor.stop([stale], 0.1, for_the_rest=0.1)
        assert other.is_alive()
    finally:
        supervisor.stop([other], 0.1, for_the_rest=0.1)


def test_pid_of_an_earlier_boot_is_not_stopped(tmp_path):
    other = start(tmp_path, STUBBORN_CHILD)
    child = child_of(tmp_path)
    stale = replace(other, boot="0b6e2a52-of-another-boot")
    try:
        assert not stale.is_alive()
        supervisor.stop([stale], 0.1, for_the_rest=0.1)
        assert other.is_alive()
        os.kill(other.pid, signal.SIGKILL)
        wait_for(lambda: not other.is_alive())
        supervisor.stop([stale], 0.1, for_the_rest=0.1)  # only the session still has this number
        assert alive(child)
    finally:
        supervisor.stop([other], 0.1, for_the_rest=0.1)
    assert not alive(child)


# --- a step in a container

# A step that may ignore SIGTERM, as a long native call does, and that ends after some seconds.
LEASED = """
import signal, sys, time
from tasks.execution.contract import end_with_launcher
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
end_with_launcher()
print("ready", flush=True)
time.sleep(1 if sys.argv[1] == "short" else 60)
"""


def leased(kind: str, given: str | None = None, **variables: str) -> tuple[int, str]:
    process = subprocess.Popen(
        [sys.executable, "-c", LEASED, kind],
        cwd=CHECKOUT,
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    if given is not None:  # the input stays open
        process.stdin.write(given)
        process.stdin.flush()
        process.wait()
    _, log = process.communicate()
    return process.returncode, log


@pytest.mark.parametrize(("kind", "code"), [("patient", -signal.SIGTERM), ("deaf", 143)])
def test_step_ends_when_its_launcher_closes_the_lease(kind, code):
    ended, log = leased(kind, CONFIDE_LEASE="stdin")
    assert ended == code and "the launcher of this step has ended" in log


def test_closed_input_without_a_lease_and_input_on_a_lease_do_not_end_the_step():
    assert leased("short")[0] == 0
    assert leased("short", "anything\n", CONFIDE_LEASE="stdin")[0] == 0
