"""What one task has to do: the spec of its step, and the command that does it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from airflow.sdk.exceptions import AirflowSkipException

from dags.launcher import deployment
from tasks.protocol import RunContext, StepSpec, SweepPoint


class Plan(Protocol):
    """From a run's parameters to the specs of its steps, by task name."""

    def __call__(
        self, params: Mapping[str, Any], root: str, point: SweepPoint | None
    ) -> Mapping[str, StepSpec]:
        """Return the specs by task name; tasks that the settings switch off are absent."""


@dataclass(frozen=True)
class Work:
    """One step to start: its spec, and the run it belongs to."""

    spec: StepSpec
    context: RunContext

    def arguments(self) -> list[str]:
        """Return the step's command line after the interpreter's name."""
        return ["-m", "tasks", self.spec.step, "--spec", self.spec_uri()]

    def spec_uri(self) -> str:
        """Return the spec as a data: URI, so that it needs no shared folder to travel."""
        body = base64.b64encode(self.spec.model_dump_json().encode()).decode()
        return f"data:application/json;base64,{body}"

    def environment(self) -> dict[str, str]:
        """Return the variables that tell a step which run it is part of."""
        return {"CONFIDE_RUN_CONTEXT": self.context.model_dump_json(), "PYTHONUNBUFFERED": "1"}

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
    place = SweepPoint.model_validate(dict(point)) if point else None
    name = task_id.rpartition(".")[2]
    specs = plan(context["params"], deployment.store(), place)
    if name not in specs:
        raise AirflowSkipException(f"{name} is switched off in the settings")
    run = context["dag_run"]
    started = run.start_date or run.run_after
    return Work(
        spec=specs[name],
        context=RunContext(
            run_key=f"{run.dag_id}/{run.run_id}",
            run_name=f"{run.dag_id} {started:%Y-%m-%d %H:%M:%S}",
            task=name,
            point=place.name if place else "",
        ),
    )


def publishable(result: str) -> dict[str, float]:
    """Return the numbers of a result.json that anyone may see, each metric's last value."""
    metrics = json.loads(result)["metrics"]
    ordered = sorted(metrics, key=lambda metric: metric.get("step", 0))
    return {m["name"]: m["value"] for m in ordered if m["label"] in {"dp", "public"}}
