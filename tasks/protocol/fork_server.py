"""The fork server starts steps without importing TensorFlow anew for each.

`python -m tasks.protocol.fork_server SOCKET` imports the modules of all steps at its first request,
and forks a process for each request. A request is one JSON line over a Unix socket, together with
the file descriptor for the step's output. The answers are JSON lines too. The client keeps the
connection open while the step runs: when the connection closes, the server ends the step. If there
is no server, or it refuses the request, `start` starts a new process instead. The contract
`python -m tasks NAME --spec URI` is the same.

Each step is a fresh process that shares only the modules with earlier steps: no device was used and
no operation was run before the fork, so TensorFlow starts anew in each. The server opens no store,
ledger or user file, and holds no secret: a step's environment comes with its request, which only
the step's process reads.

The server refuses requests that would behave differently in a newly started process: an environment
that differs in variables that libraries may have read during import, and changed source files.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tasks.protocol import supervisor
from tasks.protocol.supervisor import LAUNCHER_GRACE, Process

SERVER = "CONFIDE_FORK_SERVER"  # path of the server's socket; `off`: each step is a new process
OFF = "off"
LOST = -signal.SIGKILL  # exit code if the server has ended, which ends the step too
_PATIENCE = 5.0  # seconds within which a request must be complete
_IDLE = 600.0  # seconds without a step after which the server frees its memory
_IMPORTED_LATE = (  # when a step first needs them
    "dp_accounting",
    "mlflow.tracking",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    "alembic",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
)


def shared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a fork server shares with all of its steps.

    Confide's own variables, which include the ledger's password, reach a step only in its request.
    A library may read any other variable when it is imported, so server and steps must agree on it.
    """
    return {n: value for n, value in environment.items() if not n.startswith("CONFIDE_")}


@contextmanager
def address(server: Path) -> Iterator[str]:
    """Yield a short address of a socket, because the kernel accepts at most 107 bytes."""
    folder = os.open(server.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{server.name}"
    finally:
        os.close(folder)


# --- the client


def command(python: str, server: Path) -> list[str]:
    """Return the command line of a fork server, which creates the socket when it listens."""
    return [python, "-m", "tasks.protocol.fork_server", str(server)]


def named(environment: Mapping[str, str]) -> Path | None:
    """Return the fork server's socket that an environment names, or None if it names none."""
    name = environment.get(SERVER, "")
    return Path(name) if name not in ("", OFF) else None


class ForkedStep:
    """A step that a fork server has started.

    Args:
        connection: socket on which the server reports the exit code.
        pid: process id of the step, which is not a child of this process.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection, self.pid = connection, pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None if the step still runs."""
        if self._code is None and select.select([self._connection], [], [], 0)[0]:
            self._code = int(read_answer(self._connection).get("exit_code", LOST))
            self._connection.close()
        return self._code


def start(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    output: int,
    *,
    python: str,
    server: Path | None,
) -> ForkedStep | subprocess.Popen[bytes]:
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
    request = {"words": list(words), "environment": dict(environment)}
    if server is not None and (step := _forked(server, request, output)) is not None:
        return step
    return supervisor.start([python, "-m", "tasks", *words], environment, folder, output)


def _forked(server: Path, request: dict[str, Any], output: int) -> ForkedStep | None:
    """Return the step that the server has started, or None without a server or if it refuses."""
    connection = socket.socket(socket.AF_UNIX)
    # A server may refuse before it has read the whole request, and never starts an incomplete one.
    with suppress(OSError):
        with address(server) as place:
            connection.connect(place)
        line = f"{json.dumps(request)}\n".encode()
        sent = socket.send_fds(connection, [line], [output])
        connection.sendall(line[sent:])
    answer = read_answer(connection)
    if "pid" in answer:
        return ForkedStep(connection, answer["pid"])
    connection.close()
    if "refused" in answer:
        with suppress(OSError):
            os.write(output, f"confide: started anew: {answer['refused']}\n".encode())
    return None


def read_answer(connection: socket.socket) -> dict[str, Any]:
    """Return the server's next answer, or {} if there is no further answer."""
    with suppress(OSError, ValueError):
        answer: dict[str, Any] = json.loads(_line(connection))
        return answer
    return {}


def _line(connection: socket.socket) -> bytes:
    """Return the next line, reading no byte after it: the next answer may follow."""
    with connection.makefile("rb", buffering=0) as stream:
        return bytes(stream.readline())


# --- the server


class ForkServer:
    """Serves one socket: one forked process waits for each step, so no event is shared by steps.

    Args:
        listening: the socket.
    """

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._given = dict(os.environ)
        self._set_by_imports: dict[str, str] = {}
        self._files: dict[str, tuple[int, int]] | None = None  # None before the imports

    def serve(self) -> list[str]:
        """Return the words of a step in the step's process; the server itself never returns."""
        while True:
            if not select.select([self._listening], [], [], _IDLE)[0]:
                if self._files is not None:
                    self._renew()
                continue
            client, _ = self._listening.accept()
            self._warm_up()
            if reason := self._changed():
                _answer(client, refused=reason)
                self._renew()
            _reap()
            try:
                pid = _forked_process()
            except OSError as error:
                pid = -1
                _answer(client, refused=f"no process ({os.strerror(error.errno or 0)})")
            if pid == 0:
                self._listening.close()
                return self._attend(client)
            client.close()

    def _attend(self, client: socket.socket) -> list[str]:
        """Fork the step, wait for it, and end it if the client has gone; return in the step.

        Only the step reads the request. A step's environment, including the ledger's password, is
        therefore never in the memory of the server or of another step.
        """
        pid = _forked_process()
        if pid == 0:
            os.setsid()
            return self._become_a_step(client)
        step, ended, watched = Process.of(pid), os.pidfd_open(pid), select.poll()
        watched.register(ended, select.POLLIN)
        watched.register(client, select.POLLRDHUP)
        if ended not in dict(watched.poll()):
            supervisor.stop([step], LAUNCHER_GRACE)
        _, status = os.waitpid(pid, 0)
        _answer(client, exit_code=os.waitstatus_to_exitcode(status))
        os._exit(0)

    def _changed(self) -> str:
        """Return why a forked process would differ from a newly started one; '' if it would not."""
        if threading.active_count() > 1:  # it may hold a lock that would never be released
            return "a thread runs in the fork server"
        if self._files != _files():
            return "the program has changed since the fork server imported it"
        return ""

    def _become_a_step(self, client: socket.socket) -> list[str]:
        """Read the request; take over its environment, output and arguments, or exit."""
        client.settimeout(_PATIENCE)
        try:
            first, (output,), _, _ = socket.recv_fds(client, 1, 1)
            client.setblocking(True)
            request = json.loads(first + _line(client))
            words, environment = list(request["words"]), dict(request["environment"])
        except (OSError, ValueError, KeyError, TypeError):  # another client, or one that has died
            os._exit(1)
        sent, given = shared_environment(environment), shared_environment(self._given)
        if names := sorted(n for n in {*sent, *given} if sent.get(n) != given.get(n)):
            _answer(client, refused=f"variables are not its own: {', '.join(names)}")
            os._exit(1)
        _answer(client, pid=os.getpid())
        client.close()
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        os.environ.clear()
        os.environ.update(self._set_by_imports | environment)
        sys.argv = ["tasks", *words]
        importlib.import_module("numpy").random.seed()  # else all steps share one random state
        return words

    def _warm_up(self) -> None:
        """Import the modules of all steps at the first request."""
        if self._files is not None:
            return
        for name, value in (("TF_CPP_MIN_LOG_LEVEL", "2"), ("TF_USE_LEGACY_KERAS", "1")):
            os.environ.setdefault(name, value)  # as in `tasks/__main__.py`
        for name in modules_of_steps():
            with suppress(ImportError):  # the step will report the error
                importlib.import_module(name)
        self._set_by_imports = {n: v for n, v in os.environ.items() if self._given.get(n) != v}
        gc.collect()
        gc.freeze()  # a step's garbage collector then leaves the pages shared
        self._files = _files()

    def _renew(self) -> None:
        """Restart the server in the same process without its modules.

        No request is lost, and the processes of running steps stay children of this process.
        """
        os.set_inheritable(self._listening.fileno(), True)
        words, listening = sys.orig_argv[1:], str(self._listening.fileno())
        words += [listening] if words[-1] != listening else []
        os.execve(sys.executable, [sys.executable, *words], self._given)  # noqa: S606 - our words


def _forked_process() -> int:
    """Fork this process; the forked one ends with its parent. Return as `os.fork`."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        supervisor.end_with_parent()
        if os.getppid() != parent:  # the parent died before the kernel was asked
            os._exit(128 + signal.SIGTERM)
    return pid


def _reap() -> None:
    """Collect the forked processes that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def modules_of_steps() -> list[str]:
    """Return the modules to import before the first fork: every step and its dependencies."""
    steps = importlib.import_module("tasks.steps")
    names = [f"{steps.__name__}.{module.name}" for module in pkgutil.iter_modules(steps.__path__)]
    return ["tasks.execution.contract", *names, *_IMPORTED_LATE]


def _files() -> dict[str, tuple[int, int]]:
    """Return the modification time and size of each loaded module's file."""
    versions: dict[str, tuple[int, int]] = {}
    for module in list(sys.modules.values()):
        # `getattr` on a lazy module would import it.
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str):
            with suppress(OSError):
                stat = os.stat(file)  # noqa: PTH116 - thousands of them
                versions[file] = (stat.st_mtime_ns, stat.st_size)
    return versions


def _answer(client: socket.socket, **answer: Any) -> None:
    with suppress(OSError):  # the client has gone
        client.sendall(f"{json.dumps(answer)}\n".encode())


def _listen(server: Path) -> socket.socket:
    """Return the listening socket; its file appears only when clients can connect to it."""
    made = server.with_suffix(".part")
    made.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    os.umask(0o077)
    with address(made) as place:
        listening.bind(place)
    listening.listen(64)
    made.replace(server)
    return listening


def main(words: list[str]) -> None:
    """Serve until a signal ends the server; in a step's process, run the step and exit."""
    place, *inherited = words
    listening = socket.socket(fileno=int(inherited[0])) if inherited else _listen(Path(place))
    step = ForkServer(listening).serve()
    code = importlib.import_module("tasks.execution.contract").command_line(step)
    # Run the interpreter's exit handlers, but do not tear down modules, which takes seconds.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
