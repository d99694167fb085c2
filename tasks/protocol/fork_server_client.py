"""The client of the fork server, which starts steps without importing TensorFlow for each anew.

A request goes over a Unix socket as one JSON line, with the descriptor that the step writes its
output to; the answers are JSON lines too. Whoever started a step holds its connection open: when
that closes, the server ends the step. Where there is no server, or it refuses, a step is started as
a process of its own (`start`); the contract `python -m tasks NAME --spec URI` is the same.
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

SERVER = "CONFIDE_FORK_SERVER"  # its socket; `off`: every step is a process started anew
OFF = "off"
_OURS = re.compile(r"CONFIDE_.*")
LOST = -signal.SIGKILL  # exit code of a step whose server is gone, and so the step too


class Start(Config):
    """Asks for a step: the words after `python -m tasks`, and all of its environment."""

    version: Literal[1] = 1
    kind: Literal["start"] = "start"
    words: tuple[str, ...]
    environment: dict[str, str]


class Started(Config):
    """The step runs, as the leader of a session of its own."""

    version: Literal[1] = 1
    kind: Literal["started"] = "started"
    pid: int


class Refused(Config):
    """Nothing was started, and why: it can be started as a process of its own."""

    version: Literal[1] = 1
    kind: Literal["refused"] = "refused"
    reason: str


class StepEnded(Config):
    """The step has ended; the code is negative where a signal ended it."""

    version: Literal[1] = 1
    kind: Literal["ended"] = "ended"
    exit_code: int


Answer = Started | Refused | StepEnded
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="kind")])


def shared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what of an environment a fork server is started with, and all of its steps share.

    Confide's own variables, with the ledger's password among them, reach a step by its request
    alone. All others may be read by a library when it is imported, so they must be the same.
    """
    return {name: value for name, value in environment.items() if not _OURS.fullmatch(name)}


def named(environment: Mapping[str, str]) -> Path | None:
    """Return the socket of the fork server that an environment names; None: it names none."""
    name = environment.get(SERVER, "")
    return Path(name) if name not in ("", OFF) else None


def command(python: str, server: Path) -> list[str]:
    """Return the command line of a fork server; its socket is there once it listens."""
    return [python, "-m", "tasks.execution.fork_server", str(server)]


class Running(Protocol):
    """A step that was started."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; `subprocess.TimeoutExpired` where it runs on."""


class ForkedStep:
    """A step that a fork server has started.

    Args:
        connection: on which the server tells how it ended.
        pid: of the step, which is no child of ours.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection, self.pid = connection, pid
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: the step runs on.
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
    """Start a step: by the fork server where there is one and it takes it, else as a new process.

    It is the leader of a session of its own, and ends when we do.

    Args:
        words: those after `python -m tasks`.
        environment: all of it.
        folder: where it works.
        output: descriptor for its standard output and standard error.
        python: interpreter of a new process.
        server: the fork server's socket.
    """
    step = _forked(server, Start(words=tuple(words), environment=dict(environment)), output)
    if step is not None:
        return step
    return supervisor.start([python, "-m", "tasks", *words], environment, folder, output)


def _forked(server: Path | None, request: Start, output: int) -> ForkedStep | None:
    """Return the step that the server has started; None: there is no server, or it refuses."""
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
    with suppress(OSError):  # a refusal may not wait for it; what is not read whole is not started
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
    """Return the server's next answer; None where it says nothing more."""
    line = read_line(connection)
    try:
        return _ANSWER.validate_json(line) if line else None
    except ValidationError:
        return None


def read_line(connection: socket.socket) -> bytes:
    """Return the next line without its end; nothing where the connection closes before that."""
    line = bytearray()
    try:
        while not line.endswith(b"\n"):
            # byte by byte: what follows is the next answer
            byte = connection.recv(1)
            if not byte:
                return b""
            line += byte
    except OSError:
        return b""
    return bytes(line[:-1])


@contextmanager
def address(server: Path) -> Iterator[str]:
    """Yield the address of a socket, however long its path: the kernel takes 107 bytes."""
    folder = os.open(server.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{server.name}"
    finally:
        os.close(folder)
