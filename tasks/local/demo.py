"""`confide demo`: the embedded job through Airflow, from nothing to its table and report."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from dp_core.errors import BadInput, ConfideError
from tasks.local import stack as local
from tasks.local.airflow_api import AirflowApi, AirflowAway, AirflowRefused
from tasks.local.follow import Follower, first_failure, progress_folder
from tasks.local.stack import Stack
from tasks.protocol import JobSettings, dp_bert_steps
from tasks.runtime.deployment import Deployment

DAG = "dp_bert"
PREFIX = "demo__"


def run(deployment: Deployment, settings: JobSettings, console: Console) -> str:
    """Run the job through Airflow; return the URI of its report step's output.

    A stack that serves already is used and left as it is; otherwise one is started, and stopped
    whatever happens.

    Raises:
        BadInput: Airflow refuses the settings.
        ConfideError: the run failed; the line says which task, why, and where its log is.
    """
    with _stack(deployment, console) as stack:
        api = stack.api()
        run_id = f"{PREFIX}{datetime.now():%Y-%m-%dT%H-%M-%S}"
        try:
            api.trigger(DAG, run_id, settings.model_dump(mode="json", exclude_defaults=True))
        except AirflowRefused as error:
            raise BadInput(str(error), where="settings") from None
        except AirflowAway as error:
            raise ConfideError(f"Airflow does not answer ({error})") from None
        with _failed_if_interrupted(api, run_id):
            _follow(deployment, stack, run_id, console)
    return dp_bert_steps(settings, deployment.store)["report"].output


def _follow(deployment: Deployment, stack: Stack, run_id: str, console: Console) -> None:
    def check() -> None:
        if dead := stack.dead():
            log = local.log_of(deployment, dead[0])
            raise ConfideError(f"{dead[0]} ended during the run", fix=f"See {log}.")

    folder = progress_folder(deployment.home, DAG, run_id)
    follower = Follower(stack.api(), DAG, run_id, folder, check, console)
    state, tasks = follower.until_end()
    if state == "success":
        return
    failed = first_failure(tasks)
    if failed is None:
        raise ConfideError(f"the run ended as {state}", fix=f"See {deployment.logs}.")
    log = _log_of(deployment, run_id, failed)
    raise ConfideError(_reason(log), where=str(failed["task_id"]), fix=f"Its log: {log}")


def _log_of(deployment: Deployment, run_id: str, task: dict[str, Any]) -> Path:
    """Return where Airflow keeps the log of a task's last try."""
    folder = deployment.logs / "airflow" / f"dag_id={DAG}" / f"run_id={run_id}"
    return folder / f"task_id={task['task_id']}" / f"attempt={task['try_number']}.log"


def _reason(log: Path) -> str:
    """Return the message of the last exception in a task's log."""
    reason = "failed"
    with contextlib.suppress(OSError):
        for line in log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
                reason = str(json.loads(line)["error_detail"][0]["exc_value"])
    return reason.rstrip(".")


@contextlib.contextmanager
def _stack(deployment: Deployment, console: Console) -> Iterator[Stack]:
    stack = local.running(deployment)
    if stack is not None:
        console.print(f"Using the Airflow that runs at {stack.airflow_url}", highlight=False)
        yield stack
        return
    with _signals_raise():
        try:
            stack = local.start(deployment, local.RUNNERS, console.print, end_with_us=True)
            for earlier in stack.api().unfinished_runs(DAG):
                if earlier.startswith(PREFIX):  # a demo that was killed: it would go on before ours
                    stack.api().fail_run(DAG, earlier)
            yield stack
        finally:
            local.stop(deployment)


@contextlib.contextmanager
def _failed_if_interrupted(api: AirflowApi, run_id: str) -> Iterator[None]:
    """Have an interrupted run end as failed: left running, it would go on at the next start."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            if api.run_state(DAG, run_id) not in {"success", "failed"}:
                api.fail_run(DAG, run_id)
        raise


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exit that still stops what was started."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
