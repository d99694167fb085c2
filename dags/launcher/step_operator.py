"""What every launcher shares: the work of a task, its environment, its answer, its failures.

A DAG file says `step("vocabulary", plan=...)`; which launcher starts the step is the deployment's
choice (`CONFIDE_LAUNCHER`), and only the chosen one's provider is ever imported.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from airflow.sdk import BaseOperator, BaseOperatorLink
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from dags.launcher.notify import addresses, notify
from dags.names import NAMES
from tasks.protocol import (
    NoReader,
    RunContext,
    StepSpec,
    SweepPoint,
    environment_for,
    hides_count,
)
from tasks.protocol.messages import Follower

CHECKOUT = Path(__file__).resolve().parents[2]
TRAINING = "training"  # pool: as many models at a time as the machine has devices (locally 1)
LIGHT = "default_pool"
PAGE_MARK = "__page_"  # in the id of a run that goes on where another has left off
LONGEST_ARGUMENT = 100_000  # bytes; Linux refuses a single argument above 128 KiB
SEEDS_AT = "/var/lib/confide-seeds"  # in the image: docker/task.Dockerfile
BAD_INPUT, BUDGET_EXCEEDED, CONTRADICTED = 2, 3, 4
UNFINISHED = 75  # its time was up: started again, it goes on where it was
_NEVER_RETRIED = {
    BAD_INPUT: "bad input",
    BUDGET_EXCEEDED: "privacy budget exceeded",
    CONTRADICTED: "an audit contradicts the claim",
}
_OPERATORS = {
    "process": ("dags.launcher.process_step", "ProcessStep"),
    "docker": ("dags.launcher.docker_step", "DockerStep"),
    "kubernetes": ("dags.launcher.kubernetes_step", "KubernetesStep"),
}
# Which of a scheduler's variables its containers and pods are given: these, and no others.
PLACES = (
    "CONFIDE_STORE",
    "CONFIDE_CLUSTER",
    "CONFIDE_CLUSTER_SECRETS",  # the name of a folder, which is mounted where it is needed
    "CONFIDE_CACHE_BYTES",
    "CONFIDE_TRACKING",
    "CONFIDE_TRACKING_UI",
    "CONFIDE_DEBUG",
    "CONFIDE_LOG",
    "CONFIDE_HOSTS",
    "GOOGLE_CLOUD_PROJECT",
    "STORAGE_EMULATOR_HOST",
)
SECRETS = (  # of these, a step gets what `tasks/protocol/least_privilege.py` says that it needs
    "CONFIDE_LEDGER",  # a database URL, with its password
    "CONFIDE_LEDGER_READER",  # the same database, by a user who cannot write
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
)
_LOG = logging.getLogger("airflow.task")

# --- the deployment


def home() -> Path:
    """Return the folder for everything that this deployment writes on this machine."""
    return Path(os.environ.get("CONFIDE_HOME") or CHECKOUT / ".confide").expanduser().resolve()


def store() -> str:
    """Return the URI under which every step has its own output folder."""
    return (os.environ.get("CONFIDE_STORE") or (home() / "store").as_uri()).rstrip("/")


def launcher() -> str:
    """Return how steps are started: process, docker or kubernetes.

    Raises:
        ValueError: another word; Airflow shows it as the DAG's import error.
    """
    name = os.environ.get("CONFIDE_LAUNCHER") or "process"
    if name not in _OPERATORS:
        raise ValueError(f"CONFIDE_LAUNCHER is {name!r}: use process, docker or kubernetes")
    return name


def forwarded_environment(*names: str) -> dict[str, str]:
    """Return what of the worker's environment a step is given: nothing of Airflow's.

    Args:
        names: of variables, besides those that `CONFIDE_FORWARDED_ENVIRONMENT` names.
    """
    more = os.environ.get("CONFIDE_FORWARDED_ENVIRONMENT", "").split()
    return {name: os.environ[name] for name in (*names, *more) if os.environ.get(name)}


# --- tasks


class Plan(Protocol):
    """From a run's parameters to the specs of its steps, by task name."""

    def __call__(
        self, params: Mapping[str, Any], point: SweepPoint | None
    ) -> Mapping[str, StepSpec]:
        """Return the specs by task name; tasks that the settings switch off are absent."""


def step(task_id: str, *, plan: Plan, **options: Any) -> BaseOperator:
    """Return the task that runs the step that `plan` names `task_id`.

    Args:
        task_id: the task's name in the plan.
        plan: from the run's parameters to its steps' specs; called when the task runs.
        options: any of BaseOperator's (`pool`, `trigger_rule`, `doc_md`), and `point`, the grid
            point of a mapped task.
    """
    options.setdefault("task_display_name", NAMES[task_id])
    module, name = _OPERATORS[launcher()]
    operator = getattr(import_module(module), name)
    task: BaseOperator = operator(task_id=task_id, plan=plan, **options)
    links = [MlflowRunLink(), *([ReportLink()] if task_id == "report" else [])]
    task.operator_extra_links = links
    return task


def defaults() -> dict[str, Any]:
    """Return what all tasks share: a fault is tried again, twice, later and later.

    Bad input and an exceeded budget are not faults: they fail at once (`failure`). Who is to be
    told of a failure is (`notify`).

    Raises:
        ValueError: an address in `CONFIDE_NOTIFY` is none; Airflow shows it as an import error.
    """
    addresses()  # what is wrong with them is an import error, and no surprise in a callback
    return {
        "owner": "confide",
        "retries": 2,
        "retry_delay": timedelta(seconds=10),
        "retry_exponential_backoff": True,
        "max_retry_delay": timedelta(minutes=5),
        "on_failure_callback": [log_failure, notify],
    }


@dataclass(frozen=True)
class Work:
    """One step to start: its spec, and the run it belongs to."""

    spec: StepSpec
    context: RunContext

    def arguments(self) -> list[str]:
        """Return the step's command line after the interpreter's name.

        The spec is a data: URI, so that it needs no shared folder to travel.
        """
        body = base64.b64encode(self.spec.model_dump_json().encode()).decode()
        uri = f"data:application/json;base64,{body}"
        return ["-m", "tasks", self.spec.step, "--spec", uri]

    def environment(self, environment: Mapping[str, str], *, apart: bool) -> dict[str, str]:
        """Return an environment without what the step does not need, and with its run.

        Args:
            environment: what the step would be told.
            apart: the step is kept apart from who starts it (a container, a pod).

        Raises:
            AirflowFailException: the step reads a ledger for which there is no reader.
        """
        try:
            told = environment_for(self.spec, environment, apart=apart)
        except NoReader as error:
            raise failure(BAD_INPUT, str(error)) from None
        run = self.context.model_dump_json()
        return told | {"CONFIDE_RUN_CONTEXT": run, "PYTHONUNBUFFERED": "1"}

    def answer(self, metrics: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Return what goes through XCom: where the output is, and publishable numbers."""
        return {"output": self.spec.output, "metrics": dict(metrics or {})}


def work_of(
    task_id: str, plan: Plan, context: Mapping[str, Any], point: Mapping[str, float] | None
) -> Work:
    """Return the work of a task in this run.

    Raises:
        AirflowFailException: the run's settings are wrong.
        AirflowSkipException: with these settings the run has no such step.
    """
    coordinates = SweepPoint.model_validate(dict(point)) if point else None
    name = task_id.rpartition(".")[2]
    specs = plan(context["params"], coordinates)
    if name not in specs:
        raise AirflowSkipException(f"{name} is no step of a run with these settings")
    every = specs if coordinates is None else plan(context["params"], None)
    run = context["dag_run"]
    first = run.run_id.partition(PAGE_MARK)[0]  # whose pages are one run for MLflow
    started = run.start_date or run.run_after
    return Work(
        spec=specs[name],
        context=RunContext(
            run_key=f"{run.dag_id}/{first}",
            run_name=f"{run.dag_id} {started:%Y-%m-%d %H:%M:%S}",
            task=name,
            point=coordinates.name if coordinates else "",
            ended=f"{run.dag_id}/",  # a DAG has one active run at most
            hides_count=hides_count(every.values()),
        ),
    )


class StepOperator:
    """The part of a launcher's operator that does not depend on how steps are started.

    Attributes:
        plan: from the run's parameters to its steps' specs.
        point: grid point of a mapped task.
        tracked_at: address of the step's run in MLflow, once the step has told it.
        verdicts: on the models that the step judged, in a sentence each.
        spec: of the step, once it is known.
    """

    template_fields = ("point",)
    task_id: str
    log: Any

    def __init__(
        self, *, plan: Plan, point: Mapping[str, float] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.plan = plan
        self.point = point
        self.tracked_at = ""
        self.verdicts: dict[str, str] = {}
        self.spec: StepSpec | None = None

    def execute(self, context: Any) -> dict[str, Any]:
        """Run the step to its end, and answer for its exit code."""
        work = self.work(context)
        code = UNFINISHED
        while code == UNFINISHED:
            code, told = self.run_step(work, context["ti"].map_index)
            self.hear(told)
        if code:
            raise failure(code, told.reason())
        return self.answer(work, self.numbers(work))

    def hear(self, told: Follower) -> None:
        """Remember what the step told of its run in MLflow and of the models that it judged."""
        self.tracked_at = told.tracked_at or self.tracked_at
        self.verdicts = {name: one.sentence for name, one in told.judged.items()} or self.verdicts

    def answer(self, work: Work, metrics: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Return what goes through XCom, with the verdicts of a step that judged models."""
        verdicts = {"verdicts": self.verdicts} if self.verdicts else {}
        return work.answer(metrics) | verdicts

    def work(self, context: Any) -> Work:
        """Return the task's work; its point names the task on Airflow's pages."""
        work = work_of(self.task_id, self.plan, context, self.point)
        self.spec = work.spec
        context["point_name"] = work.context.point
        self.log.info("Output: %s", work.spec.output)
        return work

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """Return which outputs the step has read and written; Airflow's provider calls it."""
        from dags.launcher.lineage import lineage_of  # where the provider is configured

        return lineage_of(self.spec) if self.spec else None

    def run_step(self, work: Work, map_index: int) -> tuple[int, Follower]:
        """Run the step once; return its exit code and what it told."""
        raise NotImplementedError

    def numbers(self, work: Work) -> dict[str, float]:
        """Return the result's publishable numbers, where this process can read the store."""
        return {}


# --- how it ended


def failure(exit_code: int, reason: str) -> AirflowException:
    """Return the exception for a step that did not answer 0: with or without another try.

    Args:
        exit_code: negative where a signal ended the process.
        reason: in one line.
    """
    if exit_code in _NEVER_RETRIED:
        how = f"exit code {exit_code}: {_NEVER_RETRIED[exit_code]}, not tried again"
        error: AirflowException = AirflowFailException(f"{reason} ({how})")
    else:
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        error = AirflowException(f"{reason} ({how})")
    error.exit_code = exit_code
    return error


def log_failure(context: Any) -> None:
    """Log what failed, why, and where the log is; Airflow calls it when no try is left."""
    ti = context["ti"]
    index = f" [{context.get('point_name') or ti.map_index}]" if ti.map_index >= 0 else ""
    reason = " ".join(str(context.get("exception") or "its process was lost").split())
    address = getattr(ti, "log_url", "")
    log = f" Log: {address}" if address else ""
    task = f"{ti.dag_id} · {ti.task_id}{index}, run {ti.run_id}"
    _LOG.error("FAILED %s: %s.%s", task, reason, log)


def publishable(result: str) -> dict[str, float]:
    """Return the numbers of a result.json that anyone may see, each metric's last value."""
    metrics = json.loads(result)["metrics"]
    ordered = sorted(metrics, key=lambda metric: metric.get("step", 0))
    return {m["name"]: m["value"] for m in ordered if m["label"] in {"dp", "public"}}


class MlflowRunLink(BaseOperatorLink):
    """The task's run in MLflow: its ε, F1 and exposure, and the settings that it was given."""

    name = "MLflow run"
    xcom_key = "mlflow_run"
    page = ""
    _menus = "?workflowType=machine_learning"  # MLflow's menus for models, not for conversations

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the address that the step told; empty when it told none, and no button then."""
        run = str(getattr(operator, "tracked_at", ""))
        return run + self.page + self._menus if run else ""


class ReportLink(MlflowRunLink):
    """The report that the last task of a run writes, in the edition that may be shown."""

    name = "Report"
    xcom_key = "report"
    page = "/artifacts/report/report.html"
