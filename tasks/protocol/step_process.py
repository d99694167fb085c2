"""A step's work, and the process of this machine that does it.

The command line and Airflow's process launcher run every step by `StepProcess`. Containers and pods
get the same arguments and variables.
"""

from __future__ import annotations

import base64
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tasks.protocol import CHECKOUT, fork_server, supervisor
from tasks.protocol.fork_server import ForkedStep
from tasks.protocol.least_privilege import environment_for, without_orchestrator
from tasks.protocol.messages import CHANNEL, Follower, Lines, StepProgress
from tasks.protocol.specs import RunContext, StepSpec

LONGEST_ARGUMENT = 100_000  # bytes; Linux refuses a single argument above 128 KiB
_LOOK = 0.2  # seconds between readings of a step's progress


def data_uri(content: bytes) -> str:
    """Return JSON content as a `data:` URI (RFC 2397)."""
    return "data:application/json;base64," + base64.b64encode(content).decode()


@dataclass(frozen=True)
class Work:
    """The step of a task, and the run that the task belongs to."""

    spec: StepSpec
    context: RunContext

    def arguments(self) -> list[str]:
        """Return the arguments of the image's Python: the step and its spec as a `data:` URI."""
        uri = data_uri(self.spec.model_dump_json().encode())
        return ["-m", "tasks", self.spec.step, "--spec", uri]

    def environment(self, environment: Mapping[str, str], *, apart: bool) -> dict[str, str]:
        """Return the variables that the step needs, with the context of its run.

        Args:
            environment: all variables that could be passed to the step.
            apart: the step is isolated from its launcher (a container or a pod).

        Raises:
            BadInput: the step reads a ledger for which there is no reader.
        """
        needed = environment_for(self.spec, environment, apart=apart)
        run = self.context.model_dump_json()
        return needed | {"CONFIDE_RUN_CONTEXT": run, "PYTHONUNBUFFERED": "1"}


class StepProcess:
    """A step in a process that leads a new session and ends with the process that runs it.

    The step receives neither Airflow's variables nor those that it does not need, so that errors
    appear here as they would in a container. This is no security boundary: a process of the same
    user can read the same files.

    Args:
        work: the step and its run.
        channel: file for the step's messages.
        home: folder of the deployment, for a spec that is too long for an argument.
        python: interpreter of the task environment.
        server: socket of a fork server, or None.
        variables: variables of the deployment, if this process does not have them.
    """

    def __init__(
        self,
        work: Work,
        channel: Path,
        *,
        home: Path,
        python: str,
        server: Path | None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._work, self._channel, self._home = work, channel, home
        self._python, self._server, self._variables = python, server, variables
        self._leader: supervisor.Process | None = None
        self._stopped = False

    def run(
        self, log: Callable[[str], None], watch: Callable[[StepProgress], None] = lambda _: None
    ) -> tuple[int, Follower]:
        """Run the step to its end; return its exit code, negative for a signal, and its messages.

        Processes that the step has left running are ended too.

        Args:
            log: called with each line of the step's output.
            watch: called several times a second with the step's progress.
        """
        self._channel.parent.mkdir(parents=True, exist_ok=True)
        self._channel.unlink(missing_ok=True)
        messages = Follower(self._channel)
        variables = self._work.environment(
            without_orchestrator(os.environ | self._variables), apart=False
        )
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as output:
            try:
                process = fork_server.start(
                    self._words(),
                    variables | {CHANNEL: str(self._channel)},
                    CHECKOUT,
                    writing,
                    python=self._python,
                    server=self._server,
                )
            finally:
                os.close(writing)
            self._leader = supervisor.Process.of(process.pid)
            if self._stopped:  # while the process was being started
                self.stop()
            try:
                code = _follow(
                    process, output.fileno(), log, lambda: watch(messages.look().progress)
                )
            finally:
                self.stop()
                process.poll()
        return code, messages.look()

    def stop(self) -> None:
        """End the step and its child processes by SIGTERM, then SIGKILL."""
        self._stopped = True
        if self._leader is not None:
            supervisor.stop([self._leader], supervisor.LAUNCHER_GRACE)

    def _words(self) -> list[str]:
        """Return the arguments of `python -m tasks`."""
        words = self._work.arguments()[2:]
        if len(words[-1]) < LONGEST_ARGUMENT:
            return words
        folder = self._home / "specs"  # the report of a large sweep
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{self._work.spec.digest()}.json"
        file.write_text(self._work.spec.model_dump_json())
        return [*words[:-1], str(file)]


def _follow(
    process: subprocess.Popen[bytes] | ForkedStep,
    output: int,
    log: Callable[[str], None],
    look: Callable[[], None],
) -> int:
    """Log a process's output line by line until the process ends, and return its exit code.

    A child of the process may hold the output open for longer.
    """
    code, lines, is_open = None, Lines(), True
    while code is None:
        code = process.poll()
        look()
        if not is_open:
            time.sleep(0.02)
        patience = _LOOK if code is None else 0
        while is_open and select.select([output], [], [], patience)[0]:
            piece = os.read(output, 1 << 16)
            for line in lines.add(piece):
                log(line)
            is_open, patience = bool(piece), 0
    return code
