"""Steps as containers: asked for rightly, answered for rightly, and never left running.

The second half needs a Docker engine and the task image (`docker compose build prepare`), and
says so where it is skipped.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException
from docker.errors import DockerException

import docker
from dags.launcher import docker as launcher
from dags.launcher.docker import RUN, DockerStep
from tasks.protocol import JobSettings, dp_bert_steps

IMAGE = os.environ.get("CONFIDE_TASK_IMAGE") or "confide-task:local"
RUN_ID = os.environ.get("DOCKER_TESTS_RUN") or f"tests-{os.getpid()}"
# Stands in for the steps: says that it started, then ends as FAKE_EXIT tells it, or waits.
FAKE_TASKS = """
import json, os, pathlib, sys, time
print("started", json.loads(os.environ["CONFIDE_RUN_CONTEXT"])["task"], sys.argv[1], flush=True)
sys.stderr.write("MLflow: https://mlflow.example/#/runs/1")
sys.stderr.flush()
time.sleep(0.3)  # so that the engine sends what is there
print("gs://bucket/result.json", flush=True)
time.sleep(0.3)
sys.stderr.write("\\n")
if os.environ.get("FAKE_SPEC"):
    print(len(open(sys.argv[3]).read()))
if os.environ.get("FAKE_EXIT") == "wait":
    time.sleep(120)
sys.stderr.write("confide: the last line\\n")
if os.environ.get("FAKE_EXIT") == "time is up":
    tries = pathlib.Path("/var/lib/tries", os.environ["HOSTNAME"])
    tries.touch()
    sys.exit(75 if len(list(tries.parent.iterdir())) < 3 else 0)
sys.exit(int(os.environ.get("FAKE_EXIT") or 0))
"""


def plan(params: Any, root: str, point: Any) -> dict[str, Any]:
    return dict(dp_bert_steps(JobSettings(), "gs://bucket/store"))


def context() -> dict[str, Any]:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    run = SimpleNamespace(dag_id="dp_bert", run_id=RUN_ID, start_date=now, run_after=now)
    return {"params": {}, "dag_run": run, "ti": SimpleNamespace(map_index=-1, try_number=1)}


def test_a_step_gets_what_it_needs_and_nothing_of_airflow_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CONFIDE_LEDGER", "postgresql://ledger")
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "a key")
    monkeypatch.setenv("FAKE_MORE", "1")
    monkeypatch.setenv("CONFIDE_HANDED_ON", "FAKE_MORE")
    asked: list[dict[str, Any]] = []

    def create(**options: Any) -> dict[str, str]:
        asked.append(options)
        return {"Id": "x"}

    client = SimpleNamespace(create_container=create, create_host_config=lambda **options: options)
    monkeypatch.setattr(DockerStep, "cli", client)
    step = DockerStep(task_id="vocabulary", plan=plan)
    step._create(launcher.work_of("vocabulary", plan, context(), None))
    (options,) = asked
    assert options["environment"].keys() >= {"CONFIDE_LEDGER", "FAKE_MORE", "CONFIDE_RUN_CONTEXT"}
    assert options["environment"]["CONFIDE_LEASE"] == "stdin"
    assert not [name for name in options["environment"] if name.startswith("AIRFLOW")]
    assert options["command"][:4] == ["-m", "tasks", "vocabulary", "--spec"]
    assert options["host_config"]["cap_drop"] == ["ALL"]
    assert options["stdin_open"] is True


# --- with an engine


@pytest.fixture(autouse=True)
def _sockets() -> Iterator[None]:
    """The client of the engine leaves attached sockets to the collector; tasks end with them."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def _client() -> Any | None:
    """Return a client of the engine, or None where none answers."""
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
        # Not from within `except`: the skip would keep the failed client's socket to the end.
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
    found: list[Any] = client.containers.list(all=True, filters=labels)
    return found


@pytest.fixture
def fake(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DockerStep]:
    """Return a maker of steps whose containers run FAKE_TASKS."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "__main__.py").write_text(FAKE_TASKS)
    for path in (*tmp_path.parents, tmp_path, folder):
        if path.is_relative_to(tmp_path.parents[1]):
            path.chmod(0o755)  # the image's user must get through
    monkeypatch.setenv("CONFIDE_TASK_IMAGE", IMAGE)
    monkeypatch.setenv("CONFIDE_DOCKER_MOUNTS", f"{folder}:/opt/confide/tasks:ro")
    monkeypatch.setenv("CONFIDE_HANDED_ON", "FAKE_EXIT FAKE_SPEC")

    def make(exit_code: str = "0", **options: Any) -> DockerStep:
        monkeypatch.setenv("FAKE_EXIT", exit_code)
        return DockerStep(task_id="vocabulary", plan=plan, **options)

    return make


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    for _ in range(int(seconds * 10)):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail(f"still not so after {seconds} s")


def test_a_finished_step_answers_and_leaves_nothing(
    engine: Any, fake: Callable[..., DockerStep]
) -> None:
    step = fake()
    answer = step.execute(context())
    assert answer["output"].startswith("gs://bucket/store/vocabulary/")
    assert step.tracked_at == "https://mlflow.example/#/runs/1"
    assert containers(engine) == []


@pytest.mark.parametrize(
    ("exit_code", "never_again"), [("2", True), ("3", True), ("1", False), ("143", False)]
)
def test_exit_codes(
    engine: Any, fake: Callable[..., DockerStep], exit_code: str, never_again: bool
) -> None:
    with pytest.raises(AirflowException, match="the last line") as raised:
        fake(exit_code).execute(context())
    assert isinstance(raised.value, AirflowFailException) is never_again
    assert containers(engine) == []


def test_a_step_whose_time_is_up_is_started_again_until_it_is_done(
    engine: Any,
    fake: Callable[..., DockerStep],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    kept.chmod(0o777)
    given = os.environ["CONFIDE_DOCKER_MOUNTS"]
    monkeypatch.setenv("CONFIDE_DOCKER_MOUNTS", f"{given} {kept}:/var/lib/tries")
    answer = fake("time is up").execute(context())
    assert answer["output"].startswith("gs://bucket/store/vocabulary/")
    assert len(list(kept.iterdir())) == 3  # containers, one after the other, in one try
    assert containers(engine) == []


def test_a_spec_too_long_for_an_argument_travels_as_a_file(
    engine: Any,
    fake: Callable[..., DockerStep],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launcher, "LONGEST_ARGUMENT", 10)
    monkeypatch.setenv("FAKE_SPEC", "1")
    step = fake()
    step.execute(context())
    length = len(plan({}, "", None)["vocabulary"].model_dump_json())
    assert re.search(rf"\] {length} ", capsys.readouterr().out)  # Airflow's own log of the task


def test_a_step_past_its_time_is_ended(engine: Any, fake: Callable[..., DockerStep]) -> None:
    step = fake("wait", execution_timeout=timedelta(seconds=2))
    with pytest.raises(AirflowException, match="not done after 2 s"):
        step.execute(context())
    assert containers(engine) == []


def test_compose_does_not_take_a_step_for_a_service_of_its_own(
    engine: Any, fake: Callable[..., DockerStep]
) -> None:
    fake()
    process = worker(engine, "die")
    try:
        (one,) = containers(engine)
        of_compose = {n: v for n, v in one.labels.items() if n.startswith("com.docker.compose.pro")}
        assert set(of_compose.values()) <= {""}
    finally:
        process.kill()
        process.wait()
        one.remove(force=True)


def test_a_missing_image_is_said_in_words(
    engine: Any, fake: Callable[..., DockerStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = fake()
    step.image = "confide-there-is-none:local"
    with pytest.raises(AirflowException, match="no image confide-there-is-none:local"):
        step.execute(context())


WORKER = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[2])!r}]
from test_docker_launcher import context, plan
from dags.launcher.docker import (DockerStep)
step = DockerStep(task_id="vocabulary", plan=plan)
if sys.argv[1] == "kill":
    import signal
    signal.signal(signal.SIGTERM, lambda *_: (step.on_kill(), sys.exit(9)))
step.execute(context())
"""


def worker(engine: Any, way: str) -> subprocess.Popen[bytes]:
    """Start a worker process with a step that waits; return when its container runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, way],
        env={**os.environ, "FAKE_EXIT": "wait", "DOCKER_TESTS_RUN": RUN_ID},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(lambda: any(b"started" in one.logs() for one in containers(engine)), 60)
    return process


def test_a_worker_killed_without_a_word_leaves_nothing_running(
    engine: Any, fake: Callable[..., DockerStep]
) -> None:
    fake()  # sets the environment that the worker inherits
    process = worker(engine, "die")
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: all(one.status == "exited" for one in containers(engine)))
    (left,) = containers(engine)
    assert b"whoever started this step is gone" in left.logs()
    # ... and the next try clears away even that.
    fake().execute(context())
    assert containers(engine) == []


def test_a_cancelled_task_removes_its_container(
    engine: Any, fake: Callable[..., DockerStep]
) -> None:
    fake()
    process = worker(engine, "kill")
    process.terminate()
    assert process.wait(30) == 9
    assert containers(engine) == []
