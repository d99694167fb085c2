"""Runs a job's steps on this machine, one after the other, as `confide run` does."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dp_core.errors import Unfinished
from tasks.protocol import RunContext, StepResult, StepSpec, environment_for
from tasks.runtime.context import read_result
from tasks.runtime.deployment import CHECKOUT, Deployment
from tasks.runtime.messages import message_of
from tasks.storage import Store

GRACE = 5.0  # seconds between asking a step to end and ending it
_LOOK = 0.2  # seconds between looks at a step's progress

Watcher = Callable[[str, int, int, str], None]  # task, done, total, note


@dataclass(frozen=True)
class Job:
    """A job: (sweep point or '', task, spec) in an order in which they can run."""

    name: str
    run_key: str
    run_name: str
    steps: list[tuple[str, str, StepSpec]]


@dataclass
class Outcome:
    """How far a job came."""

    job: Job
    log_folder: Path
    results: dict[str, StepResult] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    failed: str = ""
    exit_code: int = 0

    def summary(self) -> dict[str, Any]:
        """Return the outcome for programs: numbers that anyone may see, and places."""
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
                    # how long a step took tells how large the data are
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


def run_job(job: Job, deployment: Deployment, watch: Watcher | None = None) -> Outcome:
    """Run the steps until one fails; each is a process of its own, and its log a file."""
    deployment.prepare()
    folder = deployment.logs / re.sub(r"[^\w.+-]", "_", job.run_key)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    outcome = Outcome(job, folder)
    store = Store(deployment.store, deployment.cache)
    for number, (point, task, spec) in enumerate(job.steps):
        name = f"{task} · {point}" if point else task
        files = folder / f"{number:03d}-{task}"
        context = RunContext(run_key=job.run_key, run_name=job.run_name, task=task, point=point)
        code = Unfinished.exit_code
        while code == Unfinished.exit_code:  # its time was up: it goes on where it was
            code = _run_step(spec, context, deployment, files, name, watch or _silent)
        if code:
            outcome.exit_code = code if code > 0 else 1
            outcome.failed = f"{name}: {_last_line(files.with_suffix('.log'), spec.step)}"
            return outcome
        result = read_result(store, spec.output)
        assert result is not None  # noqa: S101 - the contract: exit code 0 means a result
        outcome.results[name], outcome.outputs[name] = result, spec.output
    return outcome


def _run_step(
    spec: StepSpec,
    context: RunContext,
    deployment: Deployment,
    files: Path,
    name: str,
    watch: Watcher,
) -> int:
    spec_file, log, progress = (files.with_suffix(x) for x in (".json", ".log", ".progress"))
    spec_file.write_text(spec.model_dump_json(indent=1))
    python = deployment.task_python if Path(deployment.task_python).exists() else sys.executable
    with log.open("wb") as stream:
        process = subprocess.Popen(  # noqa: S603 - no shell: settings are data, not words
            [python, "-m", "tasks", spec.step, "--spec", str(spec_file)],
            cwd=CHECKOUT,
            env=environment_for(spec, os.environ, apart=False)
            | {
                "CONFIDE_RUN_CONTEXT": context.model_dump_json(),
                "CONFIDE_PROGRESS": str(progress),
                "PYTHONUNBUFFERED": "1",
            },
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        try:
            watch(name, 0, 0, "")
            while process.poll() is None:
                time.sleep(_LOOK)
                watch(name, *_latest(progress))
        finally:
            _end(process)
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _latest(progress: Path) -> tuple[int, int, str]:
    if not progress.exists():
        return 0, 0, ""
    with progress.open("rb") as stream:
        stream.seek(max(0, progress.stat().st_size - 4096))
        lines = stream.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    if not whole:
        return 0, 0, ""
    last = json.loads(whole[-1])
    return last["done"], last["total"], last["note"]


def _last_line(log: Path, step: str) -> str:
    text = log.read_text(errors="replace")
    lines = [message_of(line) for line in text.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("confide: ")] or lines or ["no output"]
    return f"{said[-1].removeprefix('confide: ').removeprefix(f'{step}: ')} (log: {log})"


def _silent(name: str, done: int, total: int, note: str) -> None:
    return


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Have the kernel end the step when its parent dies without a chance to (kill -9)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
