import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException
from child_processes import alive, wait_for
from launcher_conformance import LauncherConformance, Outcome, context_of, plan

from dags.dp_sweep import PLAN
from dags.launcher.step_operator import ProcessStep, StepOperator, work_of
from tasks.protocol import fork_server, supervisor
from tasks.protocol.job import job_steps
from tasks.protocol.messages import channel_file
from tasks.protocol.step_classes import spec_from_json
from tasks.protocol.step_process import LONGEST_ARGUMENT, Work
from tasks.protocol.sweep import SweepSettings

PRIVATE = {"private_format": "jsonl", "private_path": "/private", "private_dataset": "notes"}
CHECKOUT = Path(__file__).resolve().parents[2]
# Takes the next outcome from a file, sends its messages, and exits with its code.
SCRIPTED = """
import json, os, pathlib, sys
file = pathlib.Path(os.environ["SCRIPT"])
(code, messages), *left = json.loads(file.read_text())
file.write_text(json.dumps(left))
pathlib.Path(os.environ["CONFIDE_MESSAGES"]).write_text("".join(f"{m}\\n" for m in messages))
print("confide: not a message", "MLflow: http://elsewhere/")
sys.exit(code)
"""


def interpreter(folder: Path, script: str) -> str:
    """Write a program that replaces the task environment's Python; return its path."""
    file = folder / "interpreter"
    file.write_text(script)
    file.chmod(0o755)
    return str(file)


class TestProcess(LauncherConformance):
    def operator(self, **options: Any) -> StepOperator:
        return ProcessStep(task_id="vocabulary", plan=plan, **options)

    def asked(self, of: Work, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, str]]:
        started: list[tuple[list[str], dict[str, str]]] = []

        def start(command: list[str], environment: dict[str, str], *_: Any) -> None:
            started.append((command[1:], environment))
            raise InterruptedError

        monkeypatch.setattr(supervisor, "start", start)
        with pytest.raises(InterruptedError):
            self.operator().run_step(of, -1)
        ((words, variables),) = started
        channel = Path(variables["CONFIDE_MESSAGES"])  # a run's name cannot lead to another folder
        assert channel.resolve().parent.parent == Path(os.environ["CONFIDE_HOME"]) / "messages"
        assert re.fullmatch(r"[\w.+-]+", channel.parent.name)
        return words, variables

    def run(
        self, operator: StepOperator, outcomes: list[Outcome], monkeypatch: pytest.MonkeyPatch
    ) -> dict[str, Any]:
        home = Path(os.environ["CONFIDE_HOME"])
        home.mkdir(exist_ok=True)
        script = home / "script.json"
        script.write_text(
            json.dumps([(c, [m.model_dump_json() for m in ms]) for c, ms in outcomes])
        )
        (home / "scripted.py").write_text(SCRIPTED)
        monkeypatch.setenv("SCRIPT", str(script))
        shell = f'#!/bin/sh\nexec "{sys.executable}" "{home}/scripted.py"\n'
        monkeypatch.setenv("CONFIDE_TASK_PYTHON", interpreter(home, shell))
        answer = operator.execute(context_of())
        outcomes[:] = json.loads(script.read_text())
        return answer


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("CONFIDE_STORE", tmp_path.as_uri())
    monkeypatch.setenv("CONFIDE_HOME", str(tmp_path / "home"))
    return tmp_path


def _kept(store: Path, output: str) -> bytes:
    return (store / output.removeprefix("store://") / "spec.json").read_bytes()


def test_a_step_answers_with_publishable_numbers_only(store, capsys):
    operator = ProcessStep(task_id="pretraining", plan=plan)
    spec = plan({}, None)["pretraining"]
    metrics = {"epsilon": 1.5}  # without `loss`, which is for operators
    assert operator.execute(context_of()) == {"outputs": [spec.output], "metrics": metrics}
    assert "pretraining: working" in capsys.readouterr().out  # the step's log


def test_a_step_gets_its_spec_its_run_and_nothing_of_airflow(store, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    context = context_of({"seed": 7})
    ProcessStep(task_id="canaries", plan=plan).execute(context)
    work = work_of("canaries", plan, context, None)
    channel = channel_file(store / "home", work.context.run_key, "canaries")
    environment = json.loads(Path(f"{channel}.env").read_text())
    assert json.loads(environment["CONFIDE_RUN_CONTEXT"]) == {
        "run_key": "dp_bert/manual__1",
        "run_name": "dp_bert 2026-01-02 03:04:05",
        "task": "canaries",
        "point": "",
        "ended": "dp_bert/",
        "hides_count": False,
    }
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    spec = spec_from_json(_kept(store, work.spec.output))
    assert (spec, spec.seed) == (work.spec, 7)


@pytest.mark.cases
def test_every_task_of_a_private_selection_hides_its_count(store, changes, hides):
    """Even tasks without private training do so, because their times depend on the count."""
    params = {"sweep_baselines": "public-training"} | changes
    context = context_of(params)
    *_, baseline = PLAN.settings(params).points()
    tasks = [("budget", PLAN.of_run, None), ("report", PLAN.of_run, None)]
    tasks += [(name, PLAN.of_point, None) for name in ("private_corpus", "pretraining")]
    tasks += [("pretraining", PLAN.of_point, baseline.model_dump())]
    for name, its_plan, point in tasks:
        assert work_of(name, its_plan, context, point).context.hides_count is hides, name


def test_a_spec_too_long_for_an_argument_goes_by_file(store):
    grid = ",".join(f"{1 + i / 100:g}" for i in range(250))
    settings = {"sweep_noise_multipliers": grid, "sweep_batch_sizes": "256", "sweep_epochs": "5"}
    settings["delta"] = 1e-8  # the delta of all points together must be below 1/units

    def sweep(params: Any, point: Any) -> dict[str, Any]:
        return {"report": job_steps(SweepSettings.model_validate(dict(params)))["report"]}

    answer = ProcessStep(task_id="report", plan=sweep).execute(context_of(settings))
    assert len(_kept(store, answer["outputs"][0])) > LONGEST_ARGUMENT
    assert len(spec_from_json(_kept(store, answer["outputs"][0])).points) == 250


def test_cancelling_ends_the_step_and_its_child_processes(store, monkeypatch):
    script = (
        "#!/bin/sh\ntrap '' TERM\n(trap '' TERM; while :; do sleep 0.1; done) &\n"
        f"echo $! > {store}/child\necho $$ > {store}/step\nwait\n"
    )
    monkeypatch.setenv("CONFIDE_TASK_PYTHON", interpreter(store, script))
    monkeypatch.setattr(supervisor, "LAUNCHER_GRACE", 0.2)
    operator = ProcessStep(task_id="vocabulary", plan=plan)
    files = [store / "child", store / "step"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(operator.execute, context_of())
        wait_for(lambda: operator.process and all(f.exists() and f.read_text() for f in files))
        operator.on_kill()
        with pytest.raises(AirflowException, match="signal 9"):
            running.result()
    wait_for(lambda: not any(alive(int(file.read_text())) for file in files))


def test_cancelling_during_the_start_ends_the_step(store, monkeypatch):
    operator, start = ProcessStep(task_id="vocabulary", plan=plan), fork_server.start

    def cancelled(*words, **options):
        process = start(*words, **options)
        operator.on_kill()
        return process

    monkeypatch.setattr(fork_server, "start", cancelled)
    monkeypatch.setenv("CONFIDE_TASK_PYTHON", interpreter(store, "#!/bin/sh\nexec sleep 60\n"))
    with pytest.raises(AirflowException, match="signal 15"):
        operator.execute(context_of())


def test_a_worker_that_is_killed_leaves_no_step_running(store):
    script = interpreter(store, f"#!/bin/sh\necho $$ > {store}/step\nexec sleep 60\n")
    program = (
        "from launcher_conformance import plan, context_of\n"
        "from dags.launcher.step_operator import ProcessStep\n"
        "ProcessStep(task_id='vocabulary', plan=plan).execute(context_of())"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=CHECKOUT,
        env=os.environ
        | {"PYTHONPATH": f"{CHECKOUT}:{Path(__file__).parent}", "CONFIDE_TASK_PYTHON": script},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: (store / "step").exists() and (store / "step").read_text().strip())
    step = int((store / "step").read_text())
    assert alive(step)
    worker.kill()
    worker.wait()
    wait_for(lambda: not alive(step))
