"""Where a task's numbers are: the buttons on its page in Airflow that lead to MLflow.

Airflow knows no MLflow. A step says where its run is, in a line of its own; whatever launcher
started the step hears that line, and Airflow keeps the address with the task when it ends.
"""

from __future__ import annotations

import re
from typing import Any

from airflow.sdk import BaseOperatorLink

from dags.launcher.outcome import message_of

_LINE = re.compile(r"MLflow: (https?://\S+)")
_REPORT = "/artifacts/report/report.html"
_TRAINING = "?workflowType=machine_learning"  # MLflow's menus for models, not for conversations


class MlflowRun(BaseOperatorLink):
    """The task's run: its ε, F1 and exposure, and the settings that it was given."""

    name = "MLflow run"
    xcom_key = "mlflow_run"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the address that the step said; empty when it said none, and no button then."""
        run = str(getattr(operator, "tracked_at", ""))
        return run + _TRAINING if run else ""


class Report(BaseOperatorLink):
    """The report that the last task of a run writes, in the edition that may be shown."""

    name = "Report"
    xcom_key = "report"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the page's address in MLflow; empty where MLflow has no server."""
        run = str(getattr(operator, "tracked_at", ""))
        return run + _REPORT + _TRAINING if run else ""


def links(task_id: str) -> list[BaseOperatorLink]:
    """Return the buttons of a task."""
    return [MlflowRun(), Report()] if task_id == "report" else [MlflowRun()]


def tracked_at(line: str) -> str:
    """Return the address of the run if this line of a step's names it, else ''."""
    found = _LINE.fullmatch(message_of(line.strip()))
    return found[1] if found else ""
