"""Steps as containers: their options, their outcomes, and their removal.

The last part needs a Docker engine and the task image (`docker compose build prepare`). Without
them its tests are skipped with the reason.
"""

import gc
import io
import os
import random
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from child_processes import wait_for
from docker.errors import DockerException
from launcher_conformance import (
    DATA,
    JOB,
    SEEDS,
    IsolatedLauncherConformance,
    Outcome,
    context_of,
    plan,
    work,
)

import docker
from dags.launcher import docker_step as launcher
from dags.launcher.docker_step import RUN, DockerStep, for_every_step, gpus, mounts, whole_lines
from dags.launcher.step_operator import StepOperator
from tasks.protocol.specs import Need
from tasks.protocol.step_process import Work

MOUNTS = "CONFIDE_DOCKER_MOUNTS"
IMAGE = os.environ.get("CONFIDE_TASK_IMAGE") or "confide-task:local"
RUN_ID = os.environ.get("DOCKER_TESTS_RUN") or f"tests-{os.getpid()}"
# Replaces the steps: prints that it started, then exits with code FAKE_EXIT, or waits.
FAKE_TASKS = """
import json, os, sys, time
print("started", json.loads(os.environ["CONFIDE_RUN_CONTEXT"])["task"], sys.argv[1], flush=True)
sys.stdout.write('{"version": 1, "kind": "tracked_at", "url": "https://mlflow.')
sys.stdout.flush()
time.sleep(0.3)  # so that the engine sends what is there
print("a line of the log", file=sys.stderr, flush=True)
time.sleep(0.3)
print('example/#/runs/1"}', flush=True)
if os.environ.get("FAKE_SPEC"):
    print(len(open(sys.argv[3]).read()))
if os.environ.get("FAKE_EXIT") == "wait":
    from tasks.execution.contract import end_with_launcher
    end_with_launcher()
    time.sleep(120)
print('{"version": 1, "kind": "failed", "exit_code": 1, "reason": "the last line"}', flush=True)
sys.exit(int(os.environ.get("FAKE_EXIT") or 0))
"""


def context() -> Any:
    return context_of(run_id=RUN_ID)


class Engine:
    """A fake engine with the calls that the launcher makes; its containers end as specified."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes, self.asked, self.removed = outcomes, [], []
        self.code, self.killed_for_memory = 0, False

    def images(self, **_: Any) -> list[str]:
        return ["the image"]

    def containers(self, **_: Any) -> list[Any]:
        return []

    def create_host_config(self, **options: Any) -> dict[str, Any]:
        return options

    def create_container(self, **options: Any) -> dict[str, str]:
        self.asked.append(options)
        return {"Id": "x"}

    def attach_socket(self, *_: Any, **__: Any) -> io.BytesIO:
        return io.BytesIO()

    def attach(self, *_: Any, **__: Any) -> Iterator[tuple[bytes | None, bytes | None]]:
        self.code, messages = self.outcomes.pop(0)
        for message in messages:
            line = message.model_dump_json().encode() + b"\n"
            yield line[:9], b"confide: not a mess"
            yield line[9:], b"age\n"
        yield None, b'{"version": 1, "kind": "failed", "exit_code": 1, "reason": "on stderr"}\n'

    def start(self, _: str) -> None: ...

    def stop(self, *_: Any, **__: Any) -> None: ...

    def wait(self, _: str) -> dict[str, int]:
        return {"StatusCode": self.code}

    def inspect_container(self, _: str) -> dict[str, Any]:
        return {"State": {"OOMKilled": self.killed_for_memory}}

    def remove_container(self, identifier: str, **_: Any) -> None:
        self.removed.append(identifier)


class TestDocker(IsolatedLauncherConformance):
    def operator(self, **options: Any) -> StepOperator:
        return DockerStep(task_id="vocabulary", plan=plan, **options)

    def started(self, of: Work, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        engine = Engine([(0, [])])
        monkeypatch.setattr(DockerStep, "cli", engine)
        self.operator().run_step(of, -1)
        (options,) = engine.asked
        return dict(options)

    def asked(self, of: Work, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, str]]:
        options = self.started(of, monkeypatch)
        return options["command"], options["environment"]

    grants = frozenset({Need.CHARGING, Need.CLUSTER, Need.SOURCES})

    def granted(self, of: Work, monkeypatch: pytest.MonkeyPatch) -> set[Need]:
        options = self.started(of, monkeypatch)["host_config"]
        mounted = {mount["Source"]: mount["ReadOnly"] for mount in options["mounts"]}
        assert mounted.pop("confide_keys") and not mounted.pop("home")
        kinds = {SEEDS: Need.CHARGING, DATA: Need.SOURCES, "cluster": Need.CLUSTER}
        # Only seeds are writable, even without `:ro` in the settings.
        assert mounted == {source: source != SEEDS for source in mounted}
        assert bool(options["shm_size"]) == ("cluster" in mounted)
        return {kinds[source] for source in mounted}

    def run(
        self, operator: StepOperator, outcomes: list[Outcome], monkeypatch: pytest.MonkeyPatch
    ) -> dict[str, Any]:
        engine, expected = Engine(outcomes), len(outcomes)
        monkeypatch.setattr(DockerStep, "cli", engine)
        try:
            return operator.execute(context())
        finally:
            assert len(engine.removed) == expected  # no container outlives the task

    def test_a_container_has_no_rights_and_a_lease(self, monkeypatch):
        monkeypatch.setenv("FAKE_MORE", "1")
        monkeypatch.setenv("CONFIDE_FORWARDED_ENVIRONMENT", "FAKE_MORE")
        options = self.started(work(JOB["vocabulary"]), monkeypatch)
        assert options["environment"]["FAKE_MORE"] == "1"
        assert options["environment"]["CONFIDE_LEASE"] == "stdin"
        assert options["stdin_open"] is True
        assert options["host_config"]["cap_drop"] == ["ALL"]
        assert options["host_config"]["init"] is True

    def test_a_container_that_was_too_large_says_so(self, monkeypatch):
        engine = Engine([(137, [])])
        engine.killed_for_memory = True
        monkeypatch.setattr(DockerStep, "cli", engine)
        with pytest.raises(AirflowException, match="out of memory"):
            self.operator().execute(context())

    def test_no_container_has_the_ledger_s_password_for_want_of_a_reader(self, monkeypatch):
        monkeypatch.delenv("CONFIDE_LEDGER_READER")
        with pytest.raises(AirflowFailException, match="CONFIDE_LEDGER_READER is not"):
            self.started(work(JOB["private_corpus"]), monkeypatch)
        self.started(work(JOB["vocabulary"]), monkeypatch)  # this step charges


# --- variables of the deployment


def test_mounts_are_volumes_and_folders(monkeypatch):
    monkeypatch.setenv(MOUNTS, " home:/var/lib/confide  /srv/notes:/data:ro ")
    volume, folder = mounts(MOUNTS)
    home = {"Type": "volume", "Source": "home", "Target": "/var/lib/confide"}
    assert volume.items() >= home.items()
    assert (folder["Type"], folder["Source"], folder["ReadOnly"]) == ("bind", "/srv/notes", True)
    monkeypatch.delenv(MOUNTS)
    assert mounts(MOUNTS) == []


@pytest.mark.cases
def test_invalid_mounts_and_seeds_for_every_step_are_refused(monkeypatch, word, reason):
    monkeypatch.setenv(MOUNTS, f"home:/var/lib/confide {word}")
    with pytest.raises(ValueError, match=reason):
        for_every_step(MOUNTS)


@pytest.mark.parametrize(("word", "count"), [("all", -1), ("2", 2)])
def test_container_requests_the_configured_gpus(word, count):
    assert gpus("") is None
    assert [request["Count"] for request in gpus(word) or []] == [count]


# --- lines of the output


@pytest.mark.cases
def test_output_is_read_line_by_line(output, lines):
    assert list(whole_lines([(output.encode("latin-1"), None)])) == [(True, line) for line in lines]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_no_cut_and_no_mixture_changes_a_line(size, seed):
    chance = random.Random(seed)
    lines: dict[bool, list[str]] = {
        True: ["gs://bucket/result.json", "naïve — 数", "x" * 90],
        False: ["a line of the log", "€", "12/20"],
    }
    waiting = {
        stream: "".join(f"{line}\n" for line in said).encode() for stream, said in lines.items()
    }
    pieces: list[tuple[bytes | None, bytes | None]] = []
    while left := [stream for stream in waiting if waiting[stream]]:
        stream, cut = chance.choice(left), chance.randint(1, size)
        piece, waiting[stream] = waiting[stream][:cut], waiting[stream][cut:]
        pieces.append((piece, None) if stream else (None, piece))
    said = list(whole_lines(pieces))
    assert {stream: [line for s, line in said if s == stream] for stream in lines} == lines


# --- tests with an engine


@pytest.fixture(autouse=True)
def _sockets(request: pytest.FixtureRequest) -> Iterator[None]:
    """Garbage-collect attached sockets, which the client leaves open until its process ends."""
    yield
    if "engine" in request.fixturenames:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def _client() -> Any | None:
    try:
        client = docker.from_env()
        client.ping()
    except DockerException:
        return None
    return client


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    client = _client()
    if client is None:
        # Outside of `except`, because the skip would keep the failed client's socket alive.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
        pytest.skip("SKIPPED: no Docker engine answers here; the docker launcher is not tried")
    if not client.images.list(IMAGE):
        client.close()
        pytest.skip(f"SKIPPED: no image {IMAGE}: build it with `docker compose build prepare`")
    yield client
    for left in containers(client):
        left.remove(force=True)
    client.close()


def containers(client: Any) -> list[Any]:
    labels = {"label": f"{RUN}=dp_bert/{RUN_ID}"}
    matches: list[Any] = client.containers.list(all=True, filters=labels)
    return matches


@pytest.fixture
def fake(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DockerStep]:
    """Return a function that creates steps whose containers run FAKE_TASKS."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "__main__.py").write_text(FAKE_TASKS)
    for path in (*tmp_path.parents, tmp_path, folder):
        if path.is_relative_to(tmp_path.parents[1]):
            path.chmod(0o755)  # the image's user needs access
    monkeypatch.setenv("CONFIDE_TASK_IMAGE", IMAGE)
    main = "tasks/__main__.py"  # only this file: the lease is in the same package of the image
    monkeypatch.setenv("CONFIDE_DOCKER_MOUNTS", f"{tmp_path / main}:/opt/confide/{main}:ro")
    monkeypatch.setenv("CONFIDE_FORWARDED_ENVIRONMENT", "FAKE_EXIT FAKE_SPEC")

    def make(exit_code: str = "0", **options: Any) -> DockerStep:
        monkeypatch.setenv("FAKE_EXIT", exit_code)
        return DockerStep(task_id="vocabulary", plan=plan, **options)

    return make


@pytest.mark.parametrize("longest", [launcher.LONGEST_ARGUMENT, 10])
def test_a_finished_step_answers_and_leaves_nothing(engine, fake, monkeypatch, capsys, longest):
    """A spec that is too long for an argument travels as a file."""
    monkeypatch.setattr(launcher, "LONGEST_ARGUMENT", longest)
    if longest == 10:
        monkeypatch.setenv("FAKE_SPEC", "1")
    step = fake()
    answer = step.execute(context())
    assert answer["outputs"][0].startswith("store://vocabulary/")
    assert step.tracked_at == "https://mlflow.example/#/runs/1"
    assert containers(engine) == []
    length = len(plan({}, None)["vocabulary"].model_dump_json())
    in_log = re.search(rf"\] {length} ", capsys.readouterr().out)  # Airflow's log of the task
    assert bool(in_log) == (longest == 10)


def test_a_failed_step_says_why_and_leaves_nothing(engine, fake):
    with pytest.raises(AirflowFailException, match=r"^the last line \(exit code 2"):
        fake("2").execute(context())
    step = fake()
    step.image = "confide-there-is-none:local"
    with pytest.raises(AirflowException, match="no image confide-there-is-none:local"):
        step.execute(context())
    assert containers(engine) == []


WORKER = f"""
import sys
sys.path[:0] = {[str(folder) for folder in list(Path(__file__).parents)[:3]]!r}
from test_docker_launcher import context, plan
from dags.launcher.docker_step import (DockerStep)
step = DockerStep(task_id="vocabulary", plan=plan)
if sys.argv[1] == "kill":
    import signal
    signal.signal(signal.SIGTERM, lambda *_: (step.on_kill(), sys.exit(9)))
step.execute(context())
"""


def worker(engine: Any, way: str) -> subprocess.Popen[bytes]:
    """Start a worker process with a waiting step; return it once the container runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, way],
        env={**os.environ, "FAKE_EXIT": "wait", "DOCKER_TESTS_RUN": RUN_ID},
        stdout=subprocess.DEVNULL,
    )

    def started() -> bool:
        assert process.poll() is None, f"the worker ended with {process.returncode}"
        return any(b"started" in container.logs() for container in containers(engine))

    wait_for(started, 60)
    return process


def test_a_worker_killed_without_a_word_leaves_nothing_running(engine, fake):
    fake()  # sets the environment that the worker inherits
    process = worker(engine, "die")
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: all(container.status == "exited" for container in containers(engine)))
    (left,) = containers(engine)
    of_compose = {n: v for n, v in left.labels.items() if n.startswith("com.docker.compose.pro")}
    assert set(of_compose.values()) <= {""}  # Compose does not manage containers of steps
    assert b"the launcher of this step has ended" in left.logs()
    # The next try removes the exited container.
    fake().execute(context())
    assert containers(engine) == []


def test_a_cancelled_task_removes_its_container(engine, fake):
    fake()
    process = worker(engine, "kill")
    process.terminate()
    assert process.wait(30) == 9
    assert containers(engine) == []
