"""Train over a grid, and draw ε and F1 against each setting.

The grid is in a section of the form. All steps before the private training run once and are
shared by the points, and with `dp_bert` if the settings agree. **Every private training, with each
of its seeds, is a separate release and is charged.** Points that differ only in fine-tuning share
one training. With *Epochs from: checkpoints*, points that differ only in epochs share one, too.
Fine-tuning seeds and folds on public labels are free. The comparison models are fine-tuned and
measured in the same way and have no privacy cost: models of public text, unchanged checkpoints, and
models trained without privacy, which stay with the operator. Causal models are compared by the
perplexity of private text and are not fine-tuned. A point that fails does not stop the others: the
report shows the finished points, and the run is marked as failed.

A sweep of more than 256 points is divided into pages. Each run starts the next page at its end,
and the last run writes the report on all points. The pool limits how many models train at a time.

To run the sweep on a schedule, set `CONFIDE_SWEEP_SCHEDULE` (cron) and `CONFIDE_SWEEP_SETTINGS` (a
JSON file).
"""

from typing import Any

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import Param, TriggerRule, dag

from dags.experiment import RunPlan, experiment
from dags.launcher.form import THIS_PAGE, form, form_defaults, schedule, with_form
from dags.launcher.outcome import outcome
from dags.launcher.step_operator import PAGE_MARK, defaults, shown
from dp_core.config.fields import GRID
from tasks.protocol.points import TRAINING_AXES
from tasks.protocol.settings import PAGE
from tasks.protocol.sweep import SweepSettings

PLAN = RunPlan(SweepSettings)

FORM = form(SweepSettings, form_defaults("SWEEP"))
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
    section=GRID,
    description=f"A run holds {PAGE:,} points; a larger sweep continues in further runs, each "
    "started by the previous one. Leave it at 1.",
)


class StartNextPage(TriggerDagRunOperator):
    """Starts the run of a sweep's next page, if there is one."""

    def execute(self, context: Any) -> None:
        """Start the run, which is named after the sweep's first run."""
        params = context["params"]
        _, number, last = PLAN.page(params)
        if last:
            self.log.info("This run holds the sweep's last points.")
            return
        first = context["run_id"].partition(PAGE_MARK)[0]
        self.trigger_run_id = f"{first}{PAGE_MARK}{number + 1}"
        self.conf = {**params, THIS_PAGE: number + 1}
        super().execute(context)


@dag(
    dag_id="dp_sweep",
    dag_display_name="dp_sweep · ε and F1 over a grid",
    description="Pre-training and fine-tuning over a grid, seeds and folds, charged per release",
    schedule=schedule("SWEEP"),
    catchup=False,
    max_active_runs=1,
    default_args=defaults(),
    tags=["confide", "differential privacy", "sweep"],
    doc_md=__doc__,
)
def dp_sweep() -> None:
    """Define the graph of one page of the sweep."""
    drawn = experiment(PLAN)
    with drawn.reporting:
        start_page = StartNextPage(
            task_id="start_page",
            **shown("start_page"),
            trigger_dag_id="dp_sweep",
            logical_date=None,
            skip_when_already_exists=True,
            trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS,
            retries=0,
        )
        drawn.measured >> start_page

        # The report lists the points that did not fail; the run still fails.
        [*drawn.last, start_page] >> outcome(PLAN.last_task)


with_form(dp_sweep(), FORM)
