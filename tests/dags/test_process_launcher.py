"""The process launcher, with a step that only pretends: what it tells, what it ends, what it keeps
to itself."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
)

from dags.launcher.process import ProcessStep, progress_file
from dags.launcher.work import work_of
from tasks.protocol import JobSettings, SweepSettings, dp_bert_steps, spec_from_json, sweep_report

CHECKOUT = Path(__file__).resolve().parents[2]


def plan(params, root, point):
    return dp_bert_steps(JobSettings.model_validate(dict(params)), root)


def context_of(params=None, run_id="manual__1", map_index=-1):
    run = SimpleNamespace(
        dag_id="dp_bert",
        run_id=run_id,
        start_date=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        run_after=None,
    )
    return {
        "params": params or {},
        "dag_run": run,
        "ti": SimpleNamespace(map_index=map_index),
    }


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("CONFIDE_STORE", tmp_path.as_uri())
    monkeypatch.setenv("CONFIDE_HOME", str(tmp_path / "home"))
    return tmp_path


def test_a_step_answers_with_its_output_and_publishable_numbers_only(store):
    answer = ProcessStep(task_id="dp_pretraining", plan=plan).execute(context_of())
    spec = dp_bert_steps(JobSettings(), store.as_uri())["dp_pretraining"]
    assert answer == {"output": spec.output, "metrics": {"epsilon": 1.5}}  # and no `loss`


def test_a_step_gets_its_spec_its_run_and_nothing_of_airflow(store, monkeypatch):
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "secret")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    step = ProcessStep(task_id="canaries", plan=plan)
    context = context_of({"seed": 7})
    step.execute(context)
    work = work_of("canaries", plan, context, None)
    told = json.loads(progress_file(work).with_suffix(".jsonl.env").read_text())
    assert json.loads(told["CONFIDE_RUN_CONTEXT"]) == {
        "run_key": "dp_bert/manual__1",
        "run_name": "dp_bert 2026-01-02 03:04:05",
        "task": "canaries",
        "point": "",
    }
    assert not [name for name in told if name.startswith("AIRFLOW")]
    assert "PYTHONDONTWRITEBYTECODE" not in told
    spec = spec_from_json(_kept(work.spec.output))
    assert spec == work.spec
    assert spec.seed == 7


def _kept(output: str) -> bytes:
    return (Path(output.removeprefix("file://")) / "spec.json").read_bytes()


def test_what_the_step_says_stands_in_the_task_log(store, capsys):
    ProcessStep(task_id="vocabulary", plan=plan).execute(context_of())
    assert "vocabulary: working" in capsys.readouterr().out


@pytest.mark.parametrize("code", [2, 3])
def test_bad_input_and_budget_fail_at_once(store, monkeypatch, code):
    monkeypatch.setenv("FAKE_EXIT", f"vocabulary={code}")
    with pytest.raises(AirflowFailException, match=f"made to fail with {code}"):
        ProcessStep(task_id="vocabulary", plan=plan).execute(context_of())


def test_a_step_whose_time_was_up_goes_on_within_the_same_try(store, monkeypatch):
    codes = [75, 75, 0]
    step = ProcessStep(task_id="vocabulary", plan=plan)
    monkeypatch.setattr(ProcessStep, "_run", lambda *_: (codes.pop(0), "unfinished"))
    monkeypatch.setattr("dags.launcher.process._numbers", lambda _: {})
    step.execute(context_of())
    assert codes == []


def test_a_fault_may_be_tried_again(store, monkeypatch):
    monkeypatch.setenv("FAKE_EXIT", "vocabulary=1")
    with pytest.raises(AirflowException) as fault:
        ProcessStep(task_id="vocabulary", plan=plan).execute(context_of())
    assert not isinstance(fault.value, AirflowFailException)


def test_a_step_that_the_settings_switch_off_is_skipped(store):
    step = ProcessStep(task_id="nonprivate_exposure", plan=plan)
    with pytest.raises(AirflowSkipException):
        step.execute(context_of({"nonprivate": False}))


def test_a_spec_too_long_for_an_argument_goes_by_file(store):
    grid = ",".join(f"{1 + i / 100:g}" for i in range(250))
    settings = {"sweep_noise_multipliers": grid, "sweep_batch_sizes": "256", "sweep_epochs": "5"}
    settings["delta"] = 1e-8  # of all points together: below one in the units

    def sweep(params, root, point):
        return {"report": sweep_report(SweepSettings.model_validate(dict(params)), root)}

    answer = ProcessStep(task_id="report", plan=sweep).execute(context_of(settings))
    assert len(_kept(answer["output"])) > 100_000
    assert len(spec_from_json(_kept(answer["output"])).points) == 250


def stubborn(folder: Path) -> Path:
    """Return an interpreter whose steps start a child, and both ignore SIGTERM."""
    script = folder / "stubborn"
    script.write_text(
        "#!/bin/sh\ntrap '' TERM\n"
        f"(trap '' TERM; while :; do sleep 0.1; done) &\n"
        f"echo $! > {folder}/child\necho $$ > {folder}/step\nwait\n"
    )
    script.chmod(0o755)
    return script


def both_are_known(folder: Path) -> bool:
    files = [folder / "child", folder / "step"]
    return all(file.exists() and file.read_text().strip() for file in files)


def test_cancelling_ends_the_step_and_what_it_started(store, monkeypatch):
    monkeypatch.setenv("CONFIDE_TASK_PYTHON", str(stubborn(store)))
    monkeypatch.setattr("dags.launcher.process.GRACE_SECONDS", 0.2)
    step = ProcessStep(task_id="vocabulary", plan=plan)

    def cancel(number, frame):
        step.on_kill()

    def once_it_runs():
        try:
            wait_for(lambda: step.process is not None and both_are_known(store))
        finally:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, cancel)  # as Airflow does it: in the main thread
    waiting = threading.Thread(target=once_it_runs)
    waiting.start()
    try:
        with pytest.raises(AirflowException, match="signal 9"):
            step.execute(context_of())
    finally:
        waiting.join()
        signal.signal(signal.SIGALRM, before)
    for name in ("step", "child"):
        pid = int((store / name).read_text())
        wait_for(lambda pid=pid: not alive(pid))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_a_worker_that_is_killed_leaves_no_step_running(store):
    script = store / "sleeper"
    script.write_text(f"#!/bin/sh\necho $$ > {store}/step\nexec sleep 60\n")
    script.chmod(0o755)
    program = (
        "from tests_process import ProcessStep, plan, context_of; "
        "ProcessStep(task_id='vocabulary', plan=plan).execute(context_of())"
    )
    (store / "tests_process.py").write_text(Path(__file__).read_text())
    worker = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=CHECKOUT,
        env=os.environ | {"PYTHONPATH": f"{CHECKOUT}:{store}", "CONFIDE_TASK_PYTHON": str(script)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: (store / "step").exists() and (store / "step").read_text().strip())
    step = int((store / "step").read_text())
    assert alive(step)
    worker.kill()
    worker.wait()
    wait_for(lambda: not alive(step))
