"""Unfinished runs on this machine: plans are withdrawn after a run has ended or was killed.

Each run of the command line holds a lock on a file in the deployment's home. The kernel frees the
lock when the process dies, so a file without a lock names a run that was killed. The ledger
withdraws only plans of which no release has begun (`Ledger.give_back`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from dp_core.errors import ConfideError
from tasks.releases.deployment_ledger import open_ledger
from tasks.runtime.deployment import Deployment
from tasks.storage.journal import exclusive, is_still_there

FOLDER = "runs"  # in the deployment's home
STOPPED = 143  # exit code of a process that SIGTERM ended


@contextmanager
def plans_given_back(deployment: Deployment, run_key: str) -> Iterator[list[str]]:
    """Withdraw, at the end of the run, its plans of which no release has begun.

    Plans of killed runs are withdrawn first. SIGTERM ends the run like an error.

    Yields:
        A list that is filled with the ids of the withdrawn entries after the run.
    """
    deployment.prepare()
    folder = deployment.home / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    for key, file in _killed(folder):
        open_ledger(deployment).give_back(key)
        file.unlink(missing_ok=True)
    given_back: list[str] = []
    file = folder / f"{hashlib.sha256(run_key.encode()).hexdigest()[:16]}.run"
    with exclusive(file) as descriptor, _ended_by_sigterm():
        os.write(descriptor, run_key.encode())
        try:
            yield given_back
        finally:
            with suppress(ConfideError):  # the next run gives it back: the file stays
                given_back += [entry.id for entry in open_ledger(deployment).give_back(run_key)]
                file.unlink(missing_ok=True)


def killed_runs(deployment: Deployment) -> frozenset[str]:
    """Return the keys of runs that were killed, and whose plans the next run will give back."""
    return frozenset(key for key, _ in _killed(deployment.home / FOLDER))


def _killed(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the key and file of each run whose process has died, holding its lock meanwhile."""
    for file in sorted(folder.glob("*.run")):
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except FileNotFoundError:  # that run has just ended
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_still_there(file, descriptor):
                yield os.read(descriptor, 4096).decode(), file
        except BlockingIOError:
            continue  # still running
        finally:
            os.close(descriptor)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, unless the signal already has a handler."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(STOPPED)
