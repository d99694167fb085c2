"""The client of the fork server, which starts steps without importing TensorFlow for each anew.

A request is one JSON line over a Unix socket, together with the file descriptor for the step's
output. The answers are JSON lines too. The client keeps the connection open while the step runs:
when the connection closes, the server ends the step. If there is no server, or it refuses the
request, `start` starts a new process. The contract `python -m tasks NAME --spec URI` is the same.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field, TypeAdapter, ValidationError

from dp_core.config.fields import Config
from tasks.protocol import supervisor

SERVER = "CONFIDE_FORK_SERVER"  # path of the server's socket; `off`: each step is a new process
OFF = "off"
_OURS = re.compile(r"CONFIDE_.*")
LOST = -signal.SIGKILL  # exit code if the server has ended, which ends the step too


class Start(Config):
    """Request for a step, with the words after `python -m tasks` and the whole environment."""

    version: Literal[1] = 1
    kind: Literal["start"] = "start"
    words: tuple[str, ...]
    environment: dict[str, str]


class Started(Config):
    """The step has started as the leader of a new session."""

    version: Literal[1] = 1
    kind: Literal["started"] = "started"
    pid: int


class Refused(Config):
    """The server refused to start the step. The client can start it as a new process."""

    version: Literal[1] = 1
    kind: Literal["refused"] = "refused"
    reason: str


class StepEnded(Config):
    """The step has ended. The exit code is negative if a signal ended it."""

    version: Literal[1] = 1
    kind: Literal["ended"] = "ended"
    exit_code: int


Answer = Started | Refused | StepEnded
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="kind")])


def shared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a fork server shares with all of its steps.

    Confide's own variables, which include the ledger's password, reach a step only in its request.
    A library may read any other variable when it is imported, so server and steps must agree on it.
    """
    return {name: value for name, value in environment.items() if not _OURS.fullmatch(name)}


def named(environment: Mapping[str, str]) -> Path | None:
    """Return the fork server's socket that an environment names, or None if it names none."""
    name = environment.get(SERVER, "")
    return Path(name) if name not in ("", OFF) else None


def command(python: str, server: Path) -> list[str]:
    """Return the command line of a fork server, which creates the socket when it listens."""
    return [python, "-m", "tasks.execution.fork_server", str(server)]


class Running(Protocol):
    """A started step."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or raise `subprocess.TimeoutExpired` if the step still runs."""


class ForkedStep:
    """A step that a fork server has started.

    Args:
        connection: socket on which the server reports the exit code.
        pid: process id of the step, which is not a child of this process.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection, self.pid = connection, pid
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: the step still runs.
        """
        if self._code is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("step", timeout or 0.0)
            answer = read_answer(self._connection)
            self._connection.close()
            self._code = answer.exit_code if isinstance(answer, StepEnded) else LOST
        return self._code


def start(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    output: int,
    *,
    python: str,
    server: Path | None,
) -> Running:
    """Start a step by the fork server, or as a new process if no server accepts the request.

    The step is the leader of a new session, and ends when this process ends.

    Args:
        words: the words after `python -m tasks`.
        environment: the whole environment of the step.
        folder: working directory of a new process.
        output: descriptor for the step's standard output and standard error.
        python: interpreter of a new process.
        server: socket of the fork server.
    """
    step = _forked(server, Start(words=tuple(words), environment=dict(environment)), output)
    if step is not None:
        return step
    return supervisor.start([python, "-m", "tasks", *words], environment, folder, output)


def _forked(server: Path | None, request: Start, output: int) -> ForkedStep | None:
    """Return the step that the server has started, or None without a server or if it refuses."""
    if server is None:
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        with address(server) as place:
            connection.connect(place)
    except OSError:
        connection.close()
        return None
    line = f"{request.model_dump_json()}\n".encode()
    # A server may refuse before it has read the whole request, and never starts an incomplete one.
    with suppress(OSError):
        sent = socket.send_fds(connection, [line], [output])
        connection.sendall(line[sent:])
    answer = read_answer(connection)
    if isinstance(answer, Started):
        return ForkedStep(connection, answer.pid)
    connection.close()
    if isinstance(answer, Refused):
        with suppress(OSError):
            os.write(output, f"confide: started anew: {answer.reason}\n".encode())
    return None


def read_answer(connection: socket.socket) -> Answer | None:
    """Return the server's next answer, or None if there is no further valid answer."""
    line = read_line(connection)
    try:
        return _ANSWER.validate_json(line) if line else None
    except ValidationError:
        return None


def read_line(connection: socket.socket) -> bytes:
    """Return the next line without its end, or b"" if the connection closes before the end."""
    line = bytearray()
    try:
        while not line.endswith(b"\n"):
            # one byte at a time, because the next answer may follow the line
            byte = connection.recv(1)
            if not byte:
                return b""
            line += byte
    except OSError:
        return b""
    return bytes(line[:-1])


@contextmanager
def address(server: Path) -> Iterator[str]:
    """Yield a short address of a socket, because the kernel accepts at most 107 bytes."""
    folder = os.open(server.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{server.name}"
    finally:
        os.close(folder)
