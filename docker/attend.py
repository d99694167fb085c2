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

GRACE = 3.5  # seconds; a step ends itself after 3, the launcher stops the container after 4
NEVER = float("inf")
STDIN = 0
NOT_STARTED = 127


class Attendant:
    """Runs one command in a process group of its own.

    Args:
        leased: end the command when our own standard input closes.
        deadline: seconds that it may take; infinity for no bound.
    """

    def __init__(self, *, leased: bool, deadline: float) -> None:
        self._leased = leased
        self._deadline = deadline
        self._group = 0
        self._end_at = self._kill_at = NEVER

    def run(self, command: list[str]) -> int:
        """Return the command's exit code as a shell would, 128 + n for a signal."""
        signals = _arriving(signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        try:
            step = subprocess.Popen(  # noqa: S603 - a list of words; no shell
                command, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            _say(f"cannot start {command[0]}: {error.strerror}")
            return NOT_STARTED
        self._group = step.pid
        self._end_at = time.monotonic() + self._deadline
        while (code := _reap(step.pid)) is None:
            self._wait(signals)
            if time.monotonic() >= self._kill_at:
                self._send(signal.SIGKILL)
        self._send(signal.SIGKILL)  # nothing that it started outlives it
        return code if code >= 0 else 128 - code

    def _wait(self, signals: int) -> None:
        """Sleep until something happens; end the command if that is a reason to."""
        bound = min(self._end_at, self._kill_at) - time.monotonic()
        watched = [signals, STDIN] if self._leased else [signals]
        ready, _, _ = select.select(watched, [], [], None if bound == NEVER else max(bound, 0.0))
        if signals in ready and set(os.read(signals, 512)) - {signal.SIGCHLD}:
            self._end("told to end")
        if STDIN in ready and not os.read(STDIN, 4096):
            self._leased = False
            self._end("whoever started this step is gone")
        if time.monotonic() >= self._end_at:
            self._end(f"not done after {self._deadline:g} s")

    def _end(self, reason: str) -> None:
        self._end_at = NEVER
        if self._kill_at == NEVER:
            _say(f"{reason}: ending it")
            self._send(signal.SIGTERM)
            self._kill_at = time.monotonic() + GRACE

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, number)


def _arriving(*numbers: signal.Signals) -> int:
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
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == step:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _say(words: str) -> None:
    with contextlib.suppress(OSError):
        print(f"confide: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    attendant = Attendant(
        leased=os.environ.get("CONFIDE_LEASE") == "stdin",
        deadline=float(os.environ.get("CONFIDE_DEADLINE") or NEVER),
    )
    sys.exit(attendant.run(sys.argv[1:]))
