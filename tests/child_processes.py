"""Helpers for tests with child processes: whether one is alive, waiting, and free ports."""

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(
    condition: Callable[[], Any],
    seconds: float = 60.0,
    *,
    what: str = "what was waited for",
    pause: float = 0.02,
) -> Any:
    """Return the condition's value as soon as it is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {seconds:.0f} s: {what}"
        time.sleep(pause)
    return value


def completed(*words: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """Return the exit code and the output of a command; more are arguments of `subprocess.run`."""
    return subprocess.run(words, capture_output=True, text=True, check=False, **more)


def program(file: Path, body: str) -> None:
    """Write a program of the shell."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def free_port() -> int:
    """Return a port on which no process of this machine listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
