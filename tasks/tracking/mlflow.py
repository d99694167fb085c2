"""Delivery of event logs to MLflow: each event once, later if MLflow is unreachable.

There are two experiments. Publishable results are in the public one (`PUBLIC`), all other results
about private data in the operator's (`OPERATOR`). Only this module chooses the experiment, by the
label of a number or file.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from dp_core.labels import Label
from tasks.runtime.deployment import Deployment
from tasks.runtime.log import log
from tasks.storage.journal import exclusive
from tasks.storage.store import CHECKSUMS, RESULT
from tasks.tracking.event_log import (
    INFINITE,
    KINDS,
    VERDICT,
    AttemptEnded,
    Begun,
    ChargedDataset,
    Event,
    EventLog,
    Identity,
    LoggedArtifact,
    LoggedModel,
    Metric,
    ModelShown,
    Param,
    Tag,
    Target,
    fit,
    now,
)

if TYPE_CHECKING:
    from mlflow.entities import Run  # noqa: TID251 - this is the place
    from mlflow.tracking import MlflowClient  # noqa: TID251

PUBLIC, OPERATOR = "confide", "confide-operator"
KEY_TAG = "confide.key"
ALIAS = "promotable"
AGAINST = ("contradicted", "invalid")  # verdicts with which a version loses the alias
_AT_ONCE = 1000  # metrics that MLflow takes in one request
_DAY = 86_400_000  # milliseconds
_COST = re.compile(r"(epsilon|delta)(/|$)")
_TIME_OF_DAY = re.compile(r"[ T]\d\d:\d\d.*")
VIEW = "models"  # of the table of runs: `?viewStateShareKey=` opens MLflow's page with it
TRAINING_VIEW = "workflowType=machine_learning"  # selects MLflow's menus for models
_COLUMNS = ("epsilon", "delta", "f1", "mlm_accuracy_public", "exposure")
_PARENT = "mlflow.parentRunId"
_REFUSED = "Refused before the first release"  # the row that holds refused jobs
_EXPERIMENT = {
    # Without this tag, MLflow's pages may show conversations instead of training runs.
    "mlflow.experimentKind": "custom_model_development",
    f"mlflow.sharedViewState.{VIEW}": json.dumps(
        {"selectedColumns": [*(f"metrics.`{name}`" for name in _COLUMNS), f"tags.`{VERDICT}`"]}
    ),
}
# Must be set before MLflow is imported: it disables usage reports.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


class TrackingDown(Exception):
    """MLflow cannot be reached; undelivered events stay on disk."""


def experiment_of(label: Label, identity: Identity) -> str:
    """Return the experiment that may hold an event with this label.

    The runs of a private selection are the operator's alone: MLflow stamps runs, artifacts and
    versions of models with its own clock, and the time between two of them would reveal how many
    trainings there were.
    """
    restricted = identity.hides_count or (label is Label.OPERATOR and not identity.made_up)
    return OPERATOR if restricted else PUBLIC


def shown_time(milliseconds: int, identity: Identity, experiment: str) -> int:
    """Return the time that an experiment may show; for private data, the public one shows the day.

    The duration of a step reveals the size of the data.
    """
    if _may_know_times(identity, experiment):
        return milliseconds
    return milliseconds - milliseconds % _DAY


def shown_key(identity: Identity, experiment: str) -> str:
    """Return the run's key as the experiment may show it; Airflow's keys contain the start time."""
    if _may_know_times(identity, experiment):
        return identity.run_key
    return identity.hidden(identity.run_key)[:16]


def shown_name(identity: Identity, experiment: str) -> str:
    """Return the run's name as the experiment may show it: with the day, without the time."""
    if _may_know_times(identity, experiment):
        return identity.run_name
    return f"{_TIME_OF_DAY.sub('', identity.run_name)} · {shown_key(identity, experiment)[:6]}"


def _may_know_times(identity: Identity, experiment: str) -> bool:
    return identity.made_up or experiment == OPERATOR


def grouped(events: Sequence[Event], identity: Identity) -> list[list[Event]]:
    """Return the events grouped by kind and run; a run's beginning is first and its end last.

    The end of an earlier attempt is omitted if a later attempt has begun.
    """
    groups: dict[tuple[int, str, str, str], list[Event]] = {}
    began = max((i for i, event in enumerate(events) if isinstance(event, Begun)), default=-1)
    for i, event in enumerate(events):
        if i >= began or not isinstance(event, AttemptEnded):
            label = getattr(event, "label", Label.PUBLIC)
            key = (
                KINDS.index(type(event)),
                experiment_of(label, identity),
                event.target,
                event.model,
            )
            groups.setdefault(key, []).append(event)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def _page(run: Run) -> str:
    """Return the address of a run's page, within the pages of MLflow."""
    return f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"


def _is_of_release(run: Run) -> bool:
    """Return whether a run below a job is a model's, or a step's that charged a data set."""
    charged = run.inputs is not None and bool(run.inputs.dataset_inputs)
    return charged or "confide.step" not in run.data.tags


def _client(deployment: Deployment) -> MlflowClient:
    # A step must not wait minutes for an unreachable MLflow; it delivers again later.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    # A repeated request could create a second run.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow.tracking import MlflowClient  # noqa: TID251

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=deployment.tracking, registry_uri=deployment.tracking)


@contextmanager
def _faults() -> Iterator[None]:
    """Turn every error of an unreachable MLflow into `TrackingDown`."""
    from mlflow.exceptions import MlflowException  # noqa: TID251
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise TrackingDown(type(error).__name__) from error


class Delivery:
    """Delivers event logs to one MLflow, remembering the runs it has found."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._runs: dict[str, Run] = {}
        self._known: dict[str, set[tuple[str, int]]] = {}

    def deliver(self, events: EventLog) -> bool:
        """Deliver the new events; return False if another process delivers them.

        Raises:
            TrackingDown: MLflow did not accept all events; the rest stays on disk.
        """
        with events.delivering() as ours:
            if not ours:
                return False
            self._deliver_new(events)
            events.remove_if_delivered()
            return True

    def _deliver_new(self, log: EventLog) -> None:
        identity, (events, end) = log.identity, log.undelivered()
        if not events:
            return
        turns = [event for event in events if isinstance(event, Begun | AttemptEnded)]
        over = bool(turns) and isinstance(turns[-1], AttemptEnded)
        with _faults():
            for start in range(0, len(events), _AT_ONCE):
                for group in grouped(events[start : start + _AT_ONCE], identity):
                    # A late `Begun` of the whole job is omitted: the job may have ended meanwhile.
                    if not (over and isinstance(group[0], Begun) and group[0].target == "parent"):
                        self._send(log, identity, group)
        log.confirm(end)

    def url(self, identity: Identity, target: Target) -> str:
        """Return the address of a run's page, or '' when no server shows it."""
        if not self._deployment.tracking_ui:
            return ""
        with _faults():
            run = self._run(identity, experiment_of(Label.PUBLIC, identity), target)
        return f"{self._deployment.tracking_ui}/{_page(run)}"

    # --- runs

    @cached_property
    def _api(self) -> MlflowClient:
        """The client, which may create the database's tables: first used by `_run`, in its lock."""
        return _client(self._deployment)

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException  # noqa: TID251

        experiment = self._api.get_experiment_by_name(name)
        if experiment is None:
            served = self._deployment.tracking.startswith(("http://", "https://"))
            artifacts = None if served else (self._deployment.home / "mlruns" / name).as_uri()
            try:
                return str(self._api.create_experiment(name, artifacts, tags=_EXPERIMENT))
            except MlflowException:  # another machine created it first
                experiment = self._api.get_experiment_by_name(name)
        if experiment is None:
            raise TrackingDown("no experiment")
        for tag, value in _EXPERIMENT.items() - experiment.tags.items():  # of another creator
            self._api.set_experiment_tag(experiment.experiment_id, tag, value)
        return str(experiment.experiment_id)

    def _run(self, identity: Identity, experiment: str, target: Target) -> Run:
        """Return the run of a step, a model or the job; create it and its parents if needed."""
        key = identity.key(target)
        known = self._runs.get(f"{experiment}/{key}")
        if known is not None:
            return known
        tags, began = {KEY_TAG: key}, now()
        tags |= {"confide.run_key": shown_key(identity, experiment)}
        if identity.made_up:
            tags["data"] = "made-up"
        hidden = not _may_know_times(identity, experiment)
        if target == "parent":
            name, began = shown_name(identity, experiment), 0 if hidden else began
        else:
            above: Target = "model" if target == "step" and identity.model else "parent"
            parent = self._run(identity, experiment, above)
            tags[_PARENT] = parent.info.run_id
            began = parent.info.start_time if hidden else began
            name = identity.model if target == "model" else identity.task
            if identity.model:
                tags["confide.model"] = identity.model
        if target == "step":
            tags |= {"confide.spec_hash": identity.spec_hash, "confide.step": identity.step}
        events = self._deployment.events
        events.mkdir(parents=True, exist_ok=True, mode=0o700)
        # One process of this machine at a time creates databases, experiments and runs.
        with exclusive(events / "creating.lock"):
            run = self._find_or_create(self._experiment(experiment), key, name, tags, began)
        if experiment == OPERATOR and target != "step" and not identity.hides_count:
            self._end_like(self._run(identity, PUBLIC, target), run)
        self._runs[f"{experiment}/{key}"] = run
        return run

    def _end_like(self, public: Run, run: Run) -> None:
        """End the operator's run of a job or model if the public run has ended before."""
        status = self._api.get_run(public.info.run_id).info.status
        if status != "RUNNING" and run.info.status == "RUNNING":
            self._api.set_terminated(run.info.run_id, status, max(run.info.start_time, now()))

    def _find_or_create(
        self, experiment: str, key: str, name: str, tags: dict[str, str], began: int
    ) -> Run:
        """Return the run with a key; a new run without a time starts after all runs of its list.

        The newest job is then the first of the list, which shows only the day of a private job.
        """
        runs = self._with_key(experiment, key)
        if not runs:
            if not began:
                began = now() - now() % _DAY
                for last in self._api.search_runs(
                    [experiment], order_by=["attributes.start_time DESC"], max_results=1
                ):
                    began = max(began, last.info.start_time + 1)
            made = self._api.create_run(experiment, start_time=began, run_name=name, tags=tags)
            runs = self._with_key(experiment, key) or [made]
        # Another machine may have created a duplicate at the same moment, or a server may have
        # stopped before its answer. The first run stays, and so do duplicates with numbers.
        for double in runs[1:]:
            if not (double.data.metrics or double.data.params):
                self._put_away(double.info.run_id)
        return runs[0]

    def _put_away(self, double: str) -> None:
        """Delete an empty duplicate run, or hide it if this user may not delete."""
        from mlflow.exceptions import MlflowException  # noqa: TID251

        try:
            self._api.delete_run(double)
        except MlflowException:  # a user who may edit and not delete: the steps of a stack
            self._api.set_tag(double, KEY_TAG, f"a double: {double}")
            self._api.set_terminated(double, "KILLED")

    def _runs_of(self, identity: Identity, target: Target) -> Iterator[tuple[str, Run]]:
        """Yield a target's run in each experiment: the public one, and the operator's if it exists.

        The last step of a job may have no numbers for the operator although earlier steps had.
        """
        if identity.hides_count:
            yield OPERATOR, self._run(identity, OPERATOR, target)
            return
        yield PUBLIC, self._run(identity, PUBLIC, target)
        if restricted := self._api.get_experiment_by_name(OPERATOR):
            for run in self._with_key(restricted.experiment_id, identity.key(target)):
                yield OPERATOR, run

    def _with_key(self, experiment: str, key: str) -> list[Run]:
        has_key = f"tags.`{KEY_TAG}` = '{key}'"
        order = ["attributes.start_time ASC", "attributes.run_id ASC"]
        return list(self._api.search_runs([experiment], has_key, order_by=order))

    # --- events

    def _send(self, log: EventLog, identity: Identity, group: list[Event]) -> None:
        from mlflow.entities import Dataset, DatasetInput  # noqa: TID251

        first = group[0]
        if first.model:
            identity = replace(identity, model=first.model)
        if isinstance(first, Begun):
            for _, run in self._runs_of(identity, first.target):
                self._api.update_run(run.info.run_id, status="RUNNING")
                if first.target == "parent":
                    self._move(run.info.run_id, "")
            return
        if isinstance(first, AttemptEnded):
            self._end(identity, cast(AttemptEnded, group[-1]))
            return
        if isinstance(first, ModelShown):
            self._show(identity, first)
            return
        experiment = experiment_of(getattr(first, "label", Label.PUBLIC), identity)
        run = self._run(identity, experiment, first.target)
        if isinstance(first, Metric):
            numbers = cast(list[Metric], group)
            self._send_metrics(run.info.run_id, numbers, identity, experiment)
            costs = [m for m in numbers if _COST.match(m.name)]
            if costs and experiment == PUBLIC and not identity.made_up:
                # The operator's experiment shows a model's ε and δ next to its F1.
                run = self._run(identity, OPERATOR, first.target)
                self._send_metrics(run.info.run_id, costs, identity, OPERATOR)
        elif isinstance(first, Param):
            self._send_params(run.info.run_id, cast(list[Param], group))
        else:
            for event in group:
                match event:
                    case Tag():
                        self._api.set_tag(run.info.run_id, fit(event.name), event.value[:4000])
                    case LoggedArtifact():
                        file = str(log.kept(event.file))
                        self._api.log_artifact(run.info.run_id, file, event.folder or None)
                    case ChargedDataset():
                        data = Dataset(
                            event.name, event.ledger_id[:36], "confide", '{"ledger": true}'
                        )
                        self._api.log_inputs(run.info.run_id, [DatasetInput(data, [])])
                    case LoggedModel():
                        self._register(run, event, log)

    def _send_metrics(
        self, run_id: str, group: list[Metric], identity: Identity, experiment: str
    ) -> None:
        from mlflow.entities import Metric as Number  # noqa: TID251

        known = self._known.setdefault(run_id, set())
        unseen = {fit(event.name) for event in group} - {name for name, _ in known}
        if unseen:  # each history needs a request: read only those that exist
            unseen &= self._api.get_run(run_id).data.metrics.keys()
        for name in unseen:
            known |= {(name, m.step) for m in self._api.get_metric_history(run_id, name)}
        fresh: dict[tuple[str, int], Number] = {}
        for event in group:
            point = (fit(event.name), event.step)
            # Without an earlier total to replace, an infinite one is shown in words alone.
            replaces = event.value != INFINITE or point[0] in dict(known)
            if replaces and point not in known:
                time_shown = shown_time(event.time, identity, experiment)
                fresh[point] = Number(point[0], event.value, time_shown, event.step)
        if fresh:
            self._api.log_batch(run_id, metrics=list(fresh.values()))
        known |= set(fresh)

    def _send_params(self, run_id: str, group: list[Param]) -> None:
        from mlflow.entities import Param as Setting  # noqa: TID251

        stored = self._api.get_run(run_id).data.params
        fresh = {fit(event.name): event.value[:500] for event in group}
        params = [Setting(name, value) for name, value in fresh.items() if name not in stored]
        for start in range(0, len(params), 100):  # MLflow's limit per request
            self._api.log_batch(run_id, params=params[start : start + 100])

    def _register(self, run: Run, model: LoggedModel, log: EventLog) -> None:
        """Register the files as a version of the model, unless it exists, and set its verdict.

        A contradiction is final: no later delivery, of a newer or an older run, changes it.
        """
        from mlflow.exceptions import MlflowException  # noqa: TID251

        wanted = model.tags["confide.spec_hash"]
        versions = self._api.search_model_versions(f"name = '{model.name}'")
        known = [v for v in versions if v.tags.get("confide.spec_hash") == wanted]
        if not known:
            # A result file would contain the operator's numbers.
            for file in (f for f in model.files if Path(f).name not in {RESULT, CHECKSUMS}):
                self._api.log_artifact(run.info.run_id, str(log.kept(file)), model.folder)
            with suppress(MlflowException):  # it exists
                self._api.create_registered_model(model.name)
            known = [
                self._api.create_model_version(
                    model.name,
                    f"{run.info.artifact_uri}/{model.folder}",
                    run.info.run_id,
                    tags=model.tags,
                    description=model.description,
                )
            ]
        for version in known:
            if model.tags.get(VERDICT) != AGAINST[0] and version.tags.get(VERDICT) == AGAINST[0]:
                continue
            for name, value in model.tags.items():
                if version.tags.get(name) != value:
                    self._api.set_model_version_tag(model.name, version.version, name, value)
            self._mark(model, str(version.version))

    def _mark(self, model: LoggedModel, version: str) -> None:
        """Set a version's alias if its verdict allows it, or remove the alias."""
        from mlflow.exceptions import MlflowException  # noqa: TID251

        aliases = self._api.get_registered_model(model.name).aliases
        holds = str(aliases.get(ALIAS, "")) == version
        if model.alias and not holds:
            self._api.set_registered_model_alias(model.name, model.alias, version)
        elif holds and model.tags.get(VERDICT) in AGAINST:
            try:
                self._api.delete_registered_model_alias(model.name, ALIAS)
            except MlflowException:  # a user who may edit and not delete: the steps of a stack
                fix = "An administrator of MLflow must remove it."
                log(f"{model.name} {version}: audits contradict its claim. {fix}", "error")

    def _end(self, identity: Identity, event: AttemptEnded) -> None:
        """End the runs. In the public experiment, a failure on private data looks like a stop.

        Whether a step could read private text depends on the text, without noise.
        """
        failed = event.status == "FAILED" and not event.contradicted
        hidden = failed and not identity.made_up
        for target in ("step", *event.also):
            if hidden:
                self._run(identity, OPERATOR, target)
            for experiment, run in self._runs_of(identity, target):
                ended = shown_time(event.time, identity, experiment)
                ended = max(ended, run.info.start_time)  # a clock that was set back meanwhile
                status = "KILLED" if hidden and experiment == PUBLIC else event.status
                self._api.set_terminated(run.info.run_id, status, ended)
        if event.refused and identity.made_up:
            self._set_aside(identity)

    def _show(self, identity: Identity, shown: ModelShown) -> None:
        """Move a model's runs to the top of the list, and its replicates and its job below it."""
        below: list[tuple[Identity, Target]] = [
            (replace(identity, model=name), "model") for name in shown.replicates
        ]
        below += [(identity, "parent")] if shown.holds_job else []
        for experiment, run in self._runs_of(identity, "model"):
            run_id = run.info.run_id
            self._move(run_id, "")
            ended = max(shown_time(shown.time, identity, experiment), run.info.start_time)
            if self._api.get_run(run_id).info.status != shown.status:
                self._api.set_terminated(run_id, shown.status, ended)
            self._api.update_run(run_id, name=shown.name)
            job = _page(self._run(identity, experiment, "parent"))
            edition = "report" if experiment == PUBLIC else "operator_report"
            link = f"[Report]({job}/artifacts/{edition}/report.html?{TRAINING_VIEW})"
            self._api.set_tag(
                run_id, "mlflow.note.content", f"{link}\n\n{shown.description}"[:4000]
            )
            for nested, target in below:
                for place, child in self._runs_of(nested, target):
                    if place == experiment:
                        self._move(child.info.run_id, run_id)

    def _move(self, run: str, parent: str) -> None:
        """Nest a run below another run, or move it to the top of the list."""
        if parent:
            self._api.set_tag(run, _PARENT, parent)
        elif _PARENT in self._api.get_run(run).data.tags:
            self._api.delete_tag(run, _PARENT)

    def _set_aside(self, identity: Identity) -> None:
        """Move a refused job below the row of all refused jobs, unless it has made a release."""
        for _, job in self._runs_of(identity, "parent"):
            place, began = job.info.experiment_id, job.info.start_time
            below = self._api.search_runs([place], f"tags.`{_PARENT}` = '{job.info.run_id}'")
            if not any(_is_of_release(run) for run in below):
                refused = self._find_or_create(
                    place, _REFUSED, _REFUSED, {KEY_TAG: _REFUSED}, began
                )
                self._api.set_terminated(refused.info.run_id, "KILLED", began)
                self._move(job.info.run_id, refused.info.run_id)


def send_all(deployment: Deployment) -> int:
    """Deliver all remaining events; return the number of logs that MLflow did not fully accept."""
    for gone in deployment.events.glob("*.removed"):  # logs whose removal was interrupted
        shutil.rmtree(gone, ignore_errors=True)
    delivery, left = Delivery(deployment), 0
    for events in sorted(EventLog.all(deployment.events), key=_turn):
        try:
            delivery.deliver(events)
        except TrackingDown:
            left += 1
    return left


def unsent(deployment: Deployment) -> int:
    """Return the number of steps with undelivered events."""
    return sum(bool(log.undelivered()[0]) for log in EventLog.all(deployment.events))


def reachable(deployment: Deployment) -> bool:
    """Return whether MLflow answers, after a few seconds at most."""
    try:
        with _faults():
            _client(deployment).search_experiments(max_results=1)
    except TrackingDown:
        return False
    return True


def _turn(log: EventLog) -> tuple[bool, int]:
    """Return the sort key of a log's delivery: a log that ends its whole job comes last."""
    events = log.undelivered()[0]
    ends_all = any(isinstance(e, AttemptEnded) and "parent" in e.also for e in events[-1:])
    return ends_all, max((event.time for event in events[-1:]), default=0)
