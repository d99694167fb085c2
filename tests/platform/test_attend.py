"""The first process of a step's container: it must end the step, and only when it has to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ATTEND = ROOT / "docker" / "attend.py"
# Says when it is ready, and how it was told to end; ends by itself only after a minute.
PATIENT = """
import signal, sys, time
def told(number, frame):
    print("told", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, told)
print("ready", flush=True)
time.sleep(60)
"""
# Starts a process that outlives it, unless somebody sees to that.
FORGETFUL = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(left.pid, flush=True)
"""
DEAF = PATIENT.replace("signal.signal(signal.SIGTERM, told)", "signal.signal(15, signal.SIG_IGN)")


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Attended:
    """attend.py with a Python program under it."""

    def __init__(self, program: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(ATTEND), sys.executable, "-c", program],
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
    for one in started:
        one.process.kill()
        one.process.wait()
        for stream in (one.process.stdin, one.process.stdout, one.process.stderr):
            if stream is not None:
                stream.close()


@pytest.mark.parametrize("code", [0, 1, 2, 3, 143])
def test_answers_with_the_step_s_own_exit_code(attended: type[Attended], code: int) -> None:
    assert attended(f"raise SystemExit({code})").end()[0] == code


def test_answers_for_a_signal_as_a_shell_does(attended: type[Attended]) -> None:
    assert attended("import os; os.kill(os.getpid(), 9)").end()[0] == 137


def test_passes_sigterm_on(attended: type[Attended]) -> None:
    step = attended(PATIENT)
    assert step.line() == "ready"
    step.process.send_signal(signal.SIGTERM)
    code, out, err = step.end()
    assert (code, out) == (143, "told\n")
    assert "told to end" in err


def test_kills_a_step_that_does_not_listen(attended: type[Attended]) -> None:
    step = attended(DEAF)
    assert step.line() == "ready"
    step.process.send_signal(signal.SIGTERM)
    assert step.end()[0] == 137


def test_ends_the_step_when_the_lease_closes(attended: type[Attended]) -> None:
    step = attended(PATIENT, CONFIDE_LEASE="stdin")
    assert step.line() == "ready"
    assert step.process.poll() is None
    step.close_stdin()
    code, out, err = step.end()
    assert (code, out) == (143, "told\n")
    assert "whoever started this step is gone" in err


def test_without_a_lease_a_closed_stdin_means_nothing(attended: type[Attended]) -> None:
    step = attended("import time; time.sleep(1); print('done')")
    step.close_stdin()
    assert step.end()[:2] == (0, "done\n")


def test_a_lease_that_talks_is_still_held(attended: type[Attended]) -> None:
    step = attended("import time; time.sleep(1); print('done')", CONFIDE_LEASE="stdin")
    assert step.process.stdin is not None
    step.process.stdin.write("anything\n")
    step.process.stdin.flush()
    assert step.line() == "done"
    assert step.process.wait(30) == 0


def test_ends_the_step_at_its_deadline(attended: type[Attended]) -> None:
    code, out, err = attended(PATIENT, CONFIDE_DEADLINE="8").end()  # the start counts too
    assert (code, out) == (143, "ready\ntold\n")
    assert "not done after 8 s" in err


def test_nothing_that_the_step_started_outlives_it(attended: type[Attended]) -> None:
    step = attended(FORGETFUL)
    left = int(step.line())
    assert step.end()[0] == 0
    until = time.monotonic() + 10
    while alive(left) and time.monotonic() < until:  # the kernel needs a moment to bury it
        time.sleep(0.01)
    assert not alive(left)


def test_a_command_that_is_not_there_is_said_so() -> None:
    answer = subprocess.run(
        [sys.executable, "-S", "-E", str(ATTEND), "/nowhere/python"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert answer.returncode == 127
    assert "cannot start /nowhere/python" in answer.stderr


def grace(file: str) -> float:
    """Return how long a part of the platform waits for a step that it has told to end."""
    found = re.search(r"^GRACE(?:_SECONDS)? = ([\d.]+)", (ROOT / file).read_text(), re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_a_cancelled_step_can_end_its_runs_by_itself() -> None:
    """Each waits for the one inside it; Airflow, outside them all, kills after five seconds."""
    step = grace("tasks/runtime/step.py")
    assert step < grace("docker/attend.py") < grace("dags/launcher/docker.py") < 5
    assert step < grace("dags/launcher/process.py") < 5
    assert step < grace("tasks/runtime/runner.py")
