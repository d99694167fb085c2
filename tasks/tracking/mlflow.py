"""What may be told to which experiment, and in which order: of lines, before they are sent."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dp_core.labels import Dp, Label, Labelled, Operator, Public, Publishable
from tasks.runtime.deployment import Deployment
from tasks.runtime.messages import say
from tasks.storage import CHECKSUMS, RESULT
from tasks.tracking.outbox import Identity, Line, Outbox

PUBLIC, OPERATOR = "confide", "confide-operator"
_KINDS = ("begin", "metric", "param", "tag", "artifact", "dataset", "model", "end")
_DAY = 86_400_000  # milliseconds
_TIME_OF_DAY = re.compile(r"[ T]\d\d:\d\d.*")


def shown_time(milliseconds: int, identity: Identity, experiment: str) -> int:
    """Return the time that an experiment may know: of private data, the public one knows the day.

    How long a step took tells how large the data are, and of a selection how many trainings.
    """
    if _may_know_times(identity, experiment):
        return milliseconds
    return milliseconds - milliseconds % _DAY


def shown_key(identity: Identity, experiment: str) -> str:
    """Return the run's key as that experiment may know it: Airflow's says when the run began."""
    if _may_know_times(identity, experiment):
        return identity.run_key
    return identity.hidden(identity.run_key)[:16]


def shown_name(identity: Identity, experiment: str) -> str:
    """Return the run's name as that experiment may know it: with the day, not with the time."""
    if _may_know_times(identity, experiment):
        return identity.run_name
    return f"{_TIME_OF_DAY.sub('', identity.run_name)} · {shown_key(identity, experiment)[:6]}"


def _may_know_times(identity: Identity, experiment: str) -> bool:
    return identity.made_up or experiment == OPERATOR


def grouped(lines: list[Line]) -> list[list[Line]]:
    """Return the lines grouped by kind and run; a run begins before, and ends after, the rest.

    The end of an earlier try is left out: a later one has begun, and goes on.
    """
    groups: dict[tuple[str, str, str], list[Line]] = {}
    began = max((at for at, line in enumerate(lines) if line["kind"] == "begin"), default=-1)
    for line in (x for at, x in enumerate(lines) if x["kind"] != "end" or at > began):
        place = (line["kind"], line.get("experiment", ""), line.get("target", ""))
        groups.setdefault(place, []).append(line)
    return [groups[place] for place in sorted(groups, key=lambda p: _KINDS.index(p[0]))]


if TYPE_CHECKING:
    from mlflow.entities import Run  # noqa: TID251 - this is the place
    from mlflow.tracking import MlflowClient  # noqa: TID251

EXPERIMENTS = (PUBLIC, OPERATOR)
KEY_TAG = "confide.key"
_AT_ONCE = 1000  # metrics that MLflow takes in one request
# MLflow's pages show training runs, not conversations, of an experiment that says what it is.
_KIND = {"mlflow.experimentKind": "custom_model_development"}
# Before MLflow is imported: its makers are not told what is done here.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


class TrackingDown(Exception):
    """MLflow cannot be reached; what was to be sent stays on disk."""


def _client(deployment: Deployment) -> MlflowClient:
    # A step must not wait minutes for a tracker that is down: it will ask again later.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    # Asked twice without an answer to the first, it would make two runs of one.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow.tracking import MlflowClient  # noqa: TID251

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=deployment.tracking, registry_uri=deployment.tracking)


@contextmanager
def _faults() -> Iterator[None]:
    """Turn whatever a tracker that is down raises into `TrackingDown`."""
    from mlflow.exceptions import MlflowException  # noqa: TID251
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise TrackingDown(type(error).__name__) from error


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process of this machine create databases, experiments and runs at a time."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "creating.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Delivery:
    """Sends outboxes to one MLflow, remembering the runs it has found."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._mlflow: MlflowClient | None = None
        self._runs: dict[str, Run] = {}
        self._known: dict[str, set[tuple[str, int]]] = {}

    def deliver(self, outbox: Outbox) -> bool:
        """Send what is unsent; return whether this process was the one to send.

        Raises:
            TrackingDown: MLflow did not take it all; the rest stays.
        """
        with outbox.sending() as mine:
            if not mine or not (outbox.folder / "identity.json").exists():
                return False
            sent, lines = outbox.unsent()
            over = bool(lines) and lines[-1]["kind"] == "end"
            with _faults():
                if self._mlflow is None:
                    with _one_at_a_time(self._deployment.outbox):
                        self._mlflow = _client(self._deployment)
                for start in range(0, len(lines), _AT_ONCE):
                    window = lines[start : start + _AT_ONCE]
                    for group in grouped(window):
                        if not (over and _revives(group[0])):
                            self._send(outbox, group)
                    outbox.confirm(sent + start + len(window))
            if outbox.complete:
                outbox.remove()
            return True

    def url(self, identity: Identity, target: str) -> str:
        """Return the address of a run's page, or '' when no server shows it."""
        if not self._deployment.tracking_ui:
            return ""
        with _faults():
            run = self._run(identity, PUBLIC, target)
        place = f"experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
        return f"{self._deployment.tracking_ui}/#/{place}"

    # --- runs

    @property
    def _api(self) -> MlflowClient:
        if self._mlflow is None:
            self._mlflow = _client(self._deployment)
        return self._mlflow

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException  # noqa: TID251

        found = self._api.get_experiment_by_name(name)
        if found is None:
            served = self._deployment.tracking.startswith(("http://", "https://"))
            place = None if served else (self._deployment.artifacts / name).as_uri()
            try:
                return str(self._api.create_experiment(name, place, tags=_KIND))
            except MlflowException:  # another machine was faster
                found = self._api.get_experiment_by_name(name)
        if found is None:
            raise TrackingDown("no experiment")
        return str(found.experiment_id)

    def _run(self, identity: Identity, experiment: str, target: str) -> Run:
        """Return the run of a step, point or parent, creating it and those above it once."""
        key = identity.key(target)
        known = self._runs.get(f"{experiment}/{key}")
        if known is not None:
            return known
        tags = {KEY_TAG: key, "confide.run_key": shown_key(identity, experiment)}
        if identity.made_up:
            tags["data"] = "made-up"
        if target == "parent":
            name = shown_name(identity, experiment)
        else:
            above = "point" if target == "step" and identity.point else "parent"
            tags["mlflow.parentRunId"] = self._run(identity, experiment, above).info.run_id
            name = identity.point if target == "point" else identity.task
            if identity.point:
                tags["confide.point"] = identity.point
        if target == "step":
            tags |= {"confide.spec_hash": identity.spec_hash, "confide.step": identity.step}
        with _one_at_a_time(self._deployment.outbox):
            now = shown_time(_now(), identity, experiment)
            run = self._find_or_create(self._experiment(experiment), key, name, tags, now)
        if experiment == OPERATOR and target != "step":
            self._end_like(self._run(identity, PUBLIC, target), run)
        self._runs[f"{experiment}/{key}"] = run
        return run

    def _end_like(self, public: Run, run: Run) -> None:
        """End a job's or a point's run for the operator, made after the one for all had ended."""
        status = self._api.get_run(public.info.run_id).info.status
        if status != "RUNNING" and run.info.status == "RUNNING":
            self._api.set_terminated(run.info.run_id, status, max(run.info.start_time, _now()))

    def _find_or_create(
        self, experiment: str, key: str, name: str, tags: dict[str, str], now: int
    ) -> Run:
        runs = self._with_key(experiment, key)
        if not runs:
            made = self._api.create_run(experiment, start_time=now, run_name=name, tags=tags)
            runs = self._with_key(experiment, key) or [made]
        # Another machine may have done the same at the same moment, or a server that was ended
        # before it could answer: the first stays, and with it what somebody has written into.
        for double in runs[1:]:
            if not (double.data.metrics or double.data.params):
                self._put_away(double.info.run_id)
        return runs[0]

    def _put_away(self, double: str) -> None:
        """Delete an empty run that was made twice; where we may not, have it found no more."""
        from mlflow.exceptions import MlflowException  # noqa: TID251

        try:
            self._api.delete_run(double)
        except MlflowException:  # a user who may edit and not delete: the steps of a stack
            self._api.set_tag(double, KEY_TAG, f"a double: {double}")
            self._api.set_terminated(double, "KILLED")

    def _runs_of(
        self, identity: Identity, target: str, used: Sequence[str]
    ) -> Iterator[tuple[str, Run]]:
        """Yield a target's run in each experiment: in the used ones, and where it is already.

        A job's last step may have nothing for the operator, where other steps had.
        """
        for experiment in EXPERIMENTS:
            if experiment in used:
                yield experiment, self._run(identity, experiment, target)
            elif found := self._api.get_experiment_by_name(experiment):
                for run in self._with_key(found.experiment_id, identity.key(target)):
                    yield experiment, run

    def _with_key(self, experiment: str, key: str) -> list[Run]:
        return list(
            self._api.search_runs(
                [experiment],
                f"tags.`{KEY_TAG}` = '{key}'",
                order_by=["attributes.start_time ASC", "attributes.run_id ASC"],
            )
        )

    # --- lines

    def _send(self, outbox: Outbox, batch: list[Line]) -> None:
        identity, first = outbox.identity, batch[0]
        if first["kind"] == "begin":
            for _, run in self._runs_of(identity, first["target"], [first["experiment"]]):
                self._api.update_run(run.info.run_id, status="RUNNING")
            return
        if first["kind"] == "end":
            self._end(identity, batch[-1])
            return
        run = self._run(identity, first["experiment"], first["target"])
        run_id = run.info.run_id
        match first["kind"]:
            case "metric":
                self._send_metrics(run_id, batch, identity)
            case "param":
                self._send_params(run_id, batch)
            case "tag":
                for line in batch:
                    self._api.set_tag(run_id, line["key"], line["value"])
            case "artifact":
                for line in batch:
                    self._api.log_artifact(run_id, str(outbox.file(line["file"])), line["folder"])
            case "dataset":
                for line in batch:
                    self._send_dataset(run_id, line)
            case "model":
                for line in batch:
                    self._register(run, line, outbox)

    def _send_metrics(self, run_id: str, batch: list[Line], identity: Identity) -> None:
        from mlflow.entities import Metric  # noqa: TID251

        known = self._known.setdefault(run_id, set())
        unseen = {line["key"] for line in batch} - {key for key, _ in known}
        if unseen:  # a history costs a request each: ask for those alone that there are
            unseen &= self._api.get_run(run_id).data.metrics.keys()
        for key in unseen:
            known |= {(key, m.step) for m in self._api.get_metric_history(run_id, key)}
        fresh: dict[tuple[str, int], Metric] = {}
        for line in batch:
            place = (line["key"], line["step"])
            if place not in known:
                told = shown_time(line["time"], identity, line["experiment"])
                fresh[place] = Metric(line["key"], line["value"], told, line["step"])
        if fresh:
            self._api.log_batch(run_id, metrics=list(fresh.values()))
        known |= set(fresh)

    def _send_params(self, run_id: str, batch: list[Line]) -> None:
        from mlflow.entities import Param  # noqa: TID251

        stored = self._api.get_run(run_id).data.params
        fresh = {x["key"]: Param(x["key"], x["value"]) for x in batch if x["key"] not in stored}
        params = list(fresh.values())
        for start in range(0, len(params), 100):  # as many as MLflow takes
            self._api.log_batch(run_id, params=params[start : start + 100])

    def _send_dataset(self, run_id: str, line: Line) -> None:
        from mlflow.entities import Dataset, DatasetInput  # noqa: TID251

        data = Dataset(line["name"], line["digest"], "confide", '{"ledger": true}')
        self._api.log_inputs(run_id, [DatasetInput(data, [])])

    def _register(self, run: Run, line: Line, outbox: Outbox) -> None:
        """Make the folder a version of the model, unless another run has made it one."""
        from mlflow.exceptions import MlflowException  # noqa: TID251

        name, run_id = line["name"], run.info.run_id
        versions = self._api.search_model_versions(f"name = '{name}'")
        wanted = line["tags"]["confide.spec_hash"]
        if any(version.tags.get("confide.spec_hash") == wanted for version in versions):
            return
        # An earlier version's outbox may name these too: the result has the operator's numbers.
        for file in (f for f in line["files"] if Path(f).name not in {RESULT, CHECKSUMS}):
            self._api.log_artifact(run_id, str(outbox.file(file)), "model")
        with suppress(MlflowException):  # it exists
            self._api.create_registered_model(name)
        self._api.create_model_version(
            name,
            f"{run.info.artifact_uri}/model",
            run_id,
            tags=line["tags"],
            description=line["description"],
        )

    def _end(self, identity: Identity, line: Line) -> None:
        for target in line["targets"]:
            for experiment, run in self._runs_of(identity, target, line["experiments"]):
                ended = shown_time(line["time"], identity, experiment)
                ended = max(ended, run.info.start_time)  # a clock that was set back meanwhile
                self._api.set_terminated(run.info.run_id, line["status"], ended)


def send_all(deployment: Deployment) -> int:
    """Send what earlier steps could not; return how many outboxes still hold something."""
    for gone in deployment.outbox.glob("*.sent"):  # whose removal was interrupted
        shutil.rmtree(gone, ignore_errors=True)
    delivery, left = Delivery(deployment), 0
    for outbox in sorted(Outbox.all(deployment.outbox), key=_turn):
        try:
            delivery.deliver(outbox)
        except TrackingDown:
            left += 1
    return left


def unsent(deployment: Deployment) -> int:
    """Return how many steps have something to say that MLflow has not heard yet."""
    return sum(bool(outbox.unsent()[1]) for outbox in Outbox.all(deployment.outbox))


def _now() -> int:
    return int(time.time() * 1000)


def _revives(line: Line) -> bool:
    """Return whether a line says that the whole job runs: late, it may have ended meanwhile."""
    return bool(line["kind"] == "begin" and line["target"] == "parent")


def _turn(outbox: Outbox) -> tuple[bool, int]:
    """Return when to send an outbox: one that ends its whole job after all the others."""
    last = (outbox.unsent()[1] or [{"time": 0}])[-1]
    return "parent" in last.get("targets", ()), last["time"]


def reachable(deployment: Deployment) -> bool:
    """Return whether MLflow answers, after a few seconds at most."""
    try:
        with _faults():
            _client(deployment).search_experiments(max_results=1)
    except TrackingDown:
        return False
    return True


PATIENCE = 30.0  # seconds between attempts to reach a tracker that is down
EVERY = 5.0  # seconds between deliveries of a step that is running
_UNFIT = re.compile(r"[^\w./ -]")


class Tracker:
    """One step's runs in MLflow; every call returns at once, whether MLflow is there or not."""

    def __init__(self, deployment: Deployment, identity: Identity) -> None:
        self._identity = identity
        self._outbox = Outbox.create(deployment.outbox, identity)
        self._deployment = deployment
        self._delivery = Delivery(deployment)
        self._next, self._down = 0.0, False
        self._used = {PUBLIC}

    def begin(self) -> None:
        """Mark the run and the step as running, also when an earlier attempt ended them."""
        for target in ("parent", "step"):
            self._add(PUBLIC, target, "begin")

    def publishable(
        self, values: Mapping[str, Publishable], step: int = 0, *, target: str = "step"
    ) -> None:
        """Record `dp` and `public` numbers.

        Raises:
            TypeError: a value of another type.
        """
        for name, value in values.items():
            if not isinstance(value, Dp | Public):
                raise TypeError(f"metric {name}: only Dp and Public values are publishable")
            self._metric(PUBLIC, target, name, value, step)

    def operator(
        self, values: Mapping[str, Operator], step: int = 0, *, target: str = "step"
    ) -> None:
        """Record numbers for the operator alone.

        Raises:
            TypeError: a value of another type.
        """
        for name, value in values.items():
            if not isinstance(value, Operator):
                raise TypeError(f"metric {name}: only Operator values belong here")
            self._metric(self._restricted, target, name, value, step)

    def labelled(self, name: str, value: Labelled, step: int = 0, *, target: str = "step") -> None:
        """Record a number where its own type sends it."""
        if isinstance(value, Operator):
            self.operator({name: value}, step, target=target)
        else:
            self.publishable({name: value}, step, target=target)

    def settings(
        self, values: Mapping[str, bool | int | float | str], *, target: str = "step"
    ) -> None:
        """Record settings, which are public, as parameters."""
        for name, value in values.items():
            text = f"{value:g}" if isinstance(value, float) else str(value)
            self._add(PUBLIC, target, "param", key=_fit(name), value=text[:500])

    def tag(self, name: str, value: str, *, target: str = "step") -> None:
        """Record a word or two about the run."""
        self._add(PUBLIC, target, "tag", key=_fit(name), value=value[:4000])

    def artifact(self, file: Path, label: Label, folder: str = "", *, target: str = "step") -> None:
        """Keep a file with the run, in the experiment of its label."""
        experiment = self._restricted if label is Label.OPERATOR else PUBLIC
        kept = self._outbox.keep(file)
        self._add(experiment, target, "artifact", file=kept, folder=folder or None)

    def dataset(self, name: str, ledger_id: str) -> None:
        """Name the data set that a release was charged to: no counts, no contents."""
        self._add(PUBLIC, "step", "dataset", name=name, digest=ledger_id[:36])

    def model(
        self, name: str, files: Sequence[Path], statement: str, tags: Mapping[str, str]
    ) -> None:
        """Register a model's files as a version of it, once, with its privacy statement.

        Args:
            name: of the model.
            files: each of them fit for publication.
            statement: what the model promises, in words.
            tags: of the version.
        """
        self._add(
            PUBLIC,
            "step",
            "model",
            name=name,
            files=[self._outbox.keep(file) for file in files],
            tags={**tags, "confide.spec_hash": self._identity.spec_hash},
            description=statement[:4000],
        )

    def flush(self) -> None:
        """Send now what can be sent, unless MLflow was down a moment ago."""
        self._deliver()

    def finish(self, status: str, *, also: tuple[str, ...] = ()) -> None:
        """End the step's runs (FINISHED, FAILED or KILLED) and send everything.

        Args:
            status: MLflow's word for how it ended.
            also: `point` or `parent`, when this step was its last.
        """
        self._next = 0.0
        if "parent" in also:  # of the whole job: what was left behind comes before
            self._deliver()
            self.send_left_behind()
        self._outbox.add(
            kind="end", status=status, targets=["step", *also], experiments=sorted(self._used)
        )
        if not self._down:
            self._next = 0.0
        self._deliver()

    def send_left_behind(self) -> None:
        """Send what earlier steps could not, if MLflow answers now."""
        if not self._down:
            send_all(self._deployment)

    def leave(self, status: str, *, also: tuple[str, ...] = ()) -> None:
        """End the runs, as `finish`, on disk only: the process has no time to reach anybody."""
        self._outbox.add(
            kind="end", status=status, targets=["step", *also], experiments=sorted(self._used)
        )

    def url(self, target: str = "step") -> str:
        """Return the run's page, or '' when there is none or MLflow was away a moment ago."""
        if self._down:
            return ""
        try:
            return self._delivery.url(self._identity, target)
        except TrackingDown:
            return ""

    @property
    def shown_run(self) -> str:
        """The run's key, as anyone may know it."""
        return shown_key(self._identity, PUBLIC)

    @property
    def _restricted(self) -> str:
        return PUBLIC if self._identity.made_up else OPERATOR

    def _metric(self, experiment: str, target: str, name: str, value: Labelled, step: int) -> None:
        number = float(value.value)
        if math.isfinite(number):
            self._add(experiment, target, "metric", key=_fit(name), value=number, step=step)
        else:  # MLflow would store infinity as the largest float
            self._add(experiment, target, "tag", key=_fit(name), value=str(number))

    def _add(self, experiment: str, target: str, kind: str, **line: object) -> None:
        self._used.add(experiment)
        self._outbox.add(kind=kind, experiment=experiment, target=target, **line)
        if time.monotonic() >= self._next:
            self._deliver()

    def _deliver(self) -> None:
        if time.monotonic() < self._next:
            return
        try:
            self._delivery.deliver(self._outbox)
            self._next, self._down = time.monotonic() + EVERY, False
        except TrackingDown as error:
            say(f"tracking is down ({error}): kept on disk, sent later", "warning")
            self._next, self._down = time.monotonic() + PATIENCE, True


def _fit(name: str) -> str:
    """Return the name in the characters that MLflow allows."""
    return _UNFIT.sub("_", name)
