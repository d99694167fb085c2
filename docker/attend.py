"""Process 1 of a step's container: starts the step, and sees that it ends when it must.

    attend.py COMMAND ARGUMENT…

SIGTERM and SIGINT are passed on, and the step has a few seconds to end by itself. Two variables
bound how long it may go on:

`CONFIDE_LEASE=stdin`: whoever started the container holds its standard input open. When that
    closes, its holder is gone (a killed worker cannot say so itself), and the step is ended.
`CONFIDE_DEADLINE=SECONDS`: the step is ended after that long.

Standard library only, and nothing of the project: it must work when nothing else does.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

GRACE = 4.5  # seconds; Airflow escalates every 5, and a step ends itself after 4
STDIN = 0
NOT_STARTED = 127


def attend(command: list[str], *, leased: bool, deadline: float) -> int:
    """Run a command until it ends or has to; return its exit code as a shell would.

    Args:
        command: what to run; its standard input is empty.
        leased: end it when our own standard input closes.
        deadline: seconds that it may take; infinity for no bound.
    """
    wake = _signals(signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    try:
        step = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True).pid
    except OSError as error:
        _say(f"cannot start {command[0]}: {error.strerror}")
        return NOT_STARTED
    end_by = time.monotonic() + deadline
    kill_by = float("inf")
    while True:
        status = _reap(step)
        if status is not None:
            _signal_group(step, signal.SIGKILL)  # nothing that it started outlives it
            return status if status >= 0 else 128 - status
        now = time.monotonic()
        watched = [wake, STDIN] if leased else [wake]
        bound = min(end_by, kill_by) - now
        ready, _, _ = select.select(watched, [], [], None if bound == float("inf") else max(bound, 0))
        asked = b""
        if wake in ready:
            asked = os.read(wake, 512).replace(bytes([signal.SIGCHLD]), b"")
        reason = "told to end" if asked else ""
        if leased and STDIN in ready and not os.read(STDIN, 4096):
            leased, reason = False, "whoever started this step is gone"
        if time.monotonic() >= end_by:
            end_by, reason = float("inf"), f"not done after {deadline:g} s"
        if reason and kill_by == float("inf"):
            _say(f"{reason}: ending it")
            _signal_group(step, signal.SIGTERM)
            kill_by = time.monotonic() + GRACE
        if time.monotonic() >= kill_by:
            _signal_group(step, signal.SIGKILL)
            kill_by = time.monotonic() + GRACE


def _signals(*numbers: signal.Signals) -> int:
    """Return a descriptor from which the numbers of these signals can be read as they arrive."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def _reap(step: int) -> int | None:
    """Collect every process that has ended; return the step's code if it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                break
            if process == step:
                code = os.waitstatus_to_exitcode(status)
    return code


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def _say(words: str) -> None:
    with contextlib.suppress(OSError):
        print(f"confide: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(
        attend(
            sys.argv[1:],
            leased=os.environ.get("CONFIDE_LEASE") == "stdin",
            deadline=float(os.environ.get("CONFIDE_DEADLINE") or "inf"),
        )
    )
