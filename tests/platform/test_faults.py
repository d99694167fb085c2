"""Every component is killed once during a job, whose results and charges stay the same.

As for `test_stack.py`, `docker/ci` starts the stack; CONFIDE_STACK=faults selects this file too.
"""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
import running_stack
from child_processes import wait_for

pytestmark = running_stack.on_the_stack("faults are NOT tried", required="faults")
STEP = "the step itself"
# Each component is killed while the container of this task runs.
FAULTS = {
    "vocabulary": "storage",
    "private_store": "postgres",
    "public_pretraining": "mlflow",
    "pretraining · With DP": STEP,
    "pretraining · Without privacy": "scheduler",
}
MAPPED = {  # id and map index of each task instance in a mapped group
    "public_pretraining": "start.0",
    "pretraining · With DP": "pretraining.0",
    "pretraining · Without privacy": "pretraining.1",
}
TRAINS = re.compile(r"\b\d+/\d+\b")  # a training prints its progress
DOWN = 5.0  # seconds
LEASE = 15.0  # seconds in which a step must end after the death of its worker


@dataclass(frozen=True)
class Strike:
    """A kill: the component, the time, and the container of the task that was running."""

    victim: str
    at: datetime
    container: str


def docker(*words: str) -> str:
    return subprocess.run(
        ["docker", *words], capture_output=True, text=True, check=True
    ).stdout.strip()


def is_working(container: str, victim: str) -> bool:
    """Return whether the container runs, and a step that is to be killed has begun to train."""
    answer = subprocess.run(["docker", "logs", container], capture_output=True, check=False)
    log = (answer.stdout + answer.stderr).decode()
    return answer.returncode == 0 and (victim != STEP or bool(TRAINS.search(log)))


def strike(stack: running_stack.Stack, victim: str, container: str) -> Strike:
    moment = datetime.now(UTC)
    if victim == STEP:
        docker("kill", "--signal=KILL", container)
        return Strike(victim, moment, container)
    stack.compose("kill", "--signal=SIGKILL", victim)
    if victim == "scheduler":
        ended_within(container, LEASE)
    time.sleep(DOWN)
    stack.compose("start", victim)
    return Strike(victim, moment, container)


def ended_within(container: str, seconds: float) -> None:
    """Fail unless the container of a dead worker ends without intervention."""
    running = ("inspect", "--format={{.State.Running}}", container)
    what = "the end of a dead worker's step"
    wait_for(lambda: docker(*running) != "true", seconds, what=what, pause=0.5)


def is_over(stack: running_stack.Stack, run: str) -> bool:
    with suppress(OSError):  # Airflow's database was killed a moment ago
        return stack.state("dp_bert", run) in running_stack.ENDED
    return False


@pytest.fixture(scope="module")
def strikes() -> dict[str, Strike]:
    """The kills by task; the fixture `run` fills the dictionary."""
    return {}


@pytest.fixture(scope="module")
def run(stack: running_stack.Stack, strikes: dict[str, Strike]) -> str:
    """Return a successful run during which every component was killed once."""
    running_stack.DISTURBED.unlink(missing_ok=True)
    run = stack.trigger("dp_bert", running_stack.TINY)
    until = time.monotonic() + 2 * running_stack.LONGEST
    while len(strikes) < len(FAULTS) and time.monotonic() < until:
        for task in FAULTS.keys() - strikes.keys():
            for container in running_stack.step_containers(run, MAPPED.get(task, f"{task}.-1")):
                if is_working(container, FAULTS[task]):
                    strikes[task] = strike(stack, FAULTS[task], container)
        if not running_stack.step_containers(run) and is_over(
            stack, run
        ):  # no further container will start
            break
        time.sleep(0.2)
    assert strikes.keys() == FAULTS.keys(), f"never at work: {FAULTS.keys() - strikes.keys()}"
    assert stack.wait("dp_bert", run, 2 * running_stack.LONGEST) == "success"
    return run


def test_each_component_was_killed_while_its_task_ran(stack, run, strikes):
    for task, kill in strikes.items():
        tries = stack.tries("dp_bert", run, task)
        assert tries[0][0] < kill.at < tries[-1][1], (task, kill, tries)
    # The killed component has been restarted.
    for victim in set(FAULTS.values()) - {STEP}:
        container = stack.compose("ps", "--quiet", victim).strip()
        began = docker("inspect", "--format={{.State.StartedAt}}", container)
        (moment,) = (kill.at for kill in strikes.values() if kill.victim == victim)
        assert datetime.fromisoformat(began[:19] + "+00:00") > moment.replace(microsecond=0), victim


def test_killed_steps_were_retried(stack, run, strikes):
    tries = {name: task["try_number"] for name, task in stack.tasks("dp_bert", run).items()}
    assert tries["pretraining · With DP"] == 2 <= tries["pretraining · Without privacy"]
    again = stack.tries("dp_bert", run, "pretraining · Without privacy")[1][0]
    assert again - strikes["pretraining · Without privacy"].at < timedelta(minutes=4)


def test_each_release_was_charged_once(stack, run):
    query = f"select spec_hash, state, event from entries where run = 'dp_bert/{run}'"  # noqa: S608 - our own run's name
    entries = stack.ledger(query)
    assert len({spec for spec, _, _ in entries}) == len(entries)
    assert {state for _, state, _ in entries} == {"settled"}
    # The third entry is no charge: it lists the training without privacy.
    kinds = sorted(json.loads(event)["kind"] for _, _, event in entries)
    assert kinds == ["noised_weights", "poisson_gaussian", "unaccounted"]


def test_no_metric_was_lost_or_duplicated(stack, run):
    runs = stack.tracked(run)
    assert {r["info"]["status"] for r in runs} == {"FINISHED"}
    names = Counter(map(running_stack.tracked_name, runs))
    assert max(names.values()) == 1, names
    arrived = stack.points(runs)
    results = stack.left("result.json", stack.outputs("dp_bert", run))
    for task, result in results.items():
        # MLflow has an infinite ε as a tag in words.
        finite = [m for m in result["metrics"] if m["value"] != sys.float_info.max]
        expected = {(m["name"], m["step"]): m["value"] for m in finite}
        values = {(key, step): value for key, step, value in arrived[task]}
        assert len(arrived[task]) == len(values), f"{task}: doubled"
        assert values == pytest.approx(expected), task


def test_no_container_was_left_running(run):
    assert running_stack.step_containers(run) == []


def test_results_are_recorded_and_deleted(stack, run):
    """`test_stack.py` compares the results of the same job with the same secret seeds."""
    left = {
        "checksums": stack.left("checksums.json", stack.outputs("dp_bert", run)),
        "paid": stack.ledger("select * from entries order by 1"),
    }
    running_stack.DISTURBED.parent.mkdir(exist_ok=True)
    running_stack.DISTURBED.write_text(json.dumps(left))
    assert left["checksums"].keys() >= FAULTS.keys()
    stack.empty_store()
