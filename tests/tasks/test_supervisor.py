"""The supervisor leaves no process behind, stops no foreign one, and ends every step in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from child_processes import alive, wait_for

from tasks.protocol import supervisor
from tasks.protocol.messages import Failed, parse
from tasks.protocol.supervisor import Process

CHECKOUT = Path(__file__).resolve().parents[2]
ENTRYPOINT = CHECKOUT / "tasks" / "protocol" / "supervisor.py"
linux = pytest.mark.skipif(sys.platform != "linux", reason="sessions are read from /proc")
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


@linux
def test_output_is_written_to_the_log(tmp_path: Path) -> None:
    started = start(tmp_path, "echo word; echo another >&2")
    wait_for(lambda: not started.is_alive())
    assert (tmp_path / "log").read_text() == "word\nanother\n"


@linux
def test_stop_kills_a_process_that_ignores_sigterm_and_its_child(tmp_path: Path) -> None:
    started = start(tmp_path, STUBBORN_CHILD)
    child = child_of(tmp_path)
    assert started.is_alive()
    supervisor.stop([started], 0.1, for_the_rest=0.1)
    assert not started.is_alive()
    assert not alive(child)


@linux
def test_children_of_a_killed_parent_are_stopped(tmp_path: Path) -> None:
    started = start(tmp_path, STUBBORN_CHILD)
    child = child_of(tmp_path)
    os.kill(started.pid, signal.SIGKILL)
    wait_for(lambda: not started.is_alive())
    assert alive(child)
    supervisor.stop([started], 0.1, for_the_rest=0.1)
    assert not alive(child)


@linux
def test_reused_pid_is_not_stopped(tmp_path: Path) -> None:
    other = start(tmp_path, "exec sleep 60")
    stale = replace(other, birth="1")  # as an old state file may record it
    try:
        assert not stale.is_alive()
        supervisor.stop([stale], 0.1, for_the_rest=0.1)
        assert other.is_alive()
    finally:
        supervisor.stop([other], 0.1, for_the_rest=0.1)


@linux
def test_pid_of_an_earlier_boot_is_not_stopped(tmp_path: Path) -> None:
    """After a restart, the same pid and start time may belong to an unrelated process."""
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


@linux
def test_process_can_be_bound_to_its_parent(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, time\n"
        "from tasks.protocol import supervisor\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "p = supervisor.start(['sleep', '60'], os.environ, here, -3)\n"
        "(here / 'child').write_text(str(p.pid))\n"
        "time.sleep(60)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], cwd=CHECKOUT)
    child = child_of(tmp_path)
    assert alive(child)
    starter.kill()
    starter.wait()
    wait_for(lambda: not alive(child))


# --- process 1 of a container

# Prints when it is ready and when it receives SIGTERM; without a signal it ends after a minute.
PATIENT = """
import signal, sys, time
def terminated(number, frame):
    print("terminated", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, terminated)
print("ready", flush=True)
time.sleep(60)
"""
# Starts a process that outlives its parent unless the entrypoint stops it.
FORGETFUL = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(left.pid, flush=True)
"""
DEAF = PATIENT.replace(
    "signal.signal(signal.SIGTERM, terminated)", "signal.signal(15, signal.SIG_IGN)"
)


class Attended:
    """The entrypoint with a Python program as its child."""

    def __init__(self, program: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-S", "-E", str(ENTRYPOINT), sys.executable, "-c", program],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.stdin = None

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


@pytest.fixture
def attended() -> Iterator[type[Attended]]:
    started: list[Attended] = []

    class Recorded(Attended):
        def __init__(self, program: str, **variables: str) -> None:
            super().__init__(program, **variables)
            started.append(self)

    yield Recorded
    for entrypoint in started:
        entrypoint.process.kill()
        entrypoint.process.wait()
        for stream in (
            entrypoint.process.stdin,
            entrypoint.process.stdout,
            entrypoint.process.stderr,
        ):
            if stream is not None:
                stream.close()


@pytest.mark.parametrize("code", [0, 1, 2, 3, 143])
def test_entrypoint_returns_the_exit_code_of_the_step(attended: type[Attended], code: int) -> None:
    assert attended(f"raise SystemExit({code})").end()[0] == code


def test_entrypoint_returns_signals_as_a_shell_does(attended: type[Attended]) -> None:
    assert attended("import os; os.kill(os.getpid(), 9)").end()[0] == 137


def test_entrypoint_forwards_sigterm(attended: type[Attended]) -> None:
    step = attended(PATIENT)
    assert step.line() == "ready"
    step.process.send_signal(signal.SIGTERM)
    code, out, err = step.end()
    assert (code, out) == (143, "terminated\n")
    assert "told to end" in err


def test_entrypoint_kills_a_step_that_ignores_sigterm(attended: type[Attended]) -> None:
    step = attended(DEAF)
    assert step.line() == "ready"
    step.process.send_signal(signal.SIGTERM)
    assert step.end()[0] == 137


def test_step_ends_when_the_lease_closes(attended: type[Attended]) -> None:
    step = attended(PATIENT, CONFIDE_LEASE="stdin")
    assert step.line() == "ready"
    assert step.process.poll() is None
    step.close_stdin()
    code, out, err = step.end()
    assert (code, out) == (143, "terminated\n")
    assert "whoever started this step is gone" in err


def test_closed_stdin_without_a_lease_is_ignored(attended: type[Attended]) -> None:
    step = attended("import time; time.sleep(1); print('done')")
    step.close_stdin()
    assert step.end()[:2] == (0, "done\n")


def test_input_on_the_lease_does_not_end_the_step(attended: type[Attended]) -> None:
    step = attended("import time; time.sleep(1); print('done')", CONFIDE_LEASE="stdin")
    assert step.process.stdin is not None
    step.process.stdin.write("anything\n")
    step.process.stdin.flush()
    assert step.line() == "done"
    assert step.process.wait(30) == 0


def test_step_ends_at_its_deadline(attended: type[Attended]) -> None:
    # the start of the interpreter counts too
    code, out, err = attended(PATIENT, CONFIDE_DEADLINE="8").end()
    assert (code, out) == (143, "ready\nterminated\n")
    assert "not done after 8 s" in err


def test_child_processes_end_with_the_step(attended: type[Attended]) -> None:
    step = attended(FORGETFUL)
    left = int(step.line())
    assert step.end()[0] == 0
    wait_for(lambda: not alive(left))  # the kernel needs a moment to remove the process


def test_missing_command_is_reported() -> None:
    answer = subprocess.run(
        [sys.executable, "-P", "-S", "-E", str(ENTRYPOINT), "/nowhere/python"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert answer.returncode == 127
    assert "cannot start /nowhere/python" in answer.stderr


def test_grace_periods_increase_from_the_step_outwards() -> None:
    """Each waits for the inner one, and Airflow, the outermost, kills after five seconds."""
    assert supervisor.STEP_GRACE < supervisor.ENTRYPOINT_GRACE < supervisor.LAUNCHER_GRACE < 5


def test_entrypoint_sends_the_failure_of_a_killed_step(attended: type[Attended]) -> None:
    step = attended(PATIENT, CONFIDE_LEASE="stdin", CONFIDE_MESSAGES="stdout")
    assert step.line() == "ready"
    step.close_stdin()
    message = step.end()[1].splitlines()[-1]
    assert parse(message) == Failed(exit_code=143, reason="whoever started this step is gone")
