"""kill -9 of everything in turn, in the middle of one job: it ends well, the same, and pays once.

As in `test_stack.py`, `docker/ci` brings the stack up; CONFIDE_STACK=faults asks for this too.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
from child_processes import wait_for
from running_stack import DISTURBED, ENDED, LONGEST, TINY, Stack, on_the_stack, step_containers

pytestmark = on_the_stack("faults are NOT tried", asked="faults")
STEP = "the step itself"
# While this task's container runs, that is killed.
FAULTS = {
    "vocabulary": "storage",
    "private_store": "postgres",
    "public_pretraining": "mlflow",
    "dp_pretraining": STEP,
    "nonprivate_pretraining": "scheduler",
}
TRAINS = re.compile(r"\b\d+/\d+\b")  # a training says how far it is
DOWN = 5.0  # seconds
LEASE = 15.0  # seconds in which a step must end when whoever started it is gone


@dataclass(frozen=True)
class Strike:
    """What was killed, when, and which container of the task was at work then."""

    victim: str
    at: datetime
    container: str


def docker(*words: str) -> str:
    return subprocess.run(
        ["docker", *words], capture_output=True, text=True, check=True
    ).stdout.strip()


def at_work(container: str, victim: str) -> bool:
    """Whether the container runs, and a step that is to be killed has begun to train."""
    answer = subprocess.run(["docker", "logs", container], capture_output=True, check=False)
    said = (answer.stdout + answer.stderr).decode()
    return answer.returncode == 0 and (victim != STEP or bool(TRAINS.search(said)))


def strike(stack: Stack, victim: str, container: str) -> Strike:
    at = datetime.now(UTC)
    if victim == STEP:
        docker("kill", "--signal=KILL", container)
        return Strike(victim, at, container)
    stack.compose("kill", "--signal=SIGKILL", victim)
    if victim == "scheduler":
        ended_within(container, LEASE)
    time.sleep(DOWN)
    stack.compose("start", victim)
    return Strike(victim, at, container)


def ended_within(container: str, seconds: float) -> None:
    """Fail unless the container of a worker that is dead ends by itself."""
    running = ("inspect", "--format={{.State.Running}}", container)
    what = "the end of a dead worker's step"
    wait_for(lambda: docker(*running) != "true", seconds, what=what, pause=0.5)


def is_over(stack: Stack, run: str) -> bool:
    with suppress(OSError):  # Airflow's database was killed a moment ago
        return stack.state("dp_bert", run) in ENDED
    return False


@pytest.fixture(scope="module")
def strikes() -> dict[str, Strike]:
    """What was killed during which task; `run` fills it."""
    return {}


@pytest.fixture(scope="module")
def run(stack: Stack, strikes: dict[str, Strike]) -> str:
    """Return a run that succeeded though everything was killed once."""
    DISTURBED.unlink(missing_ok=True)
    run = stack.trigger("dp_bert", TINY)
    until = time.monotonic() + 2 * LONGEST
    while len(strikes) < len(FAULTS) and time.monotonic() < until:
        for task in FAULTS.keys() - strikes.keys():
            for container in step_containers(run, task):
                if at_work(container, FAULTS[task]):
                    strikes[task] = strike(stack, FAULTS[task], container)
        if not step_containers(run) and is_over(stack, run):  # nothing more will be at work
            break
        time.sleep(0.2)
    assert strikes.keys() == FAULTS.keys(), f"never at work: {FAULTS.keys() - strikes.keys()}"
    assert stack.wait("dp_bert", run, 2 * LONGEST) == "success"
    return run


def test_each_was_killed_while_its_task_was_at_work(
    stack: Stack, run: str, strikes: dict[str, Strike]
) -> None:
    for task, one in strikes.items():
        tries = stack.tries("dp_bert", run, task)
        assert tries[0][0] < one.at < tries[-1][1], (task, one, tries)
    # Who was killed has been started anew.
    for victim in set(FAULTS.values()) - {STEP}:
        container = stack.compose("ps", "--quiet", victim).strip()
        began = docker("inspect", "--format={{.State.StartedAt}}", container)
        (at,) = (one.at for one in strikes.values() if one.victim == victim)
        assert datetime.fromisoformat(began[:19] + "+00:00") > at.replace(microsecond=0), victim


def test_killed_steps_were_tried_again(stack: Stack, run: str) -> None:
    tries = {name: task["try_number"] for name, task in stack.tasks("dp_bert", run).items()}
    assert tries["dp_pretraining"] == 2
    assert tries["nonprivate_pretraining"] >= 2


def test_each_release_was_paid_for_once(stack: Stack, run: str) -> None:
    query = f"select spec_hash, state, event from entries where run = 'dp_bert/{run}'"  # noqa: S608 - our own run's name
    entries = stack.ledger(query)
    assert len({spec for spec, _, _ in entries}) == len(entries)
    assert {state for _, state, _ in entries} == {"settled"}
    # The third is no payment: it says that the operator trained without privacy.
    kinds = sorted(json.loads(event)["kind"] for _, _, event in entries)
    assert kinds == ["noised_weights", "poisson_gaussian", "unaccounted"]


def test_no_metric_was_lost_or_doubled(stack: Stack, run: str) -> None:
    runs = stack.tracked(run)
    assert {r["info"]["status"] for r in runs} == {"FINISHED"}
    names = Counter(r["info"]["run_name"] for r in runs)
    assert max(names.values()) == 1, names
    arrived = stack.points(runs)
    results = stack.left("result.json", stack.outputs("dp_bert", run))
    for task, result in results.items():
        expected = {(m["name"], m["step"]): m["value"] for m in result["metrics"]}
        found = {(key, step): value for key, step, value in arrived[task]}
        assert len(arrived[task]) == len(found), f"{task}: doubled"
        assert found == pytest.approx(expected), task


def test_nothing_was_left_running(run: str) -> None:
    assert step_containers(run) == []


def test_its_results_are_taken_away(stack: Stack, run: str) -> None:
    """`test_stack.py` compares: the same job is made again, from the same secret seeds."""
    left = {
        "checksums": stack.left("checksums.json", stack.outputs("dp_bert", run)),
        "paid": stack.ledger("select * from entries order by 1"),
    }
    DISTURBED.parent.mkdir(exist_ok=True)
    DISTURBED.write_text(json.dumps(left))
    assert left["checksums"].keys() >= FAULTS.keys()
    stack.empty_store()
