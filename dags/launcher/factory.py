"""`step(...)`: the task that runs one step, by the deployment's launcher."""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from typing import Any

from airflow.sdk import BaseOperator

from dags.launcher import deployment
from dags.launcher.failures import say_what_failed
from dags.launcher.links import links
from dags.launcher.work import Plan
from dags.names import NAMES

TRAINING = "training"  # pool: as many models at a time as the machine has devices (locally 1)
LIGHT = "default_pool"

_OPERATORS = {
    "process": ("dags.launcher.process", "ProcessStep"),
    "docker": ("dags.launcher.docker", "DockerStep"),
    "kubernetes": ("dags.launcher.kubernetes", "KubernetesStep"),
}


def step(task_id: str, *, plan: Plan, **options: Any) -> BaseOperator:
    """Return the task that runs the step that `plan` names `task_id`.

    Args:
        task_id: the task's name in the plan.
        plan: from the run's parameters to its steps' specs; called when the task runs.
        options: any of BaseOperator's (`pool`, `trigger_rule`, `doc_md`), and `point`, the grid
            point of a mapped task.
    """
    options.setdefault("task_display_name", NAMES[task_id])
    module, name = _OPERATORS[deployment.launcher()]
    operator = getattr(import_module(module), name)
    task: BaseOperator = operator(task_id=task_id, plan=plan, **options)
    task.operator_extra_links = links(task_id)
    return task


def defaults() -> dict[str, Any]:
    """Return what all tasks share: a fault is tried again, twice, later and later.

    Bad input and an exceeded budget are not faults: they fail at once (`outcome.py`).
    """
    return {
        "owner": "confide",
        "retries": 2,
        "retry_delay": timedelta(seconds=10),
        "retry_exponential_backoff": True,
        "max_retry_delay": timedelta(minutes=5),
        "on_failure_callback": say_what_failed,
    }
