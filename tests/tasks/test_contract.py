import json
import os
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
from spec_examples import run
from step_outputs import output_folder

from dp_core.errors import BadInput, BudgetExceeded, Unfinished
from dp_core.labels import Operator, Public
from tasks.context import StepContext, StepOutput
from tasks.execution import contract
from tasks.protocol.messages import Follower, StepResult
from tasks.protocol.specs import CanariesSpec, Source
from tasks.protocol.step_process import data_uri
from tasks.releases import declarations
from tasks.runtime.deployment import Deployment
from tasks.storage.store import RESULT, Store

SECRET = "Zacharias Quillfeather"


class Case:
    """A step of made-up data whose work a test replaces; at first the work succeeds."""

    def __init__(self, deployment: Deployment, patch: pytest.MonkeyPatch) -> None:
        self.deployment, self.patch = deployment, patch
        self.spec = self.spec_with()
        self.output = output_folder(deployment, self.spec.output)
        self.left = deployment.work / f"canaries-{self.spec.digest()[:16]}"
        self.does(good)

    def spec_with(self, **more: Any) -> CanariesSpec:
        uri = f"{self.deployment.store}/v/1"
        fields = {"config": {}, "seed": 1, "made_up": True, "vocabulary_uri": uri}
        return CanariesSpec.model_validate(fields | more)

    def does(self, work: Any) -> None:
        module = SimpleNamespace(run=work)
        self.patch.setattr(contract, "_module", lambda _: module)

    def fails(self, error: BaseException) -> None:
        def fail(spec: CanariesSpec, context: StepContext) -> StepOutput:
            (context.out / "half.txt").write_text("half")
            raise error

        self.does(fail)

    def run(self) -> int:
        return run(self.spec)

    def result(self) -> StepResult:
        return StepResult.model_validate_json((self.output / RESULT).read_bytes())


def good(spec: CanariesSpec, context: StepContext) -> StepOutput:
    (context.out / "made.txt").write_text("made")
    context.measure("epsilon", Public(1.0), 2)
    context.measure("loss", Operator(3.0), 2)
    return StepOutput(outputs={"made": "made.txt", "all": ""}, facts={"answer": 42})


def not_again(*_: object) -> StepOutput:
    pytest.fail("it worked again")


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch, deployment: Deployment, no_mlflow: None) -> Case:
    monkeypatch.setenv("CONFIDE_HOME", str(deployment.home))
    monkeypatch.setenv("CONFIDE_MESSAGES", str(deployment.home / "channel"))
    monkeypatch.delenv("CONFIDE_DEBUG", raising=False)
    kept = os.umask(0)
    os.umask(kept)
    monkeypatch.setattr(os, "umask", lambda _: kept)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return Case(deployment, monkeypatch)


def test_result_is_written_last_and_states_outputs_metrics_and_facts(case, capsys):
    seen: list[set[str]] = []
    write = Store.write

    def watching(self: Store, uri: str, content: bytes) -> None:
        seen.append({f.name for f in case.output.rglob("*")})
        write(self, uri, content)

    case.patch.setattr(Store, "write", watching)
    assert case.run() == 0
    assert seen == [{"made.txt", "checksums.json"}]
    assert capsys.readouterr().out.strip() == f"{case.output.as_uri()}/result.json"
    result = case.result()
    assert result.spec_hash == case.spec.digest()
    uri = case.spec.output
    assert result.outputs == {"made": f"{uri}/made.txt", "all": uri}
    assert [(m.name, m.label, m.step) for m in result.metrics] == [
        ("epsilon", "public", 2),
        ("loss", "operator", 2),
    ]
    assert result.facts["answer"] == 42
    assert not case.left.exists()


def test_finished_step_is_not_run_again_and_loses_the_work_folder_left_by_a_kill(case):
    assert case.run() == 0
    (case.left / "out").mkdir(parents=True)
    (case.left / "out" / "made.txt").write_text(SECRET)
    before = case.result()
    case.does(not_again)
    assert case.run() == 0
    assert case.result() == before
    assert not case.left.exists()


@pytest.mark.parametrize("changed", [False, True])
def test_copy_of_the_source_is_removed_after_the_comparison(case, changed):
    def compares(spec: CanariesSpec, result: StepResult, context: StepContext) -> None:
        (context.durable / "source").write_text(SECRET)
        if changed:
            raise BadInput("the files have changed", where="private_path")

    case.patch.setattr(declarations, "refuse_if_changed", compares)
    source = Source(field="private_path", uri="/nowhere", public=False)
    case.patch.setattr(CanariesSpec, "sources", (source,))
    assert case.run() == 0
    assert case.run() == (2 if changed else 0)
    assert not list(case.deployment.work.rglob("source"))


def test_result_with_missing_parts_is_made_again(case):
    missing = ["σ=1"]
    answer = {"table": 1, "missing": missing}
    case.does(lambda spec, context: StepOutput(outputs={}, facts=answer))
    assert case.run() == 0
    missing.clear()
    assert case.run() == 0
    assert case.result().facts["missing"] == []
    case.does(not_again)
    assert case.run() == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("the field is wrong", where="seed", fix="Change it."), 2),
        (BudgetExceeded("ε 3 + 2 > 4", where="notes"), 3),
        (RuntimeError(SECRET), 1),
        (KeyError(SECRET), 1),
        (OSError(28, "No space left on device", SECRET), 1),
    ],
)
def test_failure_is_one_line_with_an_exit_code_and_no_result(case, capsys, error, code):
    case.fails(error)
    assert case.run() == code
    output = capsys.readouterr()
    (line,) = output.err.strip().splitlines()
    failed = Follower(case.deployment.home / "channel").look().failed
    assert f"confide: canaries: {failed.reason}" == line
    assert failed.exit_code == code
    assert SECRET not in output.err + output.out
    assert ("No space left on device" in output.err) is isinstance(error, OSError)
    assert not case.output.exists()
    case.patch.setenv("CONFIDE_DEBUG", "1")
    assert case.run() == code
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("the field is wrong", where="seed"), 2),
        (BudgetExceeded("ε 3 + 2 > 4", where="notes"), 3),
        (Unfinished("time is up", where="canaries"), 75),
        (contract.Stopped(), contract.STOPPED),
    ],
)
def test_tracking_on_a_full_disk_keeps_the_exit_code(case, error, code):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for ending in ("end", "leave"):
        case.patch.setattr(contract.Tracker, ending, full)
    case.fails(error)
    assert case.run() == code


def test_retry_continues_in_the_same_work_folder(case):
    def first(spec: CanariesSpec, context: StepContext) -> StepOutput:
        context.measure("epsilon", Public(1.0), 1)
        (context.durable / "checkpoint").write_text("half-way")
        (context.out / "stale").write_text("from the first attempt")
        raise RuntimeError

    def second(spec: CanariesSpec, context: StepContext) -> StepOutput:
        assert (context.durable / "checkpoint").read_text() == "half-way"
        context.measure("epsilon", Public(1.0), 1)
        context.measure("epsilon", Public(2.0), 2)
        return StepOutput(outputs={"all": ""})

    case.does(first)
    assert case.run() == 1
    case.does(second)
    assert case.run() == 0
    assert [(m.step, m.value) for m in case.result().metrics] == [(1, 1.0), (2, 2.0)]
    assert not (case.output / "stale").exists()


@pytest.mark.cases
def test_invalid_spec_is_refused_with_the_reason(case, capsys, name, change, reason):
    spec = json.loads(case.spec.model_dump_json()) | change
    assert contract.main(name, data_uri(json.dumps(spec).encode())) == 2
    assert reason in capsys.readouterr().err


def test_private_input_cannot_be_used_as_made_up(case, capsys):
    private = case.spec_with(made_up=False)
    assert run(private) == 0

    def reads(spec: CanariesSpec, context: StepContext) -> StepOutput:
        context.input(spec.vocabulary_uri)
        return StepOutput(outputs={})

    case.does(reads)
    assert run(case.spec_with(vocabulary_uri=private.output)) == 2
    assert "private" in capsys.readouterr().err
    assert run(case.spec_with(vocabulary_uri=private.output, made_up=False)) == 0
    assert run(case.spec_with(vocabulary_uri=f"{case.deployment.store}/none/0")) == 2


def test_stopped_step_ends_at_once_and_leaves_no_result(case, tmp_path):
    (tmp_path / "spec.json").write_text(case.spec.model_dump_json())
    script = textwrap.dedent(
        f"""
        import sys, time
        from types import SimpleNamespace
        from tasks.execution import contract
        from tasks.tracking.mlflow import Delivery
        def run(spec, context):
            print("working", flush=True)
            time.sleep(60)
        Delivery.deliver = lambda *_: True
        contract._module = lambda spec: SimpleNamespace(run=run)
        sys.exit(contract.main("canaries", {str(tmp_path / "spec.json")!r}))
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().strip() == "working"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == contract.STOPPED
    assert errors.strip().splitlines()[-1] == "confide: canaries: stopped before it was done"
    assert "Traceback" not in errors
    assert not case.output.exists()
