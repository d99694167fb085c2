"""Supervision of processes, each of which leads a new session and is ended with all of it.

The id of a session is its leader's pid. It survives the leader, and every process that the leader
forks inherits it, so children can be found even after their parent was killed.

As a program, the supervisor is process 1 of a step's container and can end the step:

    supervisor.py COMMAND ARGUMENT…

The supervisor passes SIGTERM and SIGINT on, and gives the step a few seconds to end.
`CONFIDE_LEASE=stdin`: the launcher of the container keeps its standard input open. When that
    closes, the launcher has ended (a killed worker can send no message), and the step is ended.
`CONFIDE_DEADLINE=SECONDS`: the step is ended after this time.

The module imports only the standard library, so that it works even if the project does not.
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

# Each level waits for the level inside it. Airflow, outside them all, kills after five seconds.
STEP_GRACE = 3.0  # seconds that a step has to end after SIGTERM
ENTRYPOINT_GRACE = 3.5  # seconds before process 1 of the container kills the step
LAUNCHER_GRACE = 4.0  # seconds before the launcher kills the step or its container
STACK_GRACE = 10.0  # seconds; Airflow's components need 0.4 to 4.2
NEVER = float("inf")
_NOT_STARTED = 127
_PR_SET_PDEATHSIG = 1
_PROC = Path("/proc/self")  # exists only on Linux
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Process:
    """A process, which is recognised even after the kernel has given its pid to another."""

    pid: int
    birth: str  # kernel's start time of the process, in clock ticks since boot
    boot: str = ""  # kernel's id of that boot; pids are reused after a reboot

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the process that has this pid now."""
        return cls(pid, _stat(pid).get("birth", ""), _boot())

    def is_alive(self) -> bool:
        """Return whether the same process still runs, and is not a zombie."""
        now = _stat(self.pid)
        return bool(now) and now["state"] not in "ZX" and not self.has_successor()

    def has_successor(self) -> bool:
        """Return whether another process may have its pid, and another session its id."""
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
    """Start a command in a new session, with standard output and standard error in `output`.

    Args:
        command: the command's words, which are not passed to a shell.
        environment: the whole environment of the process.
        folder: working directory of the process.
        output: a file or descriptor, as in `subprocess`.
        end_with_us: on Linux, have the kernel send SIGTERM when this process dies, even by kill -9.
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
    """Return the process without its `Popen` object, whose deletion then does not wait for it."""
    process.returncode = 0  # keeps `Popen` from waiting for the process
    return Process.of(process.pid)


def stop(processes: Iterable[Process], grace: float, *, for_the_rest: float = 0.0) -> None:
    """End the processes and everything in their sessions: SIGTERM, then SIGKILL.

    Args:
        processes: leaders of sessions, as started by `start`.
        grace: seconds between the two signals, in which the leaders can end their children.
        for_the_rest: seconds between a SIGTERM to the remaining processes and SIGKILL; 0 sends no
            such SIGTERM.
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
    if not _PROC.exists():  # without /proc, signal process groups instead
        for leader in leaders:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(leader.pid, number)
    for pid in _members(leaders):
        _signal(pid, number)


def _members(leaders: Iterable[Process]) -> list[int]:
    """Return the pids of the sessions' remaining processes."""
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
    """Return state, session and start time of a process, or {} if there is no such process."""
    try:
        text = (_PROC.parent / str(pid) / "stat").read_text()
    except OSError:
        if _PROC.exists():
            return {}
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            return {"state": "R", "session": str(pid), "birth": ""}
        return {}
    fields = text.rpartition(")")[2].split()  # the name before it may contain spaces: proc(5)
    return {"state": fields[0], "session": fields[3], "birth": fields[19]}


def end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when its parent dies, on Linux."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Entrypoint:
    """Process 1 of a container, which runs one command, reaps processes and returns the exit code.

    Args:
        leased: end the command when standard input closes.
        deadline: most seconds that the command may take, or infinity.
    """

    def __init__(self, *, leased: bool, deadline: float) -> None:
        self._leased = leased
        self._deadline = deadline
        self._group = 0
        self._reason = ""
        self._end_at = self._kill_at = NEVER

    def run(self, command: list[str]) -> int:
        """Run the command and return its exit code, 128 + n for signal n, as in a shell."""
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
        self._send(signal.SIGKILL)  # also ends the processes that the step started
        code = code if code >= 0 else 128 - code
        if self._reason and code >= 128 and os.environ.get("CONFIDE_MESSAGES") == "stdout":
            failed = {"version": 1, "kind": "failed", "exit_code": code, "reason": self._reason}
            print(json.dumps(failed), flush=True)  # tasks/protocol/messages.py
        return code

    def _wait(self, signals: int) -> None:
        """Wait for a signal, standard input or a time limit, and end the command if necessary."""
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
    """Return a descriptor from which the numbers of arriving signals can be read."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def _reap(step: int) -> int | None:
    """Reap all ended processes and return the step's exit code if the step is among them."""
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
