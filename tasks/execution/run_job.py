"""A job's steps as processes of this machine, one after the other, and their progress."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from dp_core.errors import BadInput, Contradicted, Unfinished
from tasks.protocol import CHECKOUT, SETUP, fork_server, supervisor
from tasks.protocol.least_privilege import without_orchestrator
from tasks.protocol.messages import StepProgress, StepResult
from tasks.protocol.specs import RunContext, StepSpec
from tasks.protocol.step_process import StepProcess, Work
from tasks.releases.deployment_ledger import plans_given_back
from tasks.results import read_result
from tasks.runtime.deployment import Deployment, is_executable
from tasks.tracking.mlflow import send_all

Watcher = Callable[[str, StepProgress], None]  # gets a task's name and its progress


@dataclass(frozen=True)
class Job:
    """A job: (sweep point or '', task, spec) in an order in which the steps can run."""

    name: str
    run_key: str
    run_name: str
    steps: Iterable[tuple[str, str, StepSpec]]  # the next one is requested when the last is done

    @classmethod
    def now(cls, name: str, steps: Iterable[tuple[str, str, StepSpec]]) -> Self:
        """Return a job of this machine that starts now, under a new key."""
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        key = f"cli/{name}/{started.replace(' ', 'T')}/{time.time_ns() % 10**9}"
        return cls(name=name, run_key=key, run_name=f"{name} {started}", steps=steps)

    @property
    def hides_count(self) -> bool:
        """Whether the job has a private selection, which is refused in an Optuna sweep."""
        return isinstance(self.steps, list) and any(s.hides_count for *_, s in self.steps)


@dataclass
class JobOutcome:
    """The outcome of a job: the results so far, and the failure, if any."""

    job: Job
    log_folder: Path
    results: dict[str, StepResult] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    failed: str = ""
    exit_code: int = 0

    def summary(self) -> dict[str, Any]:
        """Return the outcome for programs: publishable numbers, addresses and paths."""
        last = self.results.get("report")
        return {
            "job": self.job.name,
            "run_key": self.job.run_key,
            "ok": not self.exit_code,
            "exit_code": self.exit_code,
            "error": self.failed,
            "logs": str(self.log_folder),
            "report": last.outputs if last else {},
            "table": last.facts.get("table") if last else None,
            "steps": {
                name: {
                    "output": self.outputs[name],
                    # the duration of a step reveals the size of the data
                    **({"seconds": result.seconds} if result.facts["made_up"] else {}),
                    "metrics": {
                        m.name: m.value
                        for m in result.metrics
                        if m.label != "operator" or result.facts["made_up"]
                    },
                }
                for name, result in self.results.items()
            },
        }


def run_and_give_back(job: Job, deployment: Deployment, watch: Watcher) -> JobOutcome:
    """Run a job, withdraw its plans if no release has begun, and send its numbers to MLflow.

    The job's processes are stopped if this process receives a signal.
    """
    with stops_on_signals(), plans_given_back(deployment, job.run_key):
        outcome = run_job(job, deployment, watch)
    send_all(deployment)
    return outcome


def run_job(job: Job, deployment: Deployment, watch: Watcher) -> JobOutcome:
    """Run the steps until one fails, each in a separate process with a log file.

    Raises:
        BadInput: this environment has no TensorFlow, and the steps would run in it.
    """
    if Path(deployment.task_python) == Path(sys.executable) and find_spec("tensorflow") is None:
        raise BadInput("TensorFlow is not installed", where="run", fix=f"Run: {SETUP}")
    deployment.prepare()
    folder = deployment.logs / re.sub(r"[^\w.+-]", "_", job.run_key)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    outcome, store = JobOutcome(job, folder), deployment.open_store()
    with _server(deployment, folder) as server:
        for number, (point, task, spec) in enumerate(job.steps):
            name = f"{task} · {point}" if point else task
            files = folder / f"{number:03d}-{task}"
            context = RunContext(
                run_key=job.run_key,
                run_name=job.run_name,
                task=task,
                point=point,
                hides_count=job.hides_count,
            )
            code = Unfinished.exit_code
            while code == Unfinished.exit_code:  # the time was up, and the step resumes
                work = Work(spec, context)
                code, reason = _run_step(work, deployment, files, partial(watch, name), server)
            if code in (0, Contradicted.exit_code):
                result = read_result(store, spec.output)
                assert result is not None  # noqa: S101 - the contract: these codes mean a result
                outcome.results[name], outcome.outputs[name] = result, spec.output
            if code:
                outcome.exit_code = code if code > 0 else 1
                outcome.failed = f"{name}: {reason} (log: {files.with_suffix('.log')})"
                break
    return outcome


def _run_step(
    work: Work,
    deployment: Deployment,
    files: Path,
    watch: Callable[[StepProgress], None],
    server: Path | None = None,
) -> tuple[int, str]:
    """Return the step's exit code and the reason of a failure."""
    step = StepProcess(
        work,
        files.with_suffix(".messages"),
        home=deployment.home,
        python=_python(deployment),
        server=server,
        variables=deployment.variables,
    )
    with files.with_suffix(".log").open("w", buffering=1) as stream:
        code, messages = step.run(lambda line: print(line, file=stream), watch)
    return code, messages.reason()


@contextmanager
def stops_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exit that first stops the started processes.

    Python handles signals in the main thread only; in another thread nothing changes.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _server(deployment: Deployment, folder: Path) -> Iterator[Path | None]:
    """Run a fork server for the steps of one job, unless the environment turns it off."""
    if os.environ.get(fork_server.SERVER) == fork_server.OFF:
        yield None
        return
    place = folder / "fork-server.socket"
    variables = fork_server.shared_environment(without_orchestrator(os.environ))
    with place.with_suffix(".log").open("wb") as log:
        process = supervisor.start(
            fork_server.command(_python(deployment), place),
            variables | {"PYTHONUNBUFFERED": "1"},
            CHECKOUT,
            log,
        )
    try:
        while not place.exists() and process.poll() is None:
            time.sleep(0.02)
        yield place
    finally:
        supervisor.stop([supervisor.Process.of(process.pid)], supervisor.STACK_GRACE)
        process.wait()


def _python(deployment: Deployment) -> str:
    python = deployment.task_python
    return python if is_executable(Path(python)) else sys.executable


# --- progress on a terminal


class ProgressBars(RichProgress):
    """Progress bars of steps by name; nothing is drawn if the console is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._bars: dict[str, TaskID] = {}
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )

    def show(self, name: str, now: StepProgress) -> None:
        """Show the progress of a step."""
        if name not in self._bars:
            self._bars[name] = self.add_task(name, total=None, note="")
        self.update(self._bars[name], completed=now.done, total=now.total or None, note=now.note)

    def remove(self, name: str) -> None:
        """Remove the bar of a step."""
        if name in self._bars:
            self.remove_task(self._bars.pop(name))


@contextmanager
def one_after_the_other(steps: int, *, shows_times: bool) -> Iterator[Watcher]:
    """Yield a watcher of steps that run one at a time: a line and a bar for each.

    Args:
        steps: the number of steps of the job.
        shows_times: whether lines begin with the time since the start, which reveals the size of
            the data.
    """
    console = Console(stderr=True, highlight=False)
    begun: list[str] = []
    started = time.monotonic()

    with ProgressBars(console) as bars:

        def watch(name: str, now: StepProgress) -> None:
            if name not in begun:
                for earlier in begun[-1:]:
                    bars.remove(earlier)
                begun.append(name)
                since = time.gmtime(time.monotonic() - started)
                line = time.strftime("%H:%M:%S  ", since) if shows_times else ""
                line += f"[{len(begun)}/{steps}] {name}"
                console.print(line, markup=False, soft_wrap=True)
            bars.show(name, now)

        yield watch
