from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from spec_examples import run, spec_of
from step_outputs import output_folder

from dp_core.errors import BadInput, BudgetExceeded, Unfinished
from dp_core.labels import Operator, Public
from dp_core.privacy.ledger import Ledger
from dp_core.privacy.mechanisms import PrivacyUnit
from tasks.context import StepContext, StepOutput
from tasks.execution import contract
from tasks.protocol import CanariesSpec, CorpusSpec, RunContext, Source, StepResult
from tasks.protocol.messages import Follower
from tasks.protocol.step_process import data_uri
from tasks.runtime.deployment import Deployment
from tasks.storage import Store

Step = Callable[..., None]
SECRET = "Zacharias Quillfeather"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, deployment: Deployment, no_mlflow: None) -> None:
    monkeypatch.setenv("CONFIDE_HOME", str(deployment.home))
    monkeypatch.setenv("CONFIDE_MESSAGES", str(deployment.home / "channel"))
    monkeypatch.delenv("CONFIDE_DEBUG", raising=False)
    kept = os.umask(0)
    os.umask(kept)
    monkeypatch.setattr(os, "umask", lambda _: kept)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def _spec(deployment: Deployment, **more: Any) -> CanariesSpec:
    fields: dict[str, Any] = {"config": {}, "seed": 1, "made_up": True}
    fields |= {"vocabulary_uri": f"{deployment.store}/v/1"} | more
    return CanariesSpec.model_validate(fields)


@pytest.fixture
def spec(deployment: Deployment) -> CanariesSpec:
    return _spec(deployment)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Step:
    """Return a function that sets the work of the step; the initial step succeeds."""

    def does(work: Any, **more: Any) -> None:
        module = SimpleNamespace(run=work, **more)
        monkeypatch.setattr(contract, "_module", lambda _: module)

    does(_good)
    return does


def _output(spec: CanariesSpec) -> Path:
    return output_folder(Deployment.from_environment(), spec.output)


def _good(spec: CanariesSpec, context: StepContext) -> StepOutput:
    (context.out / "made.txt").write_text("made")
    context.measure("epsilon", Public(1.0), 2)
    context.measure("loss", Operator(3.0), 2)
    return StepOutput(outputs={"made": "made.txt", "all": ""}, facts={"answer": 42})


def test_result_is_written_last_and_states_outputs_metrics_and_facts(
    spec: CanariesSpec,
    deployment: Deployment,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step: Step,
) -> None:
    seen: list[set[str]] = []
    write = Store.write

    def watching(self: Store, uri: str, content: bytes) -> None:
        seen.append({f.name for f in _output(spec).rglob("*")})
        write(self, uri, content)

    monkeypatch.setattr(Store, "write", watching)
    assert run(spec) == 0
    assert seen == [{"made.txt", "checksums.json"}]
    place = f"{_output(spec).as_uri()}/result.json"
    assert capsys.readouterr().out.strip() == place
    result = StepResult.model_validate_json((_output(spec) / "result.json").read_bytes())
    assert result.spec_hash == spec.digest()
    assert result.outputs == {"made": f"{spec.output}/made.txt", "all": spec.output}
    assert [(m.name, m.label, m.step) for m in result.metrics] == [
        ("epsilon", "public", 2),
        ("loss", "operator", 2),
    ]
    assert result.facts["answer"] == 42
    assert not (deployment.work / f"canaries-{spec.digest()[:16]}").exists()


def test_finished_step_is_not_run_again_and_loses_the_work_folder_left_by_a_kill(
    spec: CanariesSpec, deployment: Deployment, step: Step
) -> None:
    assert run(spec) == 0
    left = deployment.work / f"canaries-{spec.digest()[:16]}"
    (left / "out").mkdir(parents=True)
    (left / "out" / "made.txt").write_text(SECRET)
    before = (_output(spec) / "result.json").read_bytes()
    step(lambda *_: pytest.fail("it worked again"))
    assert run(spec) == 0
    assert (_output(spec) / "result.json").read_bytes() == before
    assert not left.exists()


@pytest.mark.parametrize("changed", [False, True])
def test_copy_of_the_source_is_removed_after_the_comparison(
    spec: CanariesSpec,
    deployment: Deployment,
    monkeypatch: pytest.MonkeyPatch,
    changed: bool,
    step: Step,
) -> None:
    def compares(spec: CanariesSpec, result: StepResult, context: StepContext) -> None:
        (context.durable / "source").write_text(SECRET)
        if changed:
            raise BadInput("the files have changed", where="private_path")

    step(_good, refuse_if_changed=compares)
    source = Source(field="private_path", uri="/nowhere", public=False)
    monkeypatch.setattr(CanariesSpec, "sources", (source,))
    monkeypatch.setattr(CanariesSpec, "checks_sources", True)
    assert run(spec) == 0
    assert run(spec) == (2 if changed else 0)
    assert not list(deployment.work.rglob("source"))


def test_result_with_missing_parts_is_made_again(spec: CanariesSpec, step: Step) -> None:
    missing = ["σ=1"]
    answer = {"table": 1, "missing": missing}
    step(lambda spec, context: StepOutput(outputs={}, facts=answer))
    assert run(spec) == 0
    missing.clear()
    assert run(spec) == 0
    result = StepResult.model_validate_json((_output(spec) / "result.json").read_bytes())
    assert result.facts["missing"] == []
    step(lambda *_: pytest.fail("it worked again"))
    assert run(spec) == 0


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
def test_failure_is_one_line_with_an_exit_code_and_no_result(
    spec: CanariesSpec,
    deployment: Deployment,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    step: Step,
) -> None:
    def fails(spec: CanariesSpec, context: StepContext) -> StepOutput:
        (context.out / "half.txt").write_text("half")
        raise error

    step(fails)
    assert run(spec) == code
    output = capsys.readouterr()
    lines = output.err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("confide: canaries: ")
    failed = Follower(deployment.home / "channel").look().failed
    assert failed is not None
    assert f"confide: canaries: {failed.reason}" == lines[0]
    assert failed.exit_code == code
    assert SECRET not in output.err + output.out
    assert ("No space left on device" in output.err) is isinstance(error, OSError)
    assert not _output(spec).exists()
    monkeypatch.setenv("CONFIDE_DEBUG", "1")
    assert run(spec) == code
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
def test_tracking_on_a_full_disk_keeps_the_exit_code(
    spec: CanariesSpec, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, step: Step
) -> None:
    """Another exit code would make the orchestrator repeat a step that must not be repeated."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def fails(spec: CanariesSpec, context: StepContext) -> StepOutput:
        raise error

    for ending in ("end", "leave"):
        monkeypatch.setattr(contract.Tracker, ending, full)
    step(fails)
    assert run(spec) == code


def test_retry_continues_in_the_same_work_folder(spec: CanariesSpec, step: Step) -> None:
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

    step(first)
    assert run(spec) == 1
    step(second)
    assert run(spec) == 0
    result = StepResult.model_validate_json((_output(spec) / "result.json").read_bytes())
    assert [(m.step, m.value) for m in result.metrics] == [(1, 1.0), (2, 2.0)]
    assert not (_output(spec) / "stale").exists()


def test_invalid_spec_is_refused_with_the_reason(
    spec: CanariesSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.loads(spec.model_dump_json())
    for change, reason in (
        ({"unknown": 1}, "unknown setting"),
        ({"seed": "one"}, "seed"),
        ({"step": "nonsense"}, "nonsense"),
    ):
        body = json.dumps(whole | change).encode()
        assert contract.main("canaries", data_uri(body)) == 2
        assert reason in capsys.readouterr().err
    assert contract.main("canaries", "/no/such/spec.json") == 2
    assert contract.main("corpus", data_uri(json.dumps(whole).encode())) == 2
    assert "is for the step 'canaries'" in capsys.readouterr().err


def test_private_input_cannot_be_used_as_made_up(
    deployment: Deployment, capsys: pytest.CaptureFixture[str], step: Step
) -> None:
    private = _spec(deployment, made_up=False)
    assert run(private) == 0

    def reads(spec: CanariesSpec, context: StepContext) -> StepOutput:
        context.input(spec.vocabulary_uri)
        return StepOutput(outputs={})

    step(reads)
    assert run(_spec(deployment, vocabulary_uri=private.output)) == 2
    assert "private" in capsys.readouterr().err
    assert run(_spec(deployment, vocabulary_uri=private.output, made_up=False)) == 0
    assert run(_spec(deployment, vocabulary_uri=f"{deployment.store}/none/0")) == 2


def test_changed_files_under_the_same_version_are_refused(
    deployment: Deployment, tmp_path: Path
) -> None:
    Ledger.open(deployment.ledger).register_dataset("notes", PrivacyUnit.PATIENT, 8.0, 1e-5)
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.txt").write_text("The patient was seen in clinic.")
    spec = spec_of(CorpusSpec, path=str(notes))
    context = RunContext(run_key="k", run_name="n", task="private_corpus")
    first = contract.run_step(spec, deployment, context)
    assert contract.run_step(spec, deployment, context) == first
    (notes / "a.txt").write_text("The patient was not seen.")
    with pytest.raises(BadInput, match="data_version"):
        contract.run_step(spec, deployment, context)
    renewed = spec.model_copy(update={"data_version": "2"})
    second = contract.run_step(renewed, deployment, context)
    assert second.facts["digest"] != first.facts["digest"]


def test_stopped_step_ends_at_once_and_leaves_no_result(spec: CanariesSpec, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    script = textwrap.dedent(
        f"""
        import sys, time
        from types import SimpleNamespace
        from tasks.execution import contract
        def run(spec, context):
            print("working", flush=True)
            time.sleep(60)
        contract._module = lambda spec: SimpleNamespace(run=run)
        sys.exit(contract.main("canaries", {str(tmp_path / "spec.json")!r}))
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"CONFIDE_TRACKING": "http://127.0.0.1:9"},
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "working"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == contract.STOPPED
    assert errors.strip().splitlines()[-1] == "confide: canaries: stopped before it was done"
    assert "Traceback" not in errors
    assert not _output(spec).exists()
