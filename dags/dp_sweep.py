"""The DAG of a sweep: trainings of `dp_bert` over a grid, seeds and folds (paper's Figs. 1, 2)."""

from __future__ import annotations

from typing import Any

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import Param, TriggerRule, dag, get_current_context, task
from airflow.sdk.exceptions import AirflowSkipException

from dags import launcher
from dags.experiment import THIS_PAGE, RunPlan, experiment
from dags.launcher.step_operator import PAGE_MARK
from tasks.protocol.points import TRAINING_AXES
from tasks.protocol.settings import PAGE
from tasks.protocol.sweep import SweepSettings

PLAN = RunPlan(SweepSettings)

FORM = launcher.form(SweepSettings, launcher.form_defaults("SWEEP"))
for coordinate in TRAINING_AXES:
    FORM[coordinate].description = (
        "Points of the grid take their value from the grid above. Only listed points that do not "
        "set it use this value."
    )
FORM[THIS_PAGE] = Param(
    1,
    type="integer",
    allOf=[{"minimum": 1}],
    title="Page",
    section=FORM["sweep_points"].schema["section"],
    description=f"A run holds {PAGE:,} points; a larger sweep continues in further runs, each "
    "started by the previous one. Leave it at 1.",
)


@dag(
    dag_id="dp_sweep",
    dag_display_name="dp_sweep · ε and F1 over a grid",
    description="Pre-training and fine-tuning over a grid, seeds and folds, charged per release",
    schedule=launcher.schedule("SWEEP"),
    catchup=False,
    max_active_runs=1,
    default_args=launcher.defaults(),
    tags=["confide", "differential privacy", "sweep"],
    doc_md="""
### Train over a grid, and draw ε and F1 against each setting

The grid is in the form's first section. All steps before the private training run once and are
shared by the points, and with `dp_bert` if the settings agree. **Every private training, with each
of its seeds, is a separate release and is charged.** Points that differ only in fine-tuning share
one training. With *Epochs from: checkpoints*, points that differ only in epochs share one, too.
Fine-tuning seeds and folds on public labels are free. The comparison models are fine-tuned and
measured in the same way and have no privacy cost: models of public text, unchanged checkpoints, and
models trained without privacy, which stay with the operator. Causal models are compared by the
perplexity of private text and are not fine-tuned. A point that fails does not stop the others: the
report shows the finished points, and the run is marked as failed.

A sweep of more than 1,024 points is divided into pages. Each run starts the next page at its end,
and the last run writes the report on all points. The pool limits how many models train at a time.

To run the sweep on a schedule, set `CONFIDE_SWEEP_SCHEDULE` (cron) and `CONFIDE_SWEEP_SETTINGS` (a
JSON file).
""",
)
def dp_sweep() -> None:
    """Define the graph of one page of the sweep."""
    drawn = experiment(PLAN, "exposure", more_fronts=True)

    @task(
        trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS,
        retries=0,
        task_display_name="Lay out the next page",
        doc_md="Skipped if this run holds the last points.",
    )
    def next_page() -> dict[str, Any]:
        context = get_current_context()
        _, number, last = PLAN.page(context["params"])
        if last:
            raise AirflowSkipException("these are the last of the points")
        first = context["run_id"].partition(PAGE_MARK)[0]
        return {
            "run_id": f"{first}{PAGE_MARK}{number + 1}",
            "conf": {**context["params"], THIS_PAGE: number + 1},
        }

    following = next_page()
    drawn.measured >> following
    TriggerDagRunOperator(
        task_id="start_page",
        task_display_name="Start the next page",
        trigger_dag_id="dp_sweep",
        trigger_run_id=following["run_id"],
        conf=following["conf"],
        logical_date=None,
        skip_when_already_exists=True,
        doc_md="Starts the sweep's next page, which waits for the end of this run.",
    )

    # The report lists the points that did not fail; the run still fails.
    [*drawn.last, following] >> launcher.outcome("report", "next_page")


launcher.with_form(dp_sweep(), FORM)
