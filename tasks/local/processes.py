"""Processes that outlive their starter, and are all found again: each has a session of its own.

A session's id is its leader's pid, survives the leader, and is inherited by whatever the leader
forks; so a component's children are found even after it was killed. Steps have sessions of their
own and end with their parent by themselves (`dags/launcher/process.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
PATIENCE = 10.0  # seconds between SIGTERM and SIGKILL; Airflow's components need 0.4 to 4.2


@dataclass(frozen=True)
class Started:
    """A process that was started: enough to know it again when pids have been used anew."""

    pid: int
    birth: str  # kernel's start time of the process, in clock ticks since boot
    boot: str = ""  # the kernel's name for that boot, after which every pid is given anew


def start(
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    *,
    end_with_us: bool,
) -> Started:
    """Start a command in a session of its own, with its output in `log`.

    Args:
        end_with_us: have the kernel send it SIGTERM when we die, be it by kill -9 (on Linux).
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - the stack's own commands
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent if end_with_us else None,
        )
    process.returncode = 0  # this object must not wait for it: `is_alive` reaps
    return Started(process.pid, _stat(process.pid).get("birth", ""), _boot())


def is_alive(process: Started) -> bool:
    """Whether the process still runs: the same one, and not merely waiting to be reaped."""
    with contextlib.suppress(ChildProcessError, OSError):
        os.waitpid(process.pid, os.WNOHANG)  # where it is our child: reap it
    now = _stat(process.pid)
    return bool(now) and now["state"] not in "ZX" and not _taken_over(process)


def stop(processes: Iterable[Started], patience: float = PATIENCE) -> None:
    """End the processes and everything in their sessions: SIGTERM, then SIGKILL."""
    leaders = list(processes)
    for leader in leaders:
        if is_alive(leader):
            _signal(leader.pid, signal.SIGTERM)  # the leader ends its children in good order
    deadline = time.monotonic() + patience
    while any(map(is_alive, leaders)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for order, wait in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 1.0)):
        deadline = time.monotonic() + wait
        left = _left(leaders)
        for pid in left:
            _signal(pid, order)
        while left and time.monotonic() < deadline:
            time.sleep(0.05)
            left = _left(leaders)


def _left(leaders: Iterable[Started]) -> list[int]:
    """Return the pids of what is left of the sessions."""
    ours = {leader.pid for leader in leaders if not _taken_over(leader)}
    left = []
    for entry in Path("/proc").glob("[0-9]*"):
        stat = _stat(int(entry.name))
        if stat and int(stat["session"]) in ours and stat["state"] not in "ZX":
            left.append(int(entry.name))
    return left


def _taken_over(leader: Started) -> bool:
    """Whether another process may have the leader's pid, and so another session its id."""
    if leader.boot and leader.boot != _boot():  # a state file of an earlier version has none
        return True
    now = _stat(leader.pid)
    return bool(now) and now["birth"] != leader.birth


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _end_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _stat(pid: int) -> dict[str, str]:
    """Return state, session and start time of a process; nothing where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return {}
    fields = text.rpartition(")")[2].split()  # the name before may hold spaces: proc(5)
    return {"state": fields[0], "session": fields[3], "birth": fields[19]}
