"""The step contract: run one spec and write one output folder, `result.json` last, or nothing.

An existing result is returned without repeating the work; a retry continues in the same local
folder. Exit codes: 0 done, 2 bad input, 3 privacy budget exceeded, 4 an audit contradicts a claim
(everything is written, including the result, and every further run of the step exits with 4), 75
the time is up (run the step again to continue), 143 stopped, 1 internal error.
"""

import argparse
import importlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from types import FrameType, ModuleType

from pydantic import ValidationError

from dp_core.config.fields import one_line
from dp_core.config.release import ReleaseRecord
from dp_core.errors import (
    BadInput,
    BudgetExceeded,
    ConfideError,
    Contradicted,
    Unfinished,
    fault_line,
)
from dp_core.labels import Label
from tasks.context import StepContext, StepOutput, content_key
from tasks.protocol.messages import Failed, Judged, StepResult
from tasks.protocol.specs import Need, RunContext, StepSpec
from tasks.protocol.step_classes import spec_from_json
from tasks.protocol.supervisor import STEP_GRACE
from tasks.results import read_result
from tasks.runtime.deployment import Deployment
from tasks.runtime.log import StepProgressReporter, configure, log, send
from tasks.storage.backends import read_spec
from tasks.storage.journal import exclusive
from tasks.storage.store import RESULT
from tasks.tracking.event_log import Identity, Status, Target
from tasks.tracking.tracker import Tracker

STOPPED = 143
_PACKAGES = (
    *("tensorflow", "tensorflow-cpu", "tensorflow-tpu"),
    *("dp-accounting", "tokenizers", "numpy", "mlflow"),
)


class Stopped(BaseException):
    """The process received a signal to stop."""


def command_line(words: Sequence[str]) -> int:
    """Run the step of a command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tasks", description="Run one step.")
    parser.add_argument("name", help="the step, for example pretrain")
    parser.add_argument(
        "--spec", required=True, metavar="URI", help="a path, file://, gs:// or data: URI"
    )
    parser.add_argument("--context", default="", metavar="JSON", help="which run it belongs to")
    arguments = parser.parse_args(words)
    return main(arguments.name, arguments.spec, arguments.context)


def main(name: str, spec_uri: str, context: str = "") -> int:
    """Run one step as a process: return its exit code, after logging any failure in one line."""
    signal.signal(signal.SIGTERM, _stop)
    end_with_launcher()
    os.umask(0o077)  # every file may hold private text
    try:
        configure(name)
        deployment = Deployment.from_environment()
        spec = _spec(name, spec_uri)
        run = _run_context(context, spec)
        configure(name, run)
        run_step(spec, deployment, run)
    except ConfideError as error:
        return _fail(name, str(error), error.exit_code)
    except Stopped:
        return _fail(name, "stopped before it was done", STOPPED)
    except (KeyboardInterrupt, SystemExit):
        raise
    # The last handler that can turn an error into one line. A panic of a Rust library is not an
    # `Exception`, and its message may quote a text.
    except BaseException as error:  # noqa: BLE001
        return _fail(name, fault_line(error), 1)
    print(deployment.open_store().location(f"{spec.output}/{RESULT}"))
    return 0


def run_step(spec: StepSpec, deployment: Deployment, run: RunContext) -> StepResult:
    """Return the step's result, running the step only if no result exists yet.

    Raises:
        BadInput: the spec or an input is wrong.
        BudgetExceeded: the privacy ledger refuses a release.
        Contradicted: an audit refutes the claim of a model; everything is written, including the
            result.
    """
    deployment.prepare()
    store = deployment.open_store()
    spec_hash = spec.digest()
    durable = deployment.work / f"{spec.step}-{spec_hash[:16]}"
    tracker = Tracker(deployment, _identity(spec, spec_hash, run, deployment))
    context = StepContext(
        deployment=deployment,
        store=store,
        run=run,
        spec_hash=spec_hash,
        made_up=spec.made_up,
        durable=durable,
        tracker=tracker,
        progress=StepProgressReporter(run.task),
    )
    with _alone(durable):
        try:
            result = read_result(store, spec.output)
            if done_before := result is not None and _answers(spec, result, spec_hash):
                _check_sources(spec, result, context)
                _confirm_releases(spec, result.releases, context)
                log(f"{run.task}: done before")
            else:
                result = _work(_module(spec), spec, context)
            tracker.record(spec, store, result, done_before=done_before)
        except BaseException as error:
            with suppress(OSError):  # a full disk must not hide the step's error
                resumable = durable.exists() and any(durable.iterdir())
                _end_tracking(tracker, error, closed=not resumable)
            raise
        finally:
            context.close()
    last: Target | None = "parent" if spec.ends_run else "model" if run.point else None
    judged = result.facts.get("judged", ())
    against = [model["sentence"] for model in judged if model["verdict"] == "contradicted"]
    status: Status = "FAILED" if against else "FINISHED"
    tracker.end(status, also=(last,) if last else (), contradicted=bool(against))
    for model in judged:
        send(Judged(model=model["name"], verdict=model["verdict"], sentence=model["sentence"]))
    if against:  # everything is written by now, and a retry would find the same
        raise Contradicted(" ".join(against), where=run.task, fix="Do not release the model.")
    return result


def _end_tracking(tracker: Tracker, error: BaseException, *, closed: bool) -> None:
    """End the tracker's runs of a step that did not finish; a retry reopens them.

    A step that received a signal to stop ends its job too; a step whose time was up is restarted at
    once.
    """
    if isinstance(error, Stopped):
        tracker.leave("KILLED", also=("parent",), closed=closed)
    elif isinstance(error, Unfinished):
        tracker.leave("KILLED", closed=closed)
    else:
        refused = isinstance(error, BadInput | BudgetExceeded)
        tracker.end("FAILED", also=("parent",), closed=closed, refused=refused)


def _confirm_releases(
    spec: StepSpec, releases: Sequence[ReleaseRecord], context: StepContext
) -> None:
    """Refuse releases that the ledger does not hold, in the steps that may read the ledger."""
    if releases and {Need.LEDGER, Need.CHARGING} & spec.needs:
        from tasks.releases.deployment_ledger import confirm_releases, open_ledger

        ledger = open_ledger(context.deployment, context.store)
        confirm_releases(ledger, releases, spec.output)


def _module(spec: StepSpec) -> ModuleType:
    """Import the step's module, only when it has to run, since most steps import TensorFlow.

    Its function `run(spec, context)` returns a `StepOutput`. A module may also have a function
    `restore(spec, context)`, which repairs a finished output from its unchanged sources.
    """
    return importlib.import_module(f"tasks.steps.{spec.step}_step")


def _answers(spec: StepSpec, result: StepResult, spec_hash: str) -> bool:
    """Return whether an earlier result is still the result of the step.

    The report of a sweep may lack points that have finished since.
    """
    if spec.repeated:
        return False
    return result.spec_hash == spec_hash and not result.facts.get("missing")


def _check_sources(spec: StepSpec, result: StepResult, context: StepContext) -> None:
    """Refuse a result whose source files have changed since; remove unfinished work in any case."""
    try:
        if spec.sources:
            from tasks.releases import declarations

            declarations.refuse_if_changed(spec, result, context)
            module = _module(spec)
            if hasattr(module, "restore"):
                module.restore(spec, context)
    finally:
        context.clear()  # copied source files, or files left by a kill after the result


def _work(module: ModuleType, spec: StepSpec, context: StepContext) -> StepResult:
    started = time.monotonic()
    shutil.rmtree(context.out, ignore_errors=True)
    context.out.mkdir(parents=True)
    context.tracker.begin(follows_run=spec.follows_run)
    answer: StepOutput = module.run(spec, context)
    _confirm_releases(spec, context.releases, context)
    context.store.publish(context.out, spec.output)
    kept = context.for_operator_alone
    result = StepResult(
        step=spec.step,
        spec_hash=context.spec_hash,
        outputs={n: f"{spec.output}/{p}".rstrip("/") for n, p in answer.outputs.items()},
        metrics=context.measured(),
        releases=context.releases,
        facts={
            **answer.facts,
            "made_up": spec.made_up,
            "source_digests": context.source_digests,
            "artifacts": {
                file: Label.OPERATOR if kept else label for file, label in answer.artifacts.items()
            },
            "model": "" if kept else answer.model,
        },
        seconds=0.0 if spec.hides_duration else round(time.monotonic() - started, 3),
        versions=_versions(),
    )
    context.store.write(f"{spec.output}/{RESULT}", result.model_dump_json(indent=1).encode())
    context.clear()
    return result


def _spec(name: str, uri: str) -> StepSpec:
    try:
        spec = spec_from_json(read_spec(uri))
    except ValidationError as error:
        raise BadInput(one_line(error), where=f"spec of {name}") from None
    if spec.step != name:
        raise BadInput(f"the spec is for the step {spec.step!r}", where=name)
    return spec


def _run_context(text: str, spec: StepSpec) -> RunContext:
    text = text or os.environ.get("CONFIDE_RUN_CONTEXT", "")
    if not text:
        key = f"by-hand-{spec.digest()[:16]}"
        return RunContext(run_key=key, run_name=f"{spec.step} by hand", task=spec.step)
    try:
        return RunContext.model_validate_json(text)
    except ValidationError as error:
        raise BadInput(one_line(error), where="CONFIDE_RUN_CONTEXT") from None


def _identity(spec: StepSpec, spec_hash: str, run: RunContext, deployment: Deployment) -> Identity:
    return Identity(
        run_key=run.run_key,
        run_name=run.run_name,
        task=run.task,
        model=run.point,
        step=spec.step,
        spec_hash=spec_hash,
        made_up=spec.made_up,
        salt="" if spec.made_up else content_key(deployment, "runs").hex(),
        hides_count=run.hides_count or spec.hides_count,
    )


@contextmanager
def _alone(durable: Path) -> Iterator[None]:
    """Let only one process of this machine work on a spec; others wait and find the result."""
    durable.mkdir(parents=True, exist_ok=True)
    with exclusive(durable.with_suffix(".lock")):
        durable.mkdir(parents=True, exist_ok=True)
        yield
        with suppress(OSError):
            durable.rmdir()  # nothing was left to resume


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _stop(number: int, frame: FrameType | None) -> None:
    # A long native call delays this exception; the timer then ends the process.
    timer = threading.Timer(STEP_GRACE, os._exit, args=(STOPPED,))
    timer.daemon = True
    timer.start()
    raise Stopped


def end_with_launcher() -> None:
    """With `CONFIDE_LEASE=stdin`, end this process when its standard input closes.

    The launcher of a container keeps that input open. A killed launcher can send no message.
    """

    def watch() -> None:
        while os.read(0, 4096):
            continue
        log("the launcher of this step has ended: stopping it", "error")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STEP_GRACE)  # a long native call delays the signal's handler
        os._exit(STOPPED)

    if os.environ.get("CONFIDE_LEASE") == "stdin":
        threading.Thread(target=watch, daemon=True).start()


def _fail(name: str, line: str, code: int) -> int:
    if os.environ.get("CONFIDE_DEBUG") and code != STOPPED:
        traceback.print_exc()
    send(Failed(exit_code=code, reason=line))
    log(f"confide: {name}: {line}", "error")
    return code
