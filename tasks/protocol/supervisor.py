"""Supervision of processes: each in a session of its own, and ended with all that it started.

A session's id is its leader's pid, survives the leader, and is inherited by whatever the leader
forks; so children are found even after their parent was killed.

As a program it is process 1 of a step's container, which ends the step when it must:

    supervisor.py COMMAND ARGUMENT…

SIGTERM and SIGINT are passed on, and the step has a few seconds to end by itself.
`CONFIDE_LEASE=stdin`: whoever started the container holds its standard input open. When that
    closes, its holder is gone (a killed worker cannot say so itself), and the step is ended.
`CONFIDE_DEADLINE=SECONDS`: the step is ended after that long.

Standard library only, and nothing of the project: it must work when nothing else does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# Each of these waits for the one inside it; Airflow, outside them all, kills after five seconds.
STEP_GRACE = 3.0  # seconds that a step has to end by itself
ENTRYPOINT_GRACE = 3.5  # process 1 of its container, before it kills the step
LAUNCHER_GRACE = 4.0  # whoever started the step or its container
STACK_GRACE = 10.0  # Airflow's components need 0.4 to 4.2
NEVER = float("inf")
_NOT_STARTED = 127
_PR_SET_PDEATHSIG = 1
_PROC = Path("/proc/self")  # what it tells is Linux's
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Process:
    """A process, known again after its pid has been given to another."""

    pid: int
    birth: str  # kernel's start time of the process, in clock ticks since boot
    boot: str = ""  # the kernel's name for that boot, after which every pid is given anew

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the process that has this pid now."""
        return cls(pid, _stat(pid).get("birth", ""), _boot())

    def is_alive(self) -> bool:
        """Whether it still runs: the same one, and not merely waiting to be reaped."""
        now = _stat(self.pid)
        return bool(now) and now["state"] not in "ZX" and not self.has_successor()

    def has_successor(self) -> bool:
        """Whether another process may have its pid, and so another session its id."""
        if self.boot != _boot():
            return True
        now = _stat(self.pid)
        return bool(now) and now["birth"] != self.birth


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    output: IO[bytes] | int,
    *,
    end_with_us: bool = True,
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own; standard output and error go to `output`.

    Args:
        command: a list of words, which no shell reads.
        environment: all of it.
        folder: where it works.
        output: as `subprocess` takes it.
        end_with_us: have the kernel send it SIGTERM when we die, be it by kill -9 (on Linux).
    """
    return subprocess.Popen(  # noqa: S603 - a list of words; no shell
        command,
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=end_with_parent if end_with_us else None,
    )


def released(process: subprocess.Popen[bytes]) -> Process:
    """Return a process that will outlive the object that stands for it here."""
    process.returncode = 0  # or it would be waited for
    return Process.of(process.pid)


def stop(processes: Iterable[Process], grace: float, *, for_the_rest: float = 0.0) -> None:
    """End the processes and everything in their sessions: SIGTERM, then SIGKILL.

    Args:
        processes: leaders of sessions, as `start` makes them.
        grace: seconds between the two for the leaders, who end their children in good order.
        for_the_rest: seconds that what a leader left behind has after a SIGTERM of its own.
    """
    leaders = list(processes)
    for leader in leaders:
        if leader.is_alive():
            _signal(leader.pid, signal.SIGTERM)
    _wait(lambda: any(leader.is_alive() for leader in leaders), grace)
    if for_the_rest:
        _signal_sessions(leaders, signal.SIGTERM)
        _wait(lambda: bool(_members(leaders)), for_the_rest)
    _signal_sessions(leaders, signal.SIGKILL)
    _wait(lambda: bool(_members(leaders)), 1.0)


def _wait(going_on: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while going_on() and time.monotonic() < deadline:
        time.sleep(0.02)


def _signal_sessions(leaders: Iterable[Process], number: signal.Signals) -> None:
    if not _PROC.exists():  # groups are the next best
        for leader in leaders:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader.pid, number)
    for pid in _members(leaders):
        _signal(pid, number)


def _members(leaders: Iterable[Process]) -> list[int]:
    """Return the pids of what is left of the sessions."""
    sessions = {leader.pid for leader in leaders if not leader.has_successor()}
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        stat = _stat(int(entry.name))
        if stat and int(stat["session"]) in sessions and stat["state"] not in "ZX":
            members.append(int(entry.name))
    return members


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _stat(pid: int) -> dict[str, str]:
    """Return state, session and start time of a process; nothing where there is none."""
    try:
        text = (_PROC.parent / str(pid) / "stat").read_text()
    except OSError:
        if _PROC.exists():
            return {}
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            return {"state": "R", "session": str(pid), "birth": ""}
        return {}
    fields = text.rpartition(")")[2].split()  # the name before may hold spaces: proc(5)
    return {"state": fields[0], "session": fields[3], "birth": fields[19]}


def end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when its parent dies, on Linux."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Entrypoint:
    """Process 1 of a container: runs one command, reaps whatever ends, and answers with its code.

    Args:
        leased: end the command when our own standard input closes.
        deadline: seconds that it may take; infinity for no bound.
    """

    def __init__(self, *, leased: bool, deadline: float) -> None:
        self._leased = leased
        self._deadline = deadline
        self._group = 0
        self._reason = ""
        self._end_at = self._kill_at = NEVER

    def run(self, command: list[str]) -> int:
        """Return the command's exit code as a shell would, 128 + n for a signal."""
        signals = arriving(signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        try:
            step = subprocess.Popen(  # noqa: S603 - a list of words; no shell
                command, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            _log(f"cannot start {command[0]}: {error.strerror}")
            return _NOT_STARTED
        self._group = step.pid
        self._end_at = time.monotonic() + self._deadline
        while (code := _reap(step.pid)) is None:
            self._wait(signals)
            if time.monotonic() >= self._kill_at:
                self._send(signal.SIGKILL)
        self._send(signal.SIGKILL)  # nothing that it started outlives it
        code = code if code >= 0 else 128 - code
        if self._reason and code >= 128 and os.environ.get("CONFIDE_MESSAGES") == "stdout":
            failed = {"version": 1, "kind": "failed", "exit_code": code, "reason": self._reason}
            print(json.dumps(failed), flush=True)  # tasks/protocol/messages.py
        return code

    def _wait(self, signals: int) -> None:
        """Sleep until something happens; end the command if that is a reason to."""
        bound = min(self._end_at, self._kill_at) - time.monotonic()
        watched = [signals, 0] if self._leased else [signals]
        ready, _, _ = select.select(watched, [], [], None if bound == NEVER else max(bound, 0.0))
        if signals in ready and set(os.read(signals, 512)) - {signal.SIGCHLD}:
            self._end("told to end")
        if 0 in ready and not os.read(0, 4096):
            self._leased = False
            self._end("whoever started this step is gone")
        if time.monotonic() >= self._end_at:
            self._end(f"not done after {self._deadline:g} s")

    def _end(self, reason: str) -> None:
        self._end_at = NEVER
        if self._kill_at == NEVER:
            self._reason = reason
            _log(f"{reason}: ending it")
            self._send(signal.SIGTERM)
            self._kill_at = time.monotonic() + ENTRYPOINT_GRACE

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, number)


def arriving(*numbers: signal.Signals) -> int:
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


def _log(words: str) -> None:
    with contextlib.suppress(OSError):
        print(f"confide: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    entrypoint = Entrypoint(
        leased=os.environ.get("CONFIDE_LEASE") == "stdin",
        deadline=float(os.environ.get("CONFIDE_DEADLINE") or NEVER),
    )
    sys.exit(entrypoint.run(sys.argv[1:]))
