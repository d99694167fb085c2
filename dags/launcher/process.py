"""Steps as local processes of the task environment's own Python."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from airflow.sdk import BaseOperator

from dags.launcher import deployment
from dags.launcher.links import tracked_at
from dags.launcher.outcome import UNFINISHED, failure
from dags.launcher.work import Plan, Work, publishable, work_of
from tasks.protocol import environment_for

GRACE_SECONDS = 4.0  # Airflow's supervisor escalates every 5 s; a step ends itself before
LONGEST_ARGUMENT = 100_000  # bytes; Linux refuses a single argument above 128 KiB
_PR_SET_PDEATHSIG = 1
_UNWANTED = re.compile(
    r"AIRFLOW_.*|_AIRFLOW.*|PYTHONPATH|PYTHONHOME|PYTHONDONTWRITEBYTECODE|VIRTUAL_ENV"
)


class ProcessStep(BaseOperator):
    """Runs a step in a process group of its own, which ends with the task, however that ends."""

    template_fields = ("point",)

    def __init__(
        self, *, plan: Plan, point: Mapping[str, float] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.plan = plan
        self.point = point
        self.process: subprocess.Popen[str] | None = None
        self.tracked_at = ""

    def execute(self, context: Any) -> dict[str, Any]:
        """Start the step, pass its lines on to the task's log, and answer for its exit code."""
        work = work_of(self.task_id, self.plan, context, self.point)
        context["point_name"] = work.context.point
        progress = progress_file(work, context["ti"].map_index)
        progress.unlink(missing_ok=True)
        self.log.info("Output: %s", work.spec.output)
        exit_code, last_line = self._run(work, progress)
        while exit_code == UNFINISHED:
            exit_code, last_line = self._run(work, progress)
        if exit_code:
            raise failure(work.spec.step, exit_code, last_line)
        return work.answer(_numbers(work.spec.output))

    def _run(self, work: Work, progress: Path) -> tuple[int, str]:
        self.process = subprocess.Popen(  # noqa: S603 - no shell: settings are data, not words
            [deployment.task_python(), *_arguments(work)],
            cwd=deployment.CHECKOUT,
            env=_environment(work, progress),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        last_line = "no output"
        assert self.process.stdout is not None  # noqa: S101 - narrows the type
        with self.process.stdout as lines:
            for line in lines:
                if text := line.rstrip():
                    self.tracked_at = tracked_at(text) or self.tracked_at
                    last_line = text
                    self.log.info("%s", text)
        return self.process.wait(), last_line

    def on_kill(self) -> None:
        """End the step and whatever it started: SIGTERM, then SIGKILL."""
        if self.process is None or self.process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)


def progress_file(work: Work, map_index: int = -1) -> Path:
    """Return the file that a step appends its progress to, for who follows the run."""
    task = work.context.task if map_index < 0 else f"{work.context.task}.{map_index}"
    folder = deployment.home() / "progress" / re.sub(r"[^\w.+-]", "_", work.context.run_key)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{task}.jsonl"


def _arguments(work: Work) -> list[str]:
    words = work.arguments()
    if len(words[-1]) < LONGEST_ARGUMENT:
        return words
    folder = deployment.home() / "specs"  # the report of a large sweep: too long to be an argument
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{work.spec.digest()}.json"
    file.write_text(work.spec.model_dump_json())
    return [*words[:-1], str(file)]


def _environment(work: Work, progress: Path) -> dict[str, str]:
    """Return the task environment's variables: nothing of Airflow's, its secrets least of all.

    What the step does not need is withheld, so that it fails here as it would in a container. It
    is no wall: a process of the same user can read the same files.
    """
    kept = {name: value for name, value in os.environ.items() if not _UNWANTED.fullmatch(name)}
    kept = environment_for(work.spec, kept, apart=False)
    return kept | work.environment() | {"CONFIDE_PROGRESS": str(progress)}


def _numbers(output: str) -> dict[str, float]:
    """Return the publishable numbers of a result in a local store; none where it is remote."""
    address = urlparse(output)
    if address.scheme != "file":
        return {}
    return publishable((Path(unquote(address.path)) / "result.json").read_text())


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """Have the kernel end the step when the worker dies without a chance to (kill -9)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
