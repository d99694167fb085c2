"""`confide demo`: the embedded job through Airflow, from nothing to its table and report."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from dp_core.errors import ConfideError
from tasks.execution.run_job import ProgressBars, stops_on_signals
from tasks.local import stack as local
from tasks.local.airflow_api import AirflowApi, AirflowAway
from tasks.local.stack import Stack
from tasks.protocol.job import job_steps
from tasks.protocol.messages import Follower, StepProgress, channel_file
from tasks.protocol.settings import JobSettings
from tasks.runtime.deployment import Deployment

DAG = "dp_bert"
PREFIX = "demo__"
FINISHED = {"success", "failed", "skipped", "upstream_failed", "removed"}
_EVERY = 1.0  # seconds between looks
_PATIENCE = 60.0  # seconds without an answer before giving up


@dataclass
class RunFollower:
    """Shows one DAG run until it ends: bars on a terminal, a line for each finished task.

    Attributes:
        home: of the deployment, below which the run's steps keep their messages.
        check: called at every poll; raises if the run cannot finish any more.
    """

    api: AirflowApi
    run_id: str
    home: Path
    check: Callable[[], None]
    console: Console
    _started: float = field(default_factory=time.monotonic)
    _said: set[str] = field(default_factory=set)
    _channels: dict[str, Follower] = field(default_factory=dict)

    def until_end(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the run's final state and its task instances."""
        answered = time.monotonic()
        with ProgressBars(self.console) as bars:
            while True:
                self.check()
                try:
                    state = self.api.run_state(DAG, self.run_id)
                    tasks = self.api.task_instances(DAG, self.run_id)
                except AirflowAway:
                    if time.monotonic() > answered + _PATIENCE:
                        raise ConfideError("Airflow does not answer any more") from None
                    time.sleep(_EVERY)
                    continue
                answered = time.monotonic()
                done = sum(task["state"] in FINISHED for task in tasks)
                bars.show(DAG, StepProgress(done=done, total=len(tasks)))
                for task in tasks:
                    self._show(bars, task)
                if state in {"success", "failed"}:
                    return state, tasks
                time.sleep(_EVERY)

    def told(self, task: dict[str, Any]) -> Follower:
        """Return the messages of a task's step so far."""
        name = _name(task)
        if name not in self._channels:
            run_key = f"{DAG}/{self.run_id}"
            file = channel_file(self.home, run_key, task["task_id"], task["map_index"])
            self._channels[name] = Follower(file)
        return self._channels[name].look()

    def _show(self, bars: ProgressBars, task: dict[str, Any]) -> None:
        name = _name(task)
        if task["state"] == "running":
            bars.show(f"  {name}", self.told(task).progress)
        elif task["state"] in FINISHED and name not in self._said:
            self._said.add(name)
            bars.remove(f"  {name}")
            if task["state"] != "upstream_failed":
                self._print(task, name)

    def _print(self, task: dict[str, Any], name: str) -> None:
        now = time.strftime("%M:%S", time.gmtime(time.monotonic() - self._started))
        mark = {"success": "[green]✓", "skipped": "[dim]–"}
        words = "" if task["state"] == "success" else f" {task['state']}"
        took = f"{task['duration']:6.1f} s" if task.get("duration") else " " * 8
        self.console.print(
            f"{now}  {mark.get(task['state'], '[red]✗')}[/] {name:<28}{took}{words}",
            highlight=False,
        )


def run(deployment: Deployment, settings: JobSettings, console: Console) -> str:
    """Run the job through Airflow; return the URI of its report step's output.

    A running stack is used and left running. Otherwise a stack is started for the demo, and stopped
    at its end even after an error.

    Raises:
        BadInput: Airflow refuses the settings.
        ConfideError: the run failed; the message names the task, the reason and the log.
    """
    with _stack(deployment, console) as stack:
        api = stack.api()
        run_id = f"{PREFIX}{datetime.now():%Y-%m-%dT%H-%M-%S}"
        api.trigger(DAG, run_id, settings.model_dump(mode="json", exclude_defaults=True))
        try:
            _follow(deployment, stack, run_id, console)
        except BaseException:  # an interrupted run must not continue at the next start
            with contextlib.suppress(Exception):
                if api.run_state(DAG, run_id) not in {"success", "failed"}:
                    api.fail_run(DAG, run_id)
            raise
    return job_steps(settings)["report"].output


def _follow(deployment: Deployment, stack: Stack, run_id: str, console: Console) -> None:
    alive = partial(stack.confirm_alive, deployment)
    follower = RunFollower(stack.api(), run_id, deployment.home, alive, console)
    state, tasks = follower.until_end()
    if state == "success":
        return
    failed = first_failure(tasks)
    if failed is None:
        raise ConfideError(f"the run ended as {state}", fix=f"See {deployment.logs}.")
    of_task = ["airflow", f"dag_id={DAG}", f"run_id={run_id}", f"task_id={failed['task_id']}"]
    instance = [f"map_index={failed['map_index']}"] if failed["map_index"] >= 0 else []
    log = deployment.logs.joinpath(*of_task, *instance, f"attempt={failed['try_number']}.log")
    failure = follower.told(failed)
    code = f" (exit code {failure.failed.exit_code})" if failure.failed else ""
    reason = failure.reason("failed").rstrip(".") + code
    raise ConfideError(reason, where=str(failed["task_id"]), fix=f"Its log: {log}")


@contextlib.contextmanager
def _stack(deployment: Deployment, console: Console) -> Iterator[Stack]:
    stack = local.running(deployment)
    if stack is not None:
        console.print(f"Using the Airflow that runs at {stack.airflow_url}", highlight=False)
        yield stack
        return
    with stops_on_signals():
        try:
            stack = local.start(deployment, local.RUNNERS, console.print, end_with_us=True)
            for earlier in stack.api().unfinished_runs(DAG):
                if earlier.startswith(PREFIX):  # a killed demo would continue before this one
                    stack.api().fail_run(DAG, earlier)
            yield stack
        finally:
            local.stop(deployment)


def first_failure(tasks: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the task instance that failed first."""
    now = datetime.now(UTC).isoformat()
    failed = [task for task in tasks if task["state"] == "failed"]
    return min(failed, key=lambda task: task["end_date"] or now, default=None)


def _name(task: dict[str, Any]) -> str:
    """Return the display name of a task; an instance of a mapped task is named with its model."""
    if task["map_index"] < 0:
        return str(task["task_id"])
    return f"{task['task_id']} ({task.get('rendered_map_index') or task['map_index']})"
