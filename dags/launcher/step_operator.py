"""The base of all launchers: a task's work, its result and its failures; and the process launcher.

A DAG file creates a task by `step("vocabulary", plan=...)`. The deployment chooses the launcher
(`CONFIDE_LAUNCHER`), and only the provider of this launcher is imported.
"""

import json
import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeAlias, TypedDict
from urllib.parse import unquote, urlparse

from airflow.sdk import BaseOperator, BaseOperatorLink
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from dags.launcher.outcome import BUDGET_EXCEEDED, CONTRADICTED, addresses, log_failure, notify
from dp_core.errors import BadInput
from tasks.protocol import CHECKOUT, HOME, TASK_PYTHON, fork_server
from tasks.protocol.messages import Follower, channel_file
from tasks.protocol.points import Point
from tasks.protocol.specs import STORE_SCHEME, RunContext, StepSpec
from tasks.protocol.step_process import StepProcess, Work

TRAINING = "training"  # pool: as many models at a time as the machine has devices (locally 1)
PAGE_MARK = "__page_"  # in the id of a run that continues the sweep of another run
SEEDS_AT = "/var/lib/confide-seeds"  # in the image: docker/task.Dockerfile
BAD_INPUT = 2
UNFINISHED = 75  # the time limit was reached: started again, the step continues
_NEVER_RETRIED = {
    BAD_INPUT: "bad input",
    BUDGET_EXCEEDED: "privacy budget exceeded",
    CONTRADICTED: "an audit contradicts the claim",
}
_OPERATORS = {
    "process": f"{__name__}:ProcessStep",
    "docker": "dags.launcher.docker_step:DockerStep",
    "kubernetes": "dags.launcher.kubernetes_step:KubernetesStep",
}
_IN_WORDS = {"pretraining": "pre-training", "finetuning": "fine-tuning"}
_TASKS = tomllib.loads((CHECKOUT / "dags" / "tasks.toml").read_text(encoding="utf-8"))
_VARIABLES = tomllib.loads(Path(__file__).with_name("variables.toml").read_text(encoding="utf-8"))
PLACES, SECRETS = (tuple(_VARIABLES[kind]) for kind in ("places", "secrets"))

# --- the deployment


def home() -> Path:
    """Return the folder for all files that this deployment writes on this machine."""
    return Path(os.environ.get("CONFIDE_HOME") or HOME).expanduser().resolve()


def store() -> str:
    """Return the URI that contains the output folder of every step."""
    return (os.environ.get("CONFIDE_STORE") or (home() / "store").as_uri()).rstrip("/")


def launcher() -> str:
    """Return the launcher's name: process, docker or kubernetes.

    Raises:
        ValueError: the name is unknown; Airflow shows the line as the DAG's import error.
    """
    name = os.environ.get("CONFIDE_LAUNCHER") or "process"
    if name not in _OPERATORS:
        raise ValueError(f"CONFIDE_LAUNCHER is {name!r}: use process, docker or kubernetes")
    return name


# --- tasks


# A function from a run's parameters and a grid point to the specs of its steps, by task name,
# without tasks that the settings switch off.
Plan: TypeAlias = Callable[[Mapping[str, Any], Point | None], Mapping[str, StepSpec]]


class NamedSteps(TypedDict):
    """An instance of a mapped task.

    Attributes:
        name: name of the instance on Airflow's pages.
        steps: names of the steps in the order in which they run, each with its grid point.
    """

    name: str
    steps: list[tuple[str, dict[str, Any] | None]]


def step(task_id: str, *, plan: Plan, **options: Any) -> BaseOperator:
    """Return the task that runs the step that `plan` names `task_id`.

    Args:
        task_id: the task's name in the plan.
        plan: function from the run's parameters to its steps' specs; called when the task runs.
        options: options of BaseOperator (`pool`, `trigger_rule`).
    """
    task: BaseOperator = _operator()(task_id=task_id, plan=plan, **shown(task_id), **options)
    if task_id == "report":
        task.operator_extra_links = [MlflowRunLink(), ReportLink()]
    return task


def each(task_id: str, named: Any, *, plan: Plan, **options: Any) -> Any:
    """Return the mapped task that runs the steps of each of these names, in their order.

    Args:
        task_id: the task's name.
        named: output of the task that lists the instances as `NamedSteps`.
        plan: as for `step`.
        options: options of BaseOperator.
    """
    options |= {"map_index_template": "{{ task.named.name }}", **shown(task_id)}
    return _operator().partial(task_id=task_id, plan=plan, **options).expand(named=named)


def _operator() -> Any:
    return resolve_name(_OPERATORS[launcher()])


def shown(task_id: str) -> dict[str, str]:
    """Return a task's name and description on Airflow's pages (`dags/tasks.toml`)."""
    task = _TASKS[task_id]
    return {"task_display_name": task.get("title") or title(task_id), "doc_md": task["doc"]}


def title(task_id: str) -> str:
    """Return a task's name on Airflow's pages; logs, links and MLflow use the id."""
    words = " ".join(_IN_WORDS.get(word, word) for word in task_id.split("_"))
    return words[:1].upper() + words[1:]


def defaults() -> dict[str, Any]:
    """Return the default arguments of all tasks: two retries, with growing delays.

    Bad input and an exceeded budget fail without a retry (`failure`). A failed task sends
    notifications (`notify`).

    Raises:
        ValueError: `CONFIDE_NOTIFY` holds an invalid address; Airflow shows an import error.
    """
    addresses()  # checked here, because an error in a callback would come too late
    return {
        "owner": "confide",
        "retries": 2,
        "retry_delay": timedelta(seconds=10),
        "retry_exponential_backoff": True,
        "max_retry_delay": timedelta(minutes=5),
        "on_failure_callback": [log_failure, notify],
    }


def work_of(
    name: str, plan: Plan, context: Mapping[str, Any], point: Mapping[str, Any] | None
) -> Work:
    """Return the work of a step in this run.

    Raises:
        AirflowFailException: the run's settings are invalid.
        AirflowSkipException: a run with these settings has no such step.
    """
    coordinates = Point.model_validate(dict(point)) if point else None
    specs = plan(context["params"], coordinates)
    if name not in specs:
        raise AirflowSkipException(f"{name} is not a step of a run with these settings")
    every = specs if coordinates is None else plan(context["params"], None)
    run = context["dag_run"]
    first = run.run_id.partition(PAGE_MARK)[0]  # all pages of a sweep are one run in MLflow
    started = run.start_date or run.run_after
    return Work(
        spec=specs[name],
        context=RunContext(
            run_key=f"{run.dag_id}/{first}",
            run_name=f"{run.dag_id} {started:%Y-%m-%d %H:%M:%S}",
            task=name,
            point=coordinates.name if coordinates else "",
            ended=f"{run.dag_id}/",  # a DAG has at most one active run
            hides_count=any(step.hides_count for step in every.values()),
        ),
    )


class StepOperator:
    """The base class of the launchers' operators.

    Airflow maps a task only over arguments that the operator's own class declares.

    Attributes:
        plan: function from the run's parameters to its steps' specs.
        named: the steps of an instance of a mapped task; other tasks run the step of their name.
        tracked_at: address of the last step's run in MLflow, once the step has sent it.
        verdicts: a sentence for each model that the steps judged.
        specs: the steps' specs, once they are known.
    """

    template_fields = ("named",)
    operator_extra_links: Collection[BaseOperatorLink] = ()  # set below
    task_id: str
    log: Any

    def __init__(self, *, plan: Plan, named: NamedSteps | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.plan = plan
        self.named = named
        self.tracked_at = ""
        self.verdicts: dict[str, str] = {}
        self.specs: list[StepSpec] = []

    def execute(self, context: Any) -> dict[str, Any]:
        """Run the steps to their end; raise an exception if an exit code is not 0.

        If a later step fails, another try finds the outputs of the earlier ones.
        """
        works = self.works(context)
        for work in works:
            code = UNFINISHED
            while code == UNFINISHED:
                code, messages = self.run_step(work, context["ti"].map_index)
                self.hear(messages)
            if code:
                raise failure(code, messages.reason())
        return self.answer(works)

    def hear(self, messages: Follower) -> None:
        """Keep the address of the step's run in MLflow and the verdicts on models."""
        self.tracked_at = messages.tracked_at or self.tracked_at
        verdicts = {name: verdict.sentence for name, verdict in messages.judged.items()}
        self.verdicts = verdicts or self.verdicts

    def answer(self, works: Sequence[Work]) -> dict[str, Any]:
        """Return the value for XCom: outputs, publishable metrics and verdicts on models."""
        verdicts = {"verdicts": self.verdicts} if self.verdicts else {}
        metrics = {name: value for work in works for name, value in self.numbers(work).items()}
        return {"outputs": [work.spec.output for work in works], "metrics": metrics} | verdicts

    def variables_of(self, work: Work, *names: str) -> dict[str, str]:
        """Return the variables of a container or a pod: those that its step needs.

        Args:
            work: the step and its run.
            names: variables of the worker to forward, besides `CONFIDE_FORWARDED_ENVIRONMENT`.

        Raises:
            AirflowFailException: the step reads a ledger for which there is no reader.
        """
        forwarded = (*names, *os.environ.get("CONFIDE_FORWARDED_ENVIRONMENT", "").split())
        given = {name: os.environ[name] for name in forwarded if os.environ.get(name)}
        try:
            return work.environment(given, apart=True)
        except BadInput as error:
            raise failure(BAD_INPUT, str(error)) from None

    def works(self, context: Any) -> list[Work]:
        """Return the works of the task's steps, in the order in which they run."""
        named = self.named or NamedSteps(name="", steps=[(self.task_id, None)])
        works = [work_of(step, self.plan, context, point) for step, point in named["steps"]]
        self.specs = [work.spec for work in works]
        for spec in self.specs:
            self.log.info("Output: %s", spec.output)
        return works

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """Return the step's inputs and outputs; Airflow's OpenLineage provider calls this."""
        from dags.launcher.lineage import lineage_of  # needs the provider

        return lineage_of(self.specs) if self.specs else None

    def run_step(self, work: Work, map_index: int) -> tuple[int, Follower]:
        """Run the step once; return its exit code and its messages."""
        raise NotImplementedError

    def numbers(self, work: Work) -> dict[str, float]:
        """Return the result's publishable metrics, if this process can read the store."""
        return {}


class ProcessStep(StepOperator, BaseOperator):
    """The process launcher: runs a step as a process of the task environment's Python."""

    def __init__(self, *, plan: Plan, named: NamedSteps | None = None, **options: Any) -> None:
        super().__init__(plan=plan, named=named, **options)
        self.process: StepProcess | None = None

    def run_step(self, work: Work, map_index: int) -> tuple[int, Follower]:
        """Run the step, and write its output to the task's log."""
        self.process = StepProcess(
            work,
            channel_file(home(), work.context.run_key, self.task_id, map_index),
            home=home(),
            python=os.environ.get("CONFIDE_TASK_PYTHON") or str(TASK_PYTHON),
            server=fork_server.named(os.environ),
        )
        return self.process.run(lambda line: self.log.info("%s", line))

    def numbers(self, work: Work) -> dict[str, float]:
        """Return the last value of each publishable metric, or {} if the store is remote."""
        address = urlparse(store())
        if address.scheme != "file":
            return {}
        folder = Path(unquote(address.path)) / work.spec.output.removeprefix(STORE_SCHEME)
        metrics = json.loads((folder / "result.json").read_text())["metrics"]
        ordered = sorted(metrics, key=lambda metric: metric.get("step", 0))
        return {m["name"]: m["value"] for m in ordered if m["label"] in {"dp", "public"}}

    def on_kill(self) -> None:
        """End the step and its child processes by SIGTERM, then SIGKILL."""
        if self.process is not None:
            self.process.stop()


# --- how it ended


def failure(exit_code: int, reason: str) -> AirflowException:
    """Return the exception for a step's exit code; some exit codes prevent a retry.

    Args:
        exit_code: negative where a signal ended the process.
        reason: in one line.
    """
    if exit_code in _NEVER_RETRIED:
        how = f"exit code {exit_code}: {_NEVER_RETRIED[exit_code]}, not retried"
        error: AirflowException = AirflowFailException(f"{reason} ({how})")
    else:
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        error = AirflowException(f"{reason} ({how})")
    error.exit_code = exit_code
    return error


class MlflowRunLink(BaseOperatorLink):
    """The button to the task's run in MLflow, with ε, F1, exposure and settings."""

    name = "MLflow run"
    xcom_key = "mlflow_run"
    page = ""
    _menus = "?workflowType=machine_learning"  # selects MLflow's menus for models

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the address that the step sent; without one, Airflow shows no button."""
        run = str(getattr(operator, "tracked_at", ""))
        return run + self.page + self._menus if run else ""


class ReportLink(MlflowRunLink):
    """The button to the report's publishable edition, on the task that writes the report."""

    name = "Report"
    xcom_key = "report"
    page = "/artifacts/report/report.html"


StepOperator.operator_extra_links = (MlflowRunLink(),)
