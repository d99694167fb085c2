"""The fork server: imports the steps' modules once, then forks a process for each step.

`python -m tasks.execution.fork_server SOCKET` listens on a socket that only its own user can reach.
Each step is a fresh process that shares only the modules with earlier steps: no device was used and
no operation was run before the fork, so TensorFlow starts anew in each. The server opens no store,
ledger or user file, and holds no secret: a step's environment comes with its request, which only
the forked process reads.

The server refuses requests that would behave differently in a newly started process: an environment
that differs in variables that libraries may have read during import, and changed source files.
"""

from __future__ import annotations

import os

# This must run before anything imports TensorFlow, as in `tasks/__main__.py`.
_GIVEN = dict(os.environ)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import atexit  # noqa: E402
import contextlib  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import pkgutil  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402

from tasks.protocol import supervisor  # noqa: E402
from tasks.protocol.fork_server_client import (  # noqa: E402
    Refused,
    Start,
    Started,
    StepEnded,
    address,
    read_line,
    shared_environment,
)
from tasks.protocol.supervisor import LAUNCHER_GRACE, NEVER, Process  # noqa: E402

_LISTENING = "--listening="  # the descriptor of an existing socket
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_PATIENCE = 5.0  # seconds within which a request must be complete
_IMPORTED_LATE = (  # by libraries, when a step first needs them
    "mlflow.tracking",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    "alembic",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
)
_IDLE = 600.0  # seconds without a step after which the server frees its memory


@dataclass
class _Step:
    """A running step: its process, the client that waits for it, and its deadline."""

    process: Process
    client: socket.socket
    kill_at: float = NEVER


class ForkServer:
    """Serves one socket until a signal ends it.

    Args:
        listening: the socket.
        arriving: descriptor from which the numbers of signals can be read.
    """

    def __init__(self, listening: socket.socket, arriving: int) -> None:
        self._listening, self._arriving = listening, arriving
        self._steps: dict[int, _Step] = {}
        self._files: dict[str, tuple[int, int]] | None = None  # None before the imports
        self._set_by_imports: dict[str, str] = {}
        self._used = time.monotonic()

    def serve(self) -> Start | None:
        """Return the step in each forked process, or None in the server when a signal ends it."""
        while True:
            for ready in self._wait():
                if ready == self._arriving:
                    if set(os.read(self._arriving, 512)) - {signal.SIGCHLD}:
                        self._end_all()
                        return None
                    self._reap()
                elif ready == self._listening.fileno():
                    if (step := self._accept()) is not None:
                        return step
                else:
                    self._abandon(ready)
            self._kill_late()
            if self._files and not self._steps and time.monotonic() > self._used + _IDLE:
                self._renew()

    def _wait(self) -> list[int]:
        """Sleep until an event or a deadline; return the descriptors that are ready."""
        ends = [step.kill_at for step in self._steps.values()]
        if self._files and not self._steps:
            ends.append(self._used + _IDLE)
        bound = min(ends, default=NEVER) - time.monotonic()
        watched = select.poll()
        watched.register(self._arriving, select.POLLIN)
        watched.register(self._listening, select.POLLIN)
        for step in self._steps.values():
            if step.kill_at == NEVER:
                watched.register(step.client, select.POLLRDHUP)  # only the step reads requests
        ready = watched.poll(None if bound == NEVER else max(bound, 0.0) * 1000)
        return [descriptor for descriptor, _ in ready]

    # --- requests

    def _accept(self) -> Start | None:
        """Fork a process for a request; in the forked process, read and return the request.

        A step's environment, including the ledger's password, is therefore never in the memory of
        the server or of another step.
        """
        client, _ = self._listening.accept()
        self._used = time.monotonic()
        self._warm_up()
        if reason := self._changed():
            _answer(client, Refused(reason=reason))
            client.close()
            if not self._steps:
                self._renew()
            return None
        server = os.getpid()
        # Until the child has its own handlers, a signal to it would be reported to the server.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            _answer(client, Refused(reason=f"no process ({os.strerror(error.errno or 0)})"))
            client.close()
            return None
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            self._steps[pid] = _Step(Process.of(pid), client)
            return None
        self._leave(server)
        return self._become_a_step(client)

    def _changed(self) -> str:
        """Return why a forked process would differ from a newly started one; '' if it would not."""
        if threading.active_count() > 1:  # it may hold a lock that would never be released
            return "a thread runs in the fork server"
        if self._files != _files():
            return "the program has changed since the fork server imported it"
        return ""

    def _leave(self, server: int) -> None:
        """Release everything of the server in the forked process, except its modules."""
        os.setsid()
        os.close(signal.set_wakeup_fd(-1))
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        supervisor.end_with_parent()
        if os.getppid() != server:  # the server died before the kernel was asked
            os._exit(128 + signal.SIGTERM)
        for held in (self._listening, *(step.client for step in self._steps.values())):
            held.close()
        os.close(self._arriving)

    def _become_a_step(self, client: socket.socket) -> Start:
        """Read the request; take over its environment, output and arguments, or exit."""
        client.settimeout(_PATIENCE)
        try:
            first, (output,), _, _ = socket.recv_fds(client, 1, 1)
            request = Start.model_validate_json(first + read_line(client))
        except (OSError, ValueError):  # another client, or one that died while asking
            os._exit(1)
        told, given = shared_environment(request.environment), shared_environment(_GIVEN)
        if names := sorted(n for n in {*told, *given} if told.get(n) != given.get(n)):
            _answer(client, Refused(reason=f"variables are not its own: {', '.join(names)}"))
            os._exit(1)
        _answer(client, Started(pid=os.getpid()))
        client.close()
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        os.environ.clear()
        os.environ.update(self._set_by_imports | request.environment)
        sys.argv = ["tasks", *request.words]
        import numpy

        numpy.random.seed()  # otherwise all steps would share one random state
        return request

    # --- modules

    def _warm_up(self) -> None:
        """Import the modules of all steps at the first request."""
        if self._files is not None:
            return
        for name in modules_of_steps():
            with contextlib.suppress(ImportError):  # the step will report the error
                importlib.import_module(name)
        self._set_by_imports = {n: v for n, v in os.environ.items() if _GIVEN.get(n) != v}
        gc.collect()
        gc.freeze()  # a step's garbage collector then leaves the pages shared
        self._files = _files()

    def _renew(self) -> None:
        """Restart the server in the same process without its modules; no request is lost."""
        signal.set_wakeup_fd(-1)
        os.set_inheritable(self._listening.fileno(), True)
        words = [word for word in sys.orig_argv[1:] if not word.startswith(_LISTENING)]
        words.append(f"{_LISTENING}{self._listening.fileno()}")
        os.execve(sys.executable, [sys.executable, *words], _GIVEN)  # noqa: S606 - our own words

    # --- steps

    def _reap(self) -> None:
        """Collect the steps that have ended, and send their exit codes to the waiting clients."""
        for pid in list(self._steps):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                step = self._steps.pop(pid)
                if step.kill_at != NEVER:  # no client is left to end its child processes
                    supervisor.stop([step.process], 0.0)
                _answer(step.client, StepEnded(exit_code=os.waitstatus_to_exitcode(status)))
                step.client.close()
                self._used = time.monotonic()

    def _abandon(self, descriptor: int) -> None:
        """End the step whose client has gone."""
        for step in self._steps.values():
            if step.client.fileno() == descriptor and step.kill_at == NEVER:
                step.kill_at = time.monotonic() + LAUNCHER_GRACE
                with contextlib.suppress(ProcessLookupError):
                    os.kill(step.process.pid, signal.SIGTERM)

    def _kill_late(self) -> None:
        for step in self._steps.values():
            if step.kill_at <= time.monotonic():
                supervisor.stop([step.process], 0.0)
                step.kill_at = time.monotonic() + 1.0

    def _end_all(self) -> None:
        supervisor.stop([step.process for step in self._steps.values()], LAUNCHER_GRACE)
        self._reap()


def modules_of_steps() -> list[str]:
    """Return the modules to import before the first fork: every step and its dependencies."""
    steps = importlib.import_module("tasks.steps")
    names = [f"{steps.__name__}.{module.name}" for module in pkgutil.iter_modules(steps.__path__)]
    return ["tasks.execution.contract", *names, *_IMPORTED_LATE]


def _files() -> dict[str, tuple[int, int]]:
    """Return the modification time and size of each loaded module's file."""
    found: dict[str, tuple[int, int]] = {}
    for module in list(sys.modules.values()):
        # `getattr` on a lazy module would import it.
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str):
            with contextlib.suppress(OSError):
                stat = os.stat(file)  # noqa: PTH116 - thousands of them
                found[file] = (stat.st_mtime_ns, stat.st_size)
    return found


def _answer(client: socket.socket, answer: Started | Refused | StepEnded) -> None:
    with contextlib.suppress(OSError):  # the client has gone: `_abandon` ends the step
        client.sendall(f"{answer.model_dump_json()}\n".encode())


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


def main(words: list[str]) -> int:
    """Serve; in a forked process, run its step and exit with its exit code."""
    arriving = supervisor.arriving(*_SIGNALS)
    place, *inherited = words
    listening = (
        socket.socket(fileno=int(inherited[0].removeprefix(_LISTENING)))
        if inherited
        else _listen(Path(place))
    )
    step = ForkServer(listening, arriving).serve()
    if step is None:
        Path(place).unlink(missing_ok=True)
        return 0
    from tasks.execution.contract import command_line

    code = command_line(list(step.words))
    # Run the interpreter's exit handlers, but do not tear down modules, which takes seconds.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
