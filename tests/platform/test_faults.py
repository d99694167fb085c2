"""kill -9 of everything in turn, in the middle of one job: it ends well, and pays once.

As in `test_stack.py`, `docker/ci` brings the stack up; CONFIDE_STACK=faults asks for this too.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter

import pytest
from running_stack import Stack
from test_stack import LONGEST, SMALL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("CONFIDE_STACK") != "faults",
        reason="SKIPPED, faults are NOT tried: CONFIDE_STACK is not `faults` (docker/ci sets it)",
    ),
]
STEP = "the step itself"
# While this task runs, that is killed.
FAULTS = {
    "vocabulary": "storage",
    "private_store": "postgres",
    "public_pretraining": "mlflow",
    "dp_pretraining": STEP,
    "nonprivate_pretraining": "scheduler",
}


def step_container(run: str, task: str) -> str:
    label = [f"--filter=label=confide.run=dp_bert/{run}", f"--filter=label=confide.task={task}.-1"]
    words = ["docker", "ps", "--quiet", *label]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def kill(stack: Stack, victim: str, container: str) -> None:
    if victim == STEP:
        subprocess.run(["docker", "kill", "--signal=KILL", container], check=True)
        return
    stack.compose("kill", "--signal=SIGKILL", victim)
    time.sleep(5)
    stack.compose("start", victim)


@pytest.fixture(scope="module")
def stack() -> Stack:
    return Stack()


@pytest.fixture(scope="module")
def run(stack: Stack) -> str:
    """Return a run that succeeded though everything was killed once."""
    run = stack.trigger("dp_bert", {**SMALL, "seed": int(time.time()) % 1_000_000})
    left, until = dict(FAULTS), time.monotonic() + 3 * LONGEST
    while left and time.monotonic() < until:
        for task in list(left):
            if container := step_container(run, task):
                kill(stack, left.pop(task), container)
        time.sleep(0.5)
    assert not left, f"never seen running: {left}"
    assert stack.wait("dp_bert", run, 3 * LONGEST) == "success"
    return run


def test_killed_steps_were_tried_again(stack: Stack, run: str) -> None:
    tries = {name: task["try_number"] for name, task in stack.tasks("dp_bert", run).items()}
    assert tries["dp_pretraining"] == 2
    assert tries["nonprivate_pretraining"] >= 2


def test_each_release_was_paid_for_once(stack: Stack, run: str) -> None:
    query = f"select spec_hash, state from entries where run = 'dp_bert/{run}'"  # noqa: S608 - our own run's name
    entries = stack.ledger(query)
    assert len({spec for spec, _ in entries}) == len(entries) == 2
    assert {state for _, state in entries} == {"settled"}


def test_no_metric_was_lost_or_doubled(stack: Stack, run: str) -> None:
    runs = stack.tracked(run)
    assert {r["info"]["status"] for r in runs} == {"FINISHED"}
    names = Counter(r["info"]["run_name"] for r in runs)
    assert max(names.values()) == 1, names
    counted = 0
    for one in runs:
        for metric in one["data"].get("metrics", []):
            path = f"/metrics/get-history?run_id={one['info']['run_id']}&metric_key={metric['key']}"
            steps = [m.get("step", 0) for m in stack.mlflow_api(path)["metrics"]]
            assert len(steps) == len(set(steps)), (one["info"]["run_name"], metric["key"], steps)
            counted += len(steps)
    assert counted > 10


def test_nothing_was_left_running(run: str) -> None:
    words = ["docker", "ps", "--all", "--quiet", "--filter", f"label=confide.run=dp_bert/{run}"]
    assert subprocess.run(words, capture_output=True, check=True).stdout == b""
