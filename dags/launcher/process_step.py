"""The process launcher: steps as local processes of the task environment's Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from airflow.sdk import BaseOperator

from dags.launcher.step_operator import (
    CHECKOUT,
    LONGEST_ARGUMENT,
    StepOperator,
    Work,
    home,
    publishable,
    store,
)
from tasks.protocol import fork_server_client, supervisor
from tasks.protocol.least_privilege import without_orchestrator
from tasks.protocol.messages import CHANNEL, Follower, channel_file
from tasks.protocol.specs import STORE_SCHEME


class ProcessStep(StepOperator, BaseOperator):
    """Runs a step in a new session, which always ends together with the task."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.process: supervisor.Process | None = None

    def run_step(self, work: Work, map_index: int) -> tuple[int, Follower]:
        """Run the step, and write its output to the task's log."""
        channel = channel_file(home(), work.context.run_key, work.context.task, map_index)
        channel.parent.mkdir(parents=True, exist_ok=True)
        channel.unlink(missing_ok=True)
        python = os.environ.get("CONFIDE_TASK_PYTHON") or CHECKOUT / ".venv" / "task/bin/python"
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as lines:
            try:
                step = fork_server_client.start(
                    _words(work),
                    environment(work, channel),
                    CHECKOUT,
                    writing,
                    python=str(python),
                    server=fork_server_client.named(os.environ),
                )
            finally:
                os.close(writing)
            self.process = supervisor.Process.of(step.pid)
            try:
                for line in lines:
                    if text := line.decode(errors="replace").rstrip():
                        self.log.info("%s", text)
                code = step.wait()
            finally:
                self.on_kill()  # ends child processes that the step has left running
        return code, Follower(channel).look()

    def numbers(self, work: Work) -> dict[str, float]:
        """Return the result's publishable metrics, or {} if the store is remote."""
        address = urlparse(store())
        if address.scheme != "file":
            return {}
        folder = Path(unquote(address.path)) / work.spec.output.removeprefix(STORE_SCHEME)
        return publishable((folder / "result.json").read_text())

    def on_kill(self) -> None:
        """End the step and its child processes by SIGTERM, then SIGKILL."""
        if self.process is not None:
            supervisor.stop([self.process], supervisor.LAUNCHER_GRACE)


def _words(work: Work) -> list[str]:
    """Return the arguments of `python -m tasks`."""
    words = work.arguments()[2:]
    if len(words[-1]) < LONGEST_ARGUMENT:
        return words
    folder = home() / "specs"  # the spec of a large sweep's report is too long for an argument
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{work.spec.digest()}.json"
    file.write_text(work.spec.model_dump_json())
    return [*words[:-1], str(file)]


def environment(work: Work, channel: Path) -> dict[str, str]:
    """Return the step's environment variables, without Airflow's variables and secrets.

    Variables that the step does not need are withheld, so that errors appear here as they would in
    a container. This is no security boundary: a process of the same user can read the same files.
    """
    kept = without_orchestrator(os.environ)
    return work.environment(kept, apart=False) | {CHANNEL: str(channel)}
