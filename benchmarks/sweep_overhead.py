"""The overhead of a sweep per point, beyond the work of its steps, for four points of trivial size.

It takes more than two minutes, so `make bench` omits it:

    .venv/task/bin/python -m benchmarks.sweep_overhead [shell] [airflow]

The work of a step is the `seconds` of its result; the remaining time until the start of the next
step is overhead. A repeated sweep reuses every result, so all of its time is overhead, which is
also given in processor seconds, because these do not depend on other load. From the shell, the
sweep is run with the fork server, and with a new process for every step. In Airflow, it is run by a
separate local stack, and the time of a point runs from the earliest start of its first task to the
start of the report. Writes benchmarks/results/sweeps.json, in which other parts are kept.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from tasks.execution.run_job import Job, run_job
from tasks.local import stack as local
from tasks.protocol.fork_server import OFF, SERVER
from tasks.protocol.job import job_steps, point_and_task
from tasks.protocol.messages import StepProgress
from tasks.protocol.sweep import SweepSettings
from tasks.results import read_result
from tasks.runtime.deployment import Deployment

RUNS = ("made", "found")  # the same sweep twice; the second run reuses every result
RESULTS = Path(__file__).parent / "results" / "sweeps.json"
SETTINGS = SweepSettings(
    synthetic_patients=200, declared_units=240, words_per_unit=64, vocabulary_epsilon=8.0,
    vocabulary_size=400, layers=1, hidden=64, sequence_length=32, batch_size=32, epochs=0.5,
    public_steps=20, public_batch_size=8, max_examples_per_unit=2, finetune_epochs=1,
    canary_patterns="HS", canary_rates="0.2", canaries_per_group=2, delta=1e-6, device="cpu",
    sweep_noise_multipliers="1,2", sweep_batch_sizes="32,64", sweep_epochs="0.5",
)  # fmt: skip


def shell() -> dict[str, Any]:
    """Return the overhead of the sweep from the shell, new and repeated, both ways."""
    measurements: dict[str, Any] = {}
    for name, server in (("anew", OFF), ("forked", "")):
        os.environ[SERVER] = server
        with tempfile.TemporaryDirectory() as folder:
            os.environ["CONFIDE_HOME"] = str(Path(folder) / "home")
            measurements[name] = {"made": measured(), "found": measured()}
    return _machine() | measurements


def measured() -> dict[str, Any]:
    """Return wall and processor seconds of the sweep, and the overhead of a point."""
    deployment = Deployment.from_environment()
    planned = job_steps(SETTINGS)
    steps = [(*point_and_task(name), spec) for name, spec in planned.items()]
    started: dict[str, float] = {}

    def watch(name: str, progress: StepProgress) -> None:
        started.setdefault(name, time.monotonic())

    made = not any(Path(deployment.home).glob("store/report/*"))
    before, begun = _processor_seconds(), time.monotonic()
    finished = run_job(Job("dp_sweep", "benchmark", "benchmark", steps), deployment, watch)
    assert not finished.exit_code, finished.failed
    ended = time.monotonic()
    step_seconds = {n: result.seconds if made else 0.0 for n, result in finished.results.items()}
    moments = [*started.items(), ("", ended)]
    beyond = sum(
        after - start - step_seconds[name]
        for (name, start), (_, after) in itertools.pairwise(moments)
        if " · " in name
    )
    return {
        "steps": len(steps),
        "wall_seconds": round(ended - begun, 1),
        "processor_seconds": round(_processor_seconds() - before, 1),
        "seconds_inside_the_steps": round(sum(step_seconds.values()), 1),
        "seconds_of_a_point_beyond_its_steps_work": round(beyond / len(SETTINGS.points()), 2),
    }


def _processor_seconds() -> float:
    """Return the processor seconds of ended processes, including the steps of a fork server."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def airflow() -> dict[str, Any]:
    """Return the overhead of the sweep in a separate Airflow, new and repeated."""
    os.environ[SERVER] = ""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CONFIDE_HOME"] = str(Path(folder) / "home")
        deployment = Deployment.from_environment()
        stack = local.start(deployment, local.RUNNERS, print, end_with_us=True)
        try:
            return _machine() | {run: _in_airflow(deployment, stack, run) for run in RUNS}
        finally:
            local.stop(deployment)


def _in_airflow(deployment: Deployment, stack: local.Stack, run: str) -> dict[str, Any]:
    """Return wall seconds and Airflow's processor seconds of the sweep as one run."""
    api, before, begun = stack.api(), _session_seconds(stack), time.monotonic()
    api.trigger("dp_sweep", run, SETTINGS.model_dump(mode="json", exclude_defaults=True))
    while (state := api.run_state("dp_sweep", run)) not in {"success", "failed"}:
        time.sleep(1.0)
    assert state == "success", state
    ended, used = time.monotonic(), _session_seconds(stack)
    tasks = [task for task in api.task_instances("dp_sweep", run) if task["start_date"]]
    points = [task for task in tasks if task["task_id"] in ("pretraining", "measurement")]
    (report,) = (task for task in tasks if task["task_id"] == "report")
    first = min(_moment(task["scheduled_when"]) for task in points)
    results = [
        read_result(deployment.open_store(), spec.output)
        for name, spec in job_steps(SETTINGS).items()
        if point_and_task(name)[0]
    ]
    step_seconds = sum(r.seconds for r in results if r) if run == "made" else 0.0
    beyond = _moment(report["start_date"]) - first - step_seconds
    count = len(SETTINGS.points())
    airflows = {name: used[name] - before[name] for name in used if name != local.FORK_SERVER}
    return {
        "tasks": len(tasks),
        "wall_seconds": round(ended - begun, 1),
        "processor_seconds_of_airflow": {n: round(seconds, 1) for n, seconds in airflows.items()},
        "processor_seconds_of_airflow_a_task": round(sum(airflows.values()) / len(tasks), 2),
        "tasks_of_a_point": len(points) / count,
        "seconds_inside_the_steps_of_points": round(step_seconds, 1),
        "seconds_of_a_point_beyond_its_steps_work": round(beyond / count, 2),
    }


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _session_seconds(stack: local.Stack) -> dict[str, float]:
    """Return the processor seconds of each component's session and its awaited processes.

    Steps have separate sessions.
    """
    names = {process.pid: name for name, process in stack.components.items()}
    seconds = dict.fromkeys(names.values(), 0.0)
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # the process has just ended
            continue
        if name := names.get(int(fields[3])):
            seconds[name] += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _machine() -> dict[str, Any]:
    return {"load": round(os.getloadavg()[0], 1), "processors": os.cpu_count()}


if __name__ == "__main__":
    parts = sys.argv[1:] or ["shell", "airflow"]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results |= {name: {"shell": shell, "airflow": airflow}[name]() for name in parts}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
