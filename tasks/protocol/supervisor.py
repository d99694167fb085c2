"""Supervision of processes, each of which leads a new session and is ended with all of it.

The id of a session is its leader's pid. It survives the leader, and every process that the leader
forks inherits it, so children can be found even after their parent was killed.

In a container, the engine's init process forwards signals to the step and reaps processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

# Each level waits for the level inside it. Airflow, outside them all, kills after five seconds.
STEP_GRACE = 3.0  # seconds that a step has to end after SIGTERM
LAUNCHER_GRACE = 4.0  # seconds before the launcher kills the step or its container
STACK_GRACE = 10.0  # seconds; Airflow's components need 0.4 to 4.2
_PR_SET_PDEATHSIG = 1
_PROC = Path("/proc")
_LIBC = ctypes.CDLL(None)


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
        end_with_us: have the kernel send SIGTERM when this process dies, even by kill -9.
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
    for pid in _members(leaders):
        _signal(pid, number)


def _members(leaders: Iterable[Process]) -> list[int]:
    """Return the pids of the sessions' remaining processes."""
    sessions = {leader.pid for leader in leaders if not leader.has_successor()}
    members = []
    for entry in _PROC.glob("[0-9]*"):
        stat = _stat(int(entry.name))
        if stat and int(stat["session"]) in sessions and stat["state"] not in "ZX":
            members.append(int(entry.name))
    return members


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _boot() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> dict[str, str]:
    """Return state, session and start time of a process, or {} if there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return {}
    fields = text.rpartition(")")[2].split()  # the name before it may contain spaces: proc(5)
    return {"state": fields[0], "session": fields[3], "birth": fields[19]}


def end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when its parent dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
