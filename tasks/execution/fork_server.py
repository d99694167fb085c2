"""The fork server: imports what steps import once, then forks a process for each step.

`python -m tasks.execution.fork_server SOCKET` listens there, for its own user alone. A step is a
fresh process that shares nothing with the one before but the modules: no device was used and no
operation run before the fork, so TensorFlow starts anew in each. The server opens no store, no
ledger and no file of a user, and knows no secret: a step's environment comes with its request,
which the forked process reads, and leaves with it.

It refuses what would not be the same as in a process started anew: an environment that differs in
what libraries may have read when they were imported, and sources that have changed since.
"""

from __future__ import annotations

import os

# Before anything imports TensorFlow, as `tasks/__main__.py` does.
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

_LISTENING = "--listening="  # the descriptor of a socket that is there already
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_PATIENCE = 5.0  # seconds in which a request must have come whole
_IMPORTED_LATE = (  # by libraries, when a step first needs them
    "mlflow.tracking",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    "alembic",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
)
_IDLE = 600.0  # seconds without a step after which the server gives its memory back


@dataclass
class _Step:
    """A step that runs: who waits for it, and until when it may."""

    process: Process
    client: socket.socket
    kill_at: float = NEVER


class ForkServer:
    """Serves one socket until it is told to end.

    Args:
        listening: the socket.
        arriving: descriptor from which the numbers of signals can be read.
    """

    def __init__(self, listening: socket.socket, arriving: int) -> None:
        self._listening, self._arriving = listening, arriving
        self._steps: dict[int, _Step] = {}
        self._files: dict[str, tuple[int, int]] | None = None  # loaded modules' files, once warm
        self._set_by_imports: dict[str, str] = {}
        self._used = time.monotonic()

    def serve(self) -> Start | None:
        """Return in each forked process, with its step; in the server when it is told to end."""
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
        """Sleep until something happens; return the descriptors that have something to say."""
        ends = [step.kill_at for step in self._steps.values()]
        if self._files and not self._steps:
            ends.append(self._used + _IDLE)
        bound = min(ends, default=NEVER) - time.monotonic()
        watched = select.poll()
        watched.register(self._arriving, select.POLLIN)
        watched.register(self._listening, select.POLLIN)
        for step in self._steps.values():
            if step.kill_at == NEVER:
                watched.register(step.client, select.POLLRDHUP)  # what is said, the step reads
        ready = watched.poll(None if bound == NEVER else max(bound, 0.0) * 1000)
        return [descriptor for descriptor, _ in ready]

    # --- requests

    def _accept(self) -> Start | None:
        """Fork a process for a request, which it reads itself; there, return it.

        What a step is told, the ledger's password among it, is never in the server's memory, and so
        in no other step's.
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
        # Until the child has handlers of its own: a signal to it would be told to the server.
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
        """Return why no process that is forked now would be as one started anew; '' if it is."""
        if threading.active_count() > 1:  # it may hold a lock that nobody would give back
            return "a thread runs in the fork server"
        if self._files != _files():
            return "the program has changed since the fork server imported it"
        return ""

    def _leave(self, server: int) -> None:
        """Leave nothing of the server to the process that was forked but its modules."""
        os.setsid()
        os.close(signal.set_wakeup_fd(-1))
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        supervisor.end_with_parent()
        if os.getppid() != server:  # it died before the kernel was asked
            os._exit(128 + signal.SIGTERM)
        for held in (self._listening, *(step.client for step in self._steps.values())):
            held.close()
        os.close(self._arriving)

    def _become_a_step(self, client: socket.socket) -> Start:
        """Read the request; take on its environment, output and words, or end."""
        client.settimeout(_PATIENCE)
        try:
            first, (output,), _, _ = socket.recv_fds(client, 1, 1)
            request = Start.model_validate_json(first + read_line(client))
        except (OSError, ValueError):  # nobody of ours, or somebody who died asking
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

        numpy.random.seed()  # or all steps would go on from one state
        return request

    # --- modules

    def _warm_up(self) -> None:
        """Import what steps import, once the first step is asked for."""
        if self._files is not None:
            return
        for name in modules_of_steps():
            with contextlib.suppress(ImportError):  # the step will say so
                importlib.import_module(name)
        self._set_by_imports = {n: v for n, v in os.environ.items() if _GIVEN.get(n) != v}
        gc.collect()
        gc.freeze()  # a step's collector then leaves the pages shared
        self._files = _files()

    def _renew(self) -> None:
        """Begin anew in the same process: no module is left, and nobody who asks is turned away."""
        signal.set_wakeup_fd(-1)
        os.set_inheritable(self._listening.fileno(), True)
        words = [word for word in sys.orig_argv[1:] if not word.startswith(_LISTENING)]
        words.append(f"{_LISTENING}{self._listening.fileno()}")
        os.execve(sys.executable, [sys.executable, *words], _GIVEN)  # noqa: S606 - our own words

    # --- steps

    def _reap(self) -> None:
        """Collect the steps that have ended, and tell who waits for them."""
        for pid in list(self._steps):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                step = self._steps.pop(pid)
                if step.kill_at != NEVER:  # nobody else ends what it has left behind
                    supervisor.stop([step.process], 0.0)
                _answer(step.client, StepEnded(exit_code=os.waitstatus_to_exitcode(status)))
                step.client.close()
                self._used = time.monotonic()

    def _abandon(self, descriptor: int) -> None:
        """End the step whose starter is gone."""
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
    """Return what to import before the first fork: every step, and what the contract needs."""
    steps = importlib.import_module("tasks.steps")
    names = [f"{steps.__name__}.{module.name}" for module in pkgutil.iter_modules(steps.__path__)]
    return ["tasks.execution.contract", *names, *_IMPORTED_LATE]


def _files() -> dict[str, tuple[int, int]]:
    """Return time and size of the file of each module that is loaded."""
    found: dict[str, tuple[int, int]] = {}
    for module in list(sys.modules.values()):
        # Not by getattr: a lazy module would be imported.
        file = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(file, str):
            with contextlib.suppress(OSError):
                stat = os.stat(file)  # noqa: PTH116 - thousands of them
                found[file] = (stat.st_mtime_ns, stat.st_size)
    return found


def _answer(client: socket.socket, answer: Started | Refused | StepEnded) -> None:
    with contextlib.suppress(OSError):  # who asked is gone: `_abandon` sees to the step
        client.sendall(f"{answer.model_dump_json()}\n".encode())


def _listen(server: Path) -> socket.socket:
    """Return the listening socket; its file is there only when somebody can connect to it."""
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
    """Serve; in a forked process, run its step and end with its exit code."""
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
    # What an interpreter does at its end, but for taking every module apart, which takes seconds.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
